"""Accepts connections of whoever comes: each is served in a task, and those that have not said who they are are few."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable

import structlog

from hicache.daemon.tasks import end
from hicache.notices import Notices

HELLO_TIMEOUT_S = 5.0
STRANGERS_MAX = 64  # connections that have not said a whole hello; one more drops the oldest of them
BACKLOG = 4096  # clients that have connected and are not accepted yet; for one more, connect fails at once
ACCEPT_RETRY_S = 0.1

_ACCEPT_BATCH = STRANGERS_MAX // 4

log = structlog.get_logger("hicache.daemon.acceptor")


class Acceptor:
    """One listening socket. Event loop only."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        serve: Callable[[socket.socket, Callable[[], None]], Awaitable[None]],
        *,
        on_drop: Callable[[], None] = lambda: None,
    ) -> None:
        """``listener`` is bound and listening, and stays the caller's. ``name`` is for the log.

        ``serve`` gets each connection, which is closed when it returns, and what it is to call once the hello is there.
        ``on_drop`` is told of a stranger who had to go.
        """
        self._name = name
        self._listener = listener
        self._serve = serve
        self._on_drop = on_drop
        self._notices = Notices(logging.getLogger(__name__))
        self._strangers: dict[asyncio.Task[None], None] = {}  # those without a whole hello, oldest first
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to accept."""
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self, *, timeout_s: float) -> None:
        """Stops accepting, gives what is served ``timeout_s`` to end, and cancels the rest."""
        await end(self._accepting)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _introduced(self) -> None:
        """The current task serves a stranger no more."""
        if (task := asyncio.current_task()) is not None:
            self._strangers.pop(task, None)

    async def _accept(self) -> None:
        for number in itertools.count(1):
            try:
                connection, _ = self._listener.accept()  # not the loop's: cancelled late, that one loses a connection
            except BlockingIOError:
                await readable(self._listener)
                continue
            except OSError as error:  # out of descriptors, or the client has gone already: the next one may do better
                self._notices.warning("accept", "the %s socket cannot accept: %s", self._name, error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._make_room_for_stranger()
            task = asyncio.create_task(self._serve_and_close(connection))
            self._tasks.add(task)
            self._strangers[task] = None
            task.add_done_callback(self._done)
            if number % _ACCEPT_BATCH == 0:
                await asyncio.sleep(0)  # most hellos are there already: whoever said it is no stranger any more

    async def _serve_and_close(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with connection:
            await self._serve(connection, self._introduced)

    def _make_room_for_stranger(self) -> None:
        """Drops the oldest connection that has not said who it is, if there are too many. Honest ones speak at once."""
        if len(self._strangers) < STRANGERS_MAX:
            return
        oldest = next(iter(self._strangers))
        del self._strangers[oldest]
        oldest.cancel()
        self._on_drop()
        self._notices.warning("strangers", "more than %d %s connections without a hello", STRANGERS_MAX, self._name)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("connection failed", socket=self._name, exc_info=error)


async def readable(connection: socket.socket) -> None:
    """Returns when there is something to read, or to accept."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


async def writable(connection: socket.socket) -> None:
    """Returns when something can be sent."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(connection)


async def say(connection: socket.socket, answer: bytes) -> None:
    """Sends a few bytes. A client that has gone, or does not read, misses them."""
    with contextlib.suppress(OSError, TimeoutError):
        if isinstance(connection, ssl.SSLSocket):  # asyncio takes none, and a buffer that nothing was sent to has room
            connection.send(answer)
            return
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await asyncio.get_running_loop().sock_sendall(connection, answer)
