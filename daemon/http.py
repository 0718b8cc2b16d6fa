"""Serves HTTP on a Unix socket or a TCP address: bounded connections, and no names of others over TCP."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from hicache.daemon.admin_api import json_errors
from hicache.daemon.listeners import address_of

SHUTDOWN_TIMEOUT_S = 0.5
CONNECTIONS_MAX = 128  # one more drops the oldest: a probe asks at once, whoever only holds connections does not

_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::[0-9]{1,5})?")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_own_host(header: str | None) -> bool:
    """Whether a Host header can be meant for this daemon.

    A web page can make a browser on this machine send requests here under a name that its owner points at 127.0.0.1
    (DNS rebinding). Such a request carries that name; honest ones carry an IP address or localhost.
    """
    match = _HOST.fullmatch(header or "")
    if match is None:
        return False
    host = match[1].strip("[]")
    if host.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class HttpServer:
    """Serves some routes at one address."""

    def __init__(self, routes: Sequence[web.RouteDef], *, on_foreign_host: Callable[[], None]) -> None:
        self._routes = routes
        self._on_foreign_host = on_foreign_host
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> str:
        """Serves at ``listener``, which stays the caller's; returns its address."""
        is_unix = listener.family == socket.AF_UNIX
        app = web.Application(middlewares=[json_errors] if is_unix else [self._check_host, json_errors])
        app.add_routes(self._routes)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        await self._runner.setup()
        # Not create_unix_server, which removes the file of the socket at its end: that of a passed one is not ours.
        self._accepting = await asyncio.get_running_loop().create_server(_bounded(self._runner), sock=listener)
        return address_of(listener)

    async def stop(self) -> None:
        """Closes idle connections at once, busy ones after a moment. Idempotent."""
        if self._accepting is not None:
            self._accepting.close()
            self._accepting = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _check_host(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_own_host(request.headers.get("Host")):
            self._on_foreign_host()
            return web.Response(status=421, text="the Host header must be an IP address or localhost\n")
        return await handler(request)


def _bounded(runner: web.AppRunner) -> Callable[[], asyncio.Protocol]:
    """Makes the protocol of each new connection, at the cost of the oldest where there are CONNECTIONS_MAX."""
    server = runner.server
    assert server is not None, "the runner was set up"

    def drop_oldest() -> None:
        connections = [connection for connection in server.connections if connection.transport is not None]
        for connection in connections[: max(0, len(connections) - CONNECTIONS_MAX)]:
            connection.force_close()

    def connect() -> asyncio.Protocol:
        asyncio.get_running_loop().call_later(0, drop_oldest)  # when this one is among the server's connections
        return server()

    return connect
