"""The gRPC end of hicached: binds what was asked for and nothing else, and stops without cutting transfers short."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import cast

import grpc

from hicache.daemon.config import DaemonConfig
from hicache.daemon.service import HiCachedService
from hicache.daemon.sessions import CALLS_PER_SESSION_MAX, Sessions
from hicache.daemon.settings import HostPort
from hicache.daemon.socket_lock import check_tcp_free, created_with_mode, remove_stale_socket
from hicache.errors import ConfigError
from hicache.wire.hicached_pb2_grpc import HiCachedServicer, add_HiCachedServicer_to_server
from hicache.wire.protocol import MESSAGE_BYTES_MAX, server_options

DRAIN_S = 2.0  # for calls that run when the stop begins
GRACE_S = 0.5  # for what is left then: streams of sessions, and calls that nobody reads

_SPARE_CALLS = 256  # hellos, and calls that are about to be refused


class GrpcServer:
    """Owns the grpc.aio server. Event loop only."""

    def __init__(self, config: DaemonConfig, service: HiCachedService, sessions: Sessions) -> None:
        self._config = config
        self._service = service
        self._sessions = sessions
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Binds and serves. Returns the TCP address with its real port, or "" without TCP.

        Raises ConfigError or StorageInUse when an address is taken. Needs the lock of the socket.
        """
        config = self._config
        options = server_options(
            message_bytes_max=MESSAGE_BYTES_MAX, keepalive_ms=round(config.session_keepalive_s * 1000)
        )
        calls_max = config.sessions_max * (CALLS_PER_SESSION_MAX + 1) + _SPARE_CALLS
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=calls_max)
        # The generated base class wants contexts that are synchronous and asynchronous at once.
        add_HiCachedServicer_to_server(cast(HiCachedServicer, self._service), server)
        remove_stale_socket("socket", config.socket)
        with created_with_mode(config.socket_mode_bits):
            _bind(server, "socket", f"unix:{config.socket}")
        self._server = server
        os.chmod(config.socket, config.socket_mode_bits)
        listen = self._bind_tcp(server, config.listen_address)
        await server.start()
        return listen

    async def stop(self) -> None:
        """Refuses new work, lets running calls end, then ends the sessions and the connections."""
        self._sessions.stop_admitting()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.wait_idle(), DRAIN_S)
        self._sessions.close()
        if self._server is not None:
            await self._server.stop(GRACE_S)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._config.socket)

    def _bind_tcp(self, server: grpc.aio.Server, address: HostPort | None) -> str:
        if address is None:
            return ""
        check_tcp_free("listen", address.host, address.port)
        port = _bind(server, "listen", str(address))
        return str(HostPort(address.host, port))


def _bind(server: grpc.aio.Server, setting: str, address: str) -> int:
    """The bound port. Old versions of gRPC return 0 where newer ones raise."""
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(setting, address, f"an address that can be bound ({error})") from error
    if port == 0:
        raise ConfigError(setting, address, "an address that can be bound")
    return port
