"""The sockets on which objects are put and got (hicache/wire/bulk.py): who may connect, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from hicache.daemon.acceptor import HELLO_TIMEOUT_S, Acceptor, readable, say
from hicache.daemon.bulk_calls import BulkCalls, refused
from hicache.daemon.bulk_connection import BulkConnection
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session, Sessions
from hicache.notices import Notices
from hicache.wire.bulk import BULK_HELLO, BULK_MAGIC
from hicache.wire.protocol import RefusalCode

WATCH_S = 0.1  # how often connections are looked at


class BulkSocket:
    """Accepts connections, and serves each in a thread of its own until its session ends. Event loop only.

    There are as many threads as connections: BULK_CONNECTIONS_PER_SESSION_MAX for each of sessions_max sessions. They
    are not joined at the end of the process: one that waits for a stuck store does not hold it up.
    """

    def __init__(self, listeners: list[socket.socket], sessions: Sessions, calls: BulkCalls) -> None:
        """``listeners`` are bound and listening, and stay the caller's."""
        self._sessions = sessions
        self._calls = calls
        self._acceptors = [Acceptor("bulk", listener, self._serve) for listener in listeners]
        self._notices = Notices(logging.getLogger(__name__))
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to accept."""
        for acceptor in self._acceptors:
            acceptor.start()
        self._watching = asyncio.create_task(self._watch())

    @property
    def busy_count(self) -> int:
        """Calls that run."""
        return sum(connection.is_busy for session in self._sessions for connection in session.connections)

    async def stop(self) -> None:
        """Stops accepting and ends every connection."""
        for acceptor in self._acceptors:
            await acceptor.stop(timeout_s=0)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for session in self._sessions:
            session.end_connections()

    async def _watch(self) -> None:
        """Ends what its client keeps waiting, or what is past its deadline."""
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = time.monotonic()
            for session in self._sessions:
                for connection in session.connections:
                    connection.end_if_overdue(now_s)

    async def _serve(self, connection: socket.socket, introduced: Callable[[], None]) -> None:
        """Reads the hello, and leaves the rest to a thread."""
        loop = asyncio.get_running_loop()
        try:
            session = await self._session_of(connection)
            introduced()
            session.check_room_for_connection()
        except Refusal as refusal:
            self._notices.warning("refused", "a bulk connection was refused: %s", refusal)
            await say(connection, refused(refusal))
            return
        bulk = BulkConnection(socket.socket(fileno=connection.detach()))
        session.connect(bulk)

        def serve() -> None:
            self._calls.serve(bulk, session)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(session.disconnect, bulk)

        try:
            threading.Thread(target=serve, name="hicached-bulk", daemon=True).start()
        except BaseException:
            session.disconnect(bulk)
            bulk.close()
            raise

    async def _session_of(self, connection: socket.socket) -> Session:
        """The session that the connection's hello names. Raises Refusal."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await _receive_hello(connection)
        except TimeoutError as error:
            raise Refusal(RefusalCode.MALFORMED, f"no complete hello within {HELLO_TIMEOUT_S:g} s") from error
        magic, secret = BULK_HELLO.unpack(hello)
        if magic != BULK_MAGIC:
            raise Refusal(RefusalCode.MALFORMED, "this is the bulk socket of hicached, and that was no hello")
        return self._sessions.find(secret)


async def _receive_hello(connection: socket.socket) -> bytes:
    received = b""
    while len(received) < BULK_HELLO.size:
        try:
            part = connection.recv(BULK_HELLO.size - len(received))
        except BlockingIOError:
            await readable(connection)
            continue
        except OSError as error:
            raise Refusal(RefusalCode.MALFORMED, f"the connection broke: {error}") from error
        if not part:
            raise Refusal(
                RefusalCode.MALFORMED, f"the connection ended after {len(received)} of {BULK_HELLO.size} bytes"
            )
        received += part
    return received
