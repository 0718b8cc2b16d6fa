"""The gRPC end of hicached: binds what was asked for and nothing else, and stops without cutting transfers short."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import cast

import grpc

from hicache.daemon.bulk_socket import BulkSocket
from hicache.daemon.config import DaemonConfig
from hicache.daemon.service import HiCachedService
from hicache.daemon.sessions import CALLS_PER_SESSION_MAX, Sessions
from hicache.daemon.settings import HostPort
from hicache.daemon.socket_lock import check_tcp_free, created_with_mode, remove_stale_socket
from hicache.daemon.tls import ServerTls
from hicache.errors import ConfigError
from hicache.wire.hicached_pb2_grpc import HiCachedServicer, add_HiCachedServicer_to_server
from hicache.wire.protocol import MESSAGE_BYTES_MAX, server_options

DRAIN_S = 2.0  # for calls that run when the stop begins
GRACE_S = 0.5  # for what is left then: streams of sessions, and calls that nobody reads

# Connections, not calls, are what a stranger without a token can have: those that do not speak HTTP/2, or call nothing,
# are closed. That of a session has its stream, and is never idle.
HANDSHAKE_S = 5.0
IDLE_CONNECTION_S = 30.0

_SPARE_CALLS = 256  # hellos, and calls that are about to be refused


class GrpcServer:
    """Owns the grpc.aio server. Event loop only."""

    def __init__(
        self,
        config: DaemonConfig,
        service: HiCachedService,
        sessions: Sessions,
        bulk: BulkSocket,
        tls: ServerTls | None = None,
    ) -> None:
        self._config = config
        self._service = service
        self._sessions = sessions
        self._bulk = bulk
        self._tls = tls
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Binds and serves. Returns the TCP address with its real port, or "" without TCP.

        Raises ConfigError or StorageInUse when an address is taken. Needs the lock of the socket.
        """
        config = self._config
        options = server_options(
            message_bytes_max=MESSAGE_BYTES_MAX, keepalive_ms=round(config.session_keepalive_s * 1000)
        )
        options += _bounds_on_strangers(config.sessions_max)
        calls_max = config.sessions_max * (CALLS_PER_SESSION_MAX + 1) + _SPARE_CALLS
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=calls_max)
        # The generated base class wants contexts that are synchronous and asynchronous at once.
        add_HiCachedServicer_to_server(cast(HiCachedServicer, self._service), server)
        remove_stale_socket("socket", config.socket)
        with created_with_mode(config.socket_mode_bits):
            _bind("socket", f"unix:{config.socket}", server.add_insecure_port)
        self._server = server
        os.chmod(config.socket, config.socket_mode_bits)
        listen = self._bind_tcp(server, config.listen_address)
        await server.start()
        return listen

    async def stop(self) -> None:
        """Refuses new work, lets running calls end, then ends the sessions and the connections."""
        self._sessions.stop_admitting()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(self._service.wait_idle(), self._bulk.wait_idle()), DRAIN_S)
        self._sessions.close()
        if self._server is not None:
            await self._server.stop(GRACE_S)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._config.socket)

    def _bind_tcp(self, server: grpc.aio.Server, address: HostPort | None) -> str:
        if address is None:
            return ""
        check_tcp_free("listen", address.host, address.port)
        port = _bind("listen", str(address), self._add_tcp_port(server))
        return str(HostPort(address.host, port))

    def _add_tcp_port(self, server: grpc.aio.Server) -> Callable[[str], int]:
        if self._tls is None:
            return server.add_insecure_port
        credentials = self._tls.grpc_credentials()
        return lambda address: server.add_secure_port(address, credentials)


def _bounds_on_strangers(sessions_max: int) -> list[tuple[str, int]]:
    """gRPC options. One process may hold every session over one connection, so that many streams it must carry."""
    return [
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_CONNECTION_S * 1000)),
        ("grpc.max_concurrent_streams", sessions_max + 2 * CALLS_PER_SESSION_MAX),
    ]


def _bind(setting: str, address: str, add_port: Callable[[str], int]) -> int:
    """The bound port. Old versions of gRPC return 0 where newer ones raise."""
    try:
        port = add_port(address)
    except RuntimeError as error:
        raise ConfigError(setting, address, f"an address that can be bound ({error})") from error
    if port == 0:
        raise ConfigError(setting, address, "an address that can be bound")
    return port
