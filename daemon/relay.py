"""Hands connections of a passed socket on to gRPC, which takes no descriptors and listens only where it has bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from hicache.daemon.acceptor import Acceptor

RELAYED_MAX = 1024  # connections at a time; one more is closed at once
PART_BYTES = 64 * 1024


class Relay:
    """Accepts at ``listener`` and copies bytes to and from the Unix socket ``target``. Event loop only.

    What is relayed from TCP comes to gRPC from an abstract address, so that it is not taken for somebody of this node.
    """

    def __init__(self, name: str, listener: socket.socket, target: str) -> None:
        """``listener`` is bound and listening, and stays the caller's."""
        self._target = target
        self._is_remote = listener.family != socket.AF_UNIX
        self._acceptor = Acceptor(name, listener, self._serve)
        self._numbers = iter(range(1 << 62))
        self._count = 0

    def start(self) -> None:
        """Begins to accept."""
        self._acceptor.start()

    async def stop(self) -> None:
        """Stops accepting, and cuts what is relayed: gRPC has ended its connections before."""
        await self._acceptor.stop(timeout_s=0)

    async def _serve(self, connection: socket.socket, introduced: Callable[[], None]) -> None:
        introduced()  # gRPC has bounds of its own on those who say nothing
        if self._count >= RELAYED_MAX:
            return
        self._count += 1
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner:
                inner.setblocking(False)
                if self._is_remote:
                    inner.bind(f"\0hicached-{os.getpid()}-remote-{next(self._numbers)}")
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.get_running_loop().sock_connect(inner, self._target)
                async with asyncio.TaskGroup() as directions:
                    directions.create_task(_copy(connection, inner))
                    directions.create_task(_copy(inner, connection))
        except* OSError:
            pass  # one side broke: both are closed
        finally:
            self._count -= 1


async def _copy(source: socket.socket, target: socket.socket) -> None:
    """Until ``source`` ends; then ``target`` hears the end."""
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(PART_BYTES))
    while count := await loop.sock_recv_into(source, buffer):
        await loop.sock_sendall(target, buffer[:count])
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
