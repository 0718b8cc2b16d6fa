"""The sockets on which objects are put and got (hicache/wire/bulk.py): who may connect, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from hicache.daemon.acceptor import HELLO_TIMEOUT_S, Acceptor, readable, say
from hicache.daemon.bulk_calls import BulkCalls, refused
from hicache.daemon.bulk_connection import BulkConnection
from hicache.daemon.handshakes import Handshakes, is_plain
from hicache.daemon.peers import PeerTickets
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session, Sessions
from hicache.daemon.tasks import end
from hicache.daemon.tls import ServerTls
from hicache.notices import Notices
from hicache.wire.bulk import BULK_ACCEPTED, BULK_HELLO, BULK_MAGIC, PEER_MAGIC
from hicache.wire.protocol import RefusalCode
from hicache.workers import QueueFull, Workers

THREAD_LIMITS = "raise the limit on its tasks (TasksMax=, pids.max of the container, ulimit -u)"
WATCH_S = 0.1  # how often connections are looked at
STARTS_MAX = 4096  # connections that wait for their threads


class BulkSocket:
    """Accepts connections, and serves each in a thread of its own until its session ends. Event loop only.

    There are as many threads as connections: BULK_CONNECTIONS_PER_SESSION_MAX for each of sessions_max sessions. They
    are not joined at the end of the process: one that waits for a stuck store does not hold it up.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        sessions: Sessions,
        calls: BulkCalls,
        *,
        tls: ServerTls | None = None,
        peer_tickets: PeerTickets | None = None,
    ) -> None:
        """``listeners`` are bound and listening, and stay the caller's. ``tls`` is for those of TCP."""
        self._sessions = sessions
        self._calls = calls
        self._tickets = peer_tickets or PeerTickets()
        self._handshakes = None if tls is None else Handshakes(tls)
        self._acceptors = [
            Acceptor("bulk", listener, self._serve if is_plain(listener, tls) else self._serve_over_tls)
            for listener in listeners
        ]
        self._notices = Notices(logging.getLogger(__name__))
        self._starting = Workers("hicached-bulk-start", threads=1, queue_max=STARTS_MAX)
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
        await end(self._watching)
        self._starting.close(timeout_s=0)
        for session in self._sessions:
            session.end_connections()
        if self._handshakes is not None:
            self._handshakes.close()

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
        session = await self._session_of(connection, introduced)
        if session is not None:
            await self._start_thread(session, socket.socket(fileno=connection.detach()))

    async def _serve_over_tls(self, connection: socket.socket, introduced: Callable[[], None]) -> None:
        assert self._handshakes is not None, "there is a certificate"
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                secure = await self._handshakes.shake(connection)
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            self._notices.warning("tls", "a bulk connection ended in its TLS handshake: %s", repr(error))
            return
        session: Session | None = None
        try:
            session = await self._session_of(secure, introduced)
        finally:
            if session is None:
                secure.close()
        if session is not None:
            await self._start_thread(session, secure)

    async def _session_of(self, connection: socket.socket, introduced: Callable[[], None]) -> Session | None:
        """The session of a new connection, with room for it; None: the connection has its answer, and is over."""
        try:
            magic, secret = await self._hello_of(connection)
            if magic == PEER_MAGIC:
                await say(connection, BULK_ACCEPTED + self._tickets.issue(connection))
                return None
            session = self._sessions.find(secret)
            introduced()
            session.check_room_for_connection()
        except Refusal as refusal:
            self._notices.warning("refused", "a bulk connection was refused: %s", refusal)
            await say(connection, refused(refusal))
            return None
        return session

    async def _start_thread(self, session: Session, connection: socket.socket) -> None:
        """Takes ``connection`` over. Where no thread can be had, it is refused.

        Whoever starts a thread waits until it runs: not the event loop.
        """
        loop = asyncio.get_running_loop()
        bulk = BulkConnection(connection)
        session.connect(bulk)

        def serve() -> None:
            self._calls.serve(bulk, session)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(session.disconnect, bulk)

        thread = threading.Thread(target=serve, name="hicached-bulk", daemon=True)
        starting: Future[None] | None = None
        try:
            starting = self._starting.submit(thread.start).future
            await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            if starting is not None and starting.cancelled():
                session.disconnect(bulk)
                bulk.close()
            raise
        except (RuntimeError, QueueFull) as error:
            session.disconnect(bulk)
            reason = (
                str(error) or "can't start new thread"
            )  # not even the one that starts them, or too many wait for it
            refusal = Refusal(RefusalCode.TOO_MANY_CALLS, f"hicached {reason}: {THREAD_LIMITS}")
            self._notices.error("threads", "a bulk connection was refused: %s", refusal)
            connection.setblocking(False)
            await say(connection, refused(refusal))
            bulk.close()

    async def _hello_of(self, connection: socket.socket) -> tuple[bytes, bytes]:
        """Magic and secret. Raises Refusal."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await _receive_hello(connection)
        except TimeoutError as error:
            raise Refusal(RefusalCode.MALFORMED, f"no complete hello within {HELLO_TIMEOUT_S:g} s") from error
        magic, secret = BULK_HELLO.unpack(hello)
        if magic not in (BULK_MAGIC, PEER_MAGIC):
            raise Refusal(RefusalCode.MALFORMED, "this is the bulk socket of hicached, and that was no hello")
        return magic, secret


async def _receive_hello(connection: socket.socket) -> bytes:
    received = b""
    while len(received) < BULK_HELLO.size:
        try:
            part = connection.recv(BULK_HELLO.size - len(received))
        except (BlockingIOError, ssl.SSLWantReadError):
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
