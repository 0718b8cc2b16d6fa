"""Hands connections of a passed socket on to gRPC, which takes no descriptors and listens only where it has bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from hicache.daemon.acceptor import Acceptor

STRANGERS_MAX = 1024  # connections beside those of sessions; gRPC ends one that says nothing after HANDSHAKE_S
PART_BYTES = 64 * 1024
TAKE_S = 30.0  # for a side to take a part


class Relay:
    """Accepts at ``listener`` and copies bytes to and from the Unix socket ``target``. Event loop only.

    What is relayed from TCP comes to gRPC from an abstract address, so that it is not taken for somebody of this node.
    """

    def __init__(self, name: str, listener: socket.socket, target: str, *, connections_max: int) -> None:
        """``listener`` is bound and listening, and stays the caller's. Of more connections one is closed at once."""
        self._target = target
        self._is_remote = listener.family != socket.AF_UNIX
        self._acceptor = Acceptor(name, listener, self._serve)
        self._numbers = iter(range(1 << 62))
        self._count = 0
        self._connections_max = connections_max

    def start(self) -> None:
        """Begins to accept."""
        self._acceptor.start()

    async def stop(self) -> None:
        """Stops accepting, and cuts what is relayed: gRPC has ended its connections before."""
        await self._acceptor.stop(timeout_s=0)

    async def _serve(self, connection: socket.socket, introduced: Callable[[], None]) -> None:
        introduced()  # gRPC has bounds of its own on those who say nothing
        if self._count >= self._connections_max:
            return
        self._count += 1
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner:
                inner.setblocking(False)
                if self._is_remote:
                    inner.bind(f"\0hicached-{os.getpid()}-remote-{next(self._numbers)}")
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.get_running_loop().sock_connect(inner, self._target)
                await _copy_both(connection, inner)
        except OSError:
            pass  # one side broke: both are closed
        finally:
            self._count -= 1


async def _copy_both(connection: socket.socket, inner: socket.socket) -> None:
    """Until gRPC ends it, which it does when it hears that the client has: a client may stay for as long as it likes.

    Raises OSError.
    """
    to_grpc = asyncio.create_task(_copy(connection, inner))
    try:
        await _copy(inner, connection)
    finally:
        to_grpc.cancel()
        await asyncio.gather(to_grpc, return_exceptions=True)


async def _copy(source: socket.socket, target: socket.socket) -> None:
    """Until ``source`` ends, or breaks; then ``target`` hears the end. Raises OSError."""
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(PART_BYTES))
    try:
        while count := await loop.sock_recv_into(source, buffer):
            async with asyncio.timeout(TAKE_S):
                await loop.sock_sendall(target, buffer[:count])
    finally:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
