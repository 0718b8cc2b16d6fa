"""Connections to the bulk socket of hicached, each used by one call at a time, and never past the time of that call."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hicache.client.fault import NEVER_SENT, Fault, FaultKind, refusal_fault
from hicache.client.tls import TlsFiles, TlsUnusable
from hicache.wire.bulk import (
    BULK_ACCEPTED,
    BULK_CONNECTIONS_PER_SESSION_MAX,
    BULK_HELLO,
    BULK_MAGIC,
    BULK_REASON,
    BULK_SOCKET_BUFFER_BYTES,
    PEER_MAGIC,
)
from hicache.wire.protocol import SECRET_BYTES

PEER_TICKET_S = 1.0

LeftS = Callable[[], float]  # time left for a call; not above 0 when it is over

_TIMEVAL = struct.Struct("@ll")
_TIMEOUT_S_MIN = 1e-5  # 0 would be no limit at all


class BulkRefused(Exception):
    """hicached says why it does not serve the connection, or the call: ``CODE: text``. The connection is over."""


class BulkClosed(Exception):
    """The session was closed: no call can begin any more."""


LINK_ERRORS = (OSError, BulkRefused, BulkClosed)  # TimeoutError is an OSError


def fault_of_link(error: OSError | BulkRefused | BulkClosed) -> Fault:
    """What one of LINK_ERRORS says about the call that met it."""
    match error:
        case TimeoutError():
            return Fault(FaultKind.DEADLINE, "DEADLINE_EXCEEDED", str(error))
        case OSError():
            return Fault(FaultKind.LOST, "BULK_LOST", str(error))
        case BulkRefused():
            return refusal_fault(str(error)) or Fault(FaultKind.LOST, "BULK_REFUSED", str(error))
        case BulkClosed():
            return NEVER_SENT


class BulkLink:
    """One connection. A method that raises leaves it in the middle of something: it is of no further use.

    Raises TimeoutError when the time of the call is over, and OSError when the connection is.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, BULK_SOCKET_BUFFER_BYTES)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(connection, ssl.SSLSocket):
            connection.setblocking(False)  # it knows no limit for a whole part: see ``_within``

    def say_hello(self, secret: bytes, *, left_s: LeftS) -> None:
        """Begin. Raises BulkRefused too."""
        self.send(BULK_HELLO.pack(BULK_MAGIC, secret), left_s=left_s)
        self.receive_status(left_s=left_s)

    def send(self, part: bytes | memoryview, *, left_s: LeftS) -> None:
        """Send all of it."""
        if isinstance(self._socket, ssl.SSLSocket):
            left = memoryview(part)
            while left:
                left = left[self._within(left_s, partial(self._socket.send, left)) :]
            return
        self._socket.settimeout(_positive(left_s()))
        self._socket.sendall(part)

    def receive(self, *parts: memoryview, left_s: LeftS) -> None:
        """Fill all of the buffers, one after another."""
        missing = [part for part in parts if len(part)]
        while missing:
            count = self._receive_some(missing, left_s=left_s)
            if count == 0:
                raise ConnectionResetError("hicached closed the bulk connection")
            while missing and count >= len(missing[0]):
                count -= len(missing.pop(0))
            if count:
                missing[0] = missing[0][count:]

    def receive_bytes(self, size_bytes: int, *, left_s: LeftS) -> bytes:
        """So many bytes."""
        received = bytearray(size_bytes)
        self.receive(memoryview(received), left_s=left_s)
        return bytes(received)

    def receive_status(self, *, left_s: LeftS) -> None:
        """What every answer begins with. Raises BulkRefused."""
        if self.receive_bytes(len(BULK_ACCEPTED), left_s=left_s) == BULK_ACCEPTED:
            return
        [size_bytes] = BULK_REASON.unpack(self.receive_bytes(BULK_REASON.size, left_s=left_s))
        raise BulkRefused(self.receive_bytes(size_bytes, left_s=left_s).decode(errors="replace"))

    def shut(self) -> None:
        """Wake whoever waits for something on it. Thread-safe."""
        with contextlib.suppress(OSError):  # that of SSLSocket would take the state of TLS from under its user
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _within(self, left_s: LeftS, step: Callable[[], int]) -> int:
        """What a step of TLS returns as soon as it can be taken. Raises TimeoutError."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            poll = select.poll()
            poll.register(self._socket, wanted)
            if not poll.poll(max(1, round(_positive(left_s()) * 1000))):
                raise TimeoutError("nothing moved in time")

    def _receive_some(self, parts: Sequence[memoryview], *, left_s: LeftS) -> int:
        """As much as comes in time: the kernel waits for all of it in one call, TLS for one record."""
        if isinstance(self._socket, ssl.SSLSocket):
            return self._within(left_s, partial(self._socket.recv_into, parts[0]))
        timeout_s = _positive(left_s())
        self._socket.settimeout(None)
        seconds = int(timeout_s)
        timeout = _TIMEVAL.pack(seconds, max(1, int((timeout_s - seconds) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        try:
            return self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as error:
            raise TimeoutError("nothing came in time") from error


class BulkLinks:
    """The connections of one session. Thread-safe."""

    def __init__(self, address: str | tuple[str, int], secret: bytes, *, tls: TlsFiles | None = None) -> None:
        """``address`` is the path of a Unix socket, or host and port. Connects when a call needs a connection."""
        self._address = address
        self._secret = secret
        self._tls = tls
        self._changed = threading.Condition()
        self._idle: list[BulkLink] = []
        self._busy: set[BulkLink] = set()
        self._connecting = 0
        self._is_closed = False

    @contextmanager
    def borrow(self, *, left_s: LeftS) -> Iterator[BulkLink]:
        """A connection for one call, closed unless the block ends without an error.

        Waits while there are as many as a session may have. Raises TimeoutError, OSError, BulkRefused and BulkClosed.
        """
        link = self._idle_or_none(left_s=left_s) or self._connect(left_s=left_s)
        try:
            yield link
        except BaseException:
            self._give_back(link, is_usable=False)
            raise
        self._give_back(link, is_usable=True)

    def connect_once(self, *, left_s: LeftS) -> None:
        """Connect as a call would, and hang up. Raises what ``borrow`` raises."""
        link = self._idle_or_none(left_s=left_s) or self._connect(left_s=left_s)
        self._give_back(link, is_usable=False)

    def close(self) -> None:
        """End every call on a connection, and begin no other. Idempotent."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for link in self._busy:
                link.shut()
            self._changed.notify_all()
        for link in idle:
            link.close()

    def _idle_or_none(self, *, left_s: LeftS) -> BulkLink | None:
        """An idle connection, or None: then another one may be made, and ``_connecting`` counts it already."""
        with self._changed:
            has_room = self._changed.wait_for(self._may_begin, max(0.0, left_s()))
            if self._is_closed:
                raise BulkClosed
            if not has_room:
                raise TimeoutError("every bulk connection is in use")
            if not self._idle:
                self._connecting += 1
                return None
            link = self._idle.pop()
            self._busy.add(link)
            return link

    def _may_begin(self) -> bool:
        connections = len(self._busy) + self._connecting
        return self._is_closed or bool(self._idle) or connections < BULK_CONNECTIONS_PER_SESSION_MAX

    def _connect(self, *, left_s: LeftS) -> BulkLink:
        link = None
        try:
            link = BulkLink(_connected(self._address, self._tls, timeout_s=_positive(left_s())))
            link.say_hello(self._secret, left_s=left_s)
        except BaseException:
            if link is not None:
                link.close()
            with self._changed:
                self._connecting -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._connecting -= 1
            self._busy.add(link)
            if not self._is_closed:
                return link
        self._give_back(link, is_usable=False)
        raise BulkClosed

    def _give_back(self, link: BulkLink, *, is_usable: bool) -> None:
        with self._changed:
            self._busy.discard(link)
            is_kept = is_usable and not self._is_closed
            if is_kept:
                self._idle.append(link)
            else:
                link.close()  # within the lock: ``close`` of all must not shut down a number that is another's by then
            self._changed.notify_all()


def peer_ticket(path: str) -> bytes:
    """What the daemon behind a Unix socket gives to say whose process this is; empty where it gives nothing."""
    with contextlib.suppress(OSError, BulkRefused):
        link = BulkLink(_connected(path, None, timeout_s=PEER_TICKET_S))
        with contextlib.closing(link):
            ends_at_s = time.monotonic() + PEER_TICKET_S
            link.send(BULK_HELLO.pack(PEER_MAGIC, b""), left_s=lambda: ends_at_s - time.monotonic())
            link.receive_status(left_s=lambda: ends_at_s - time.monotonic())
            return link.receive_bytes(SECRET_BYTES, left_s=lambda: ends_at_s - time.monotonic())
    return b""


def _connected(address: str | tuple[str, int], tls: TlsFiles | None, *, timeout_s: float) -> socket.socket:
    if not isinstance(address, str):
        connection = socket.create_connection(address, timeout=timeout_s)
        if tls is None:
            return connection
        try:
            return tls.wrap(connection, address[0], timeout_s=timeout_s)
        except TlsUnusable as error:
            raise ConnectionAbortedError(str(error)) from error
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise TimeoutError("no time is left")
    return max(seconds, _TIMEOUT_S_MIN)
