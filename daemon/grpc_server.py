"""The gRPC end of hicached: binds what was asked for and nothing else."""

from __future__ import annotations

import os
import socket
from typing import cast

import grpc

from hicache.daemon.acceptor import BACKLOG
from hicache.daemon.config import DaemonConfig
from hicache.daemon.listeners import Listeners
from hicache.daemon.relay import STRANGERS_MAX, Relay
from hicache.daemon.service import HiCachedService
from hicache.daemon.sessions import CALLS_PER_SESSION_MAX, Sessions
from hicache.daemon.settings import HostPort
from hicache.daemon.socket_lock import check_tcp_free, created_with_mode, remove_stale_socket
from hicache.daemon.tls import ServerTls
from hicache.errors import ConfigError
from hicache.wire.hicached_pb2_grpc import HiCachedServicer, add_HiCachedServicer_to_server
from hicache.wire.protocol import MESSAGE_BYTES_MAX, server_options

GRACE_S = 0.5  # for what is left when the daemon has drained: streams of sessions, and calls that nobody reads

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
        listeners: Listeners,
        tls: ServerTls | None = None,
    ) -> None:
        self._config = config
        self._listeners = listeners
        self._relays: list[Relay] = []
        self._own_sockets: list[str] = []
        self._service = service
        self._sessions = sessions
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
        self._server = server
        passed = self._listeners.passed("socket", config.socket)
        if passed is None:
            self._bind_unix(server, config.socket)
        else:
            self._bind_relayed(server, "socket", passed, config.socket + ".grpc")
        listen = self._bind_tcp(server, config.listen_address)
        await server.start()
        return listen

    async def stop(self) -> None:
        """Ends the sessions, what still runs, and the connections."""
        self._sessions.close()
        if self._server is not None:
            with self._listeners.files.keeping_others():
                await self._server.stop(GRACE_S)
        for relay in self._relays:
            await relay.stop()
        for path in self._own_sockets:
            self._listeners.files.remove(path)

    def _bind_unix(self, server: grpc.aio.Server, path: str) -> None:
        remove_stale_socket("socket", path)
        with created_with_mode(self._config.socket_mode_bits):
            _bind(server, "socket", f"unix:{path}")
        self._own_sockets.append(path)
        self._listeners.files.note(path)
        os.chmod(path, self._config.socket_mode_bits)

    def _bind_relayed(
        self,
        server: grpc.aio.Server,
        setting: str,
        passed: socket.socket,
        inner: str,
        tls: ServerTls | None = None,
    ) -> None:
        """Serves ``passed`` by way of ``inner``, a Unix socket that nobody else may open."""
        remove_stale_socket("socket", inner)
        with created_with_mode(0o600):
            _bind(server, setting, f"unix:{inner}", tls)
        self._own_sockets.append(inner)
        self._listeners.files.note(inner)
        passed.listen(BACKLOG)
        relay = Relay(setting, passed, inner, connections_max=self._config.sessions_max + STRANGERS_MAX)
        relay.start()
        self._relays.append(relay)

    def _bind_tcp(self, server: grpc.aio.Server, address: HostPort | None) -> str:
        if address is None:
            return ""
        passed = self._listeners.passed("listen", str(address))
        if passed is not None:
            self._bind_relayed(server, "listen", passed, self._config.socket + ".tcp", self._tls)
            return str(HostPort(*passed.getsockname()[:2]))
        check_tcp_free("listen", address.host, address.port)
        port = _bind(server, "listen", str(address), self._tls)
        return str(HostPort(address.host, port))


def _bounds_on_strangers(sessions_max: int) -> list[tuple[str, int]]:
    """gRPC options. One process may hold every session over one connection, so that many streams it must carry."""
    return [
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_CONNECTION_S * 1000)),
        ("grpc.max_concurrent_streams", sessions_max + 2 * CALLS_PER_SESSION_MAX),
    ]


def _bind(server: grpc.aio.Server, setting: str, address: str, tls: ServerTls | None = None) -> int:
    """The bound port. Old versions of gRPC return 0 where newer ones raise."""
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.grpc_credentials())
    except RuntimeError as error:
        raise ConfigError(setting, address, f"an address that can be bound ({error})") from error
    if port == 0:
        raise ConfigError(setting, address, "an address that can be bound")
    return port
