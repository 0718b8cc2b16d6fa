"""One connection of the bulk socket, as the thread that serves it sees it: blocking, and ended by others in time."""

from __future__ import annotations

import contextlib
import fcntl
import math
import socket
import ssl
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_any
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from hicache.daemon.refusals import Refusal
from hicache.wire.bulk import BULK_SOCKET_BUFFER_BYTES
from hicache.wire.protocol import RefusalCode

T = TypeVar("T")

# How long a client may take to send, or to take, a piece: room that others wait for is held meanwhile.
PATIENCE_S = 5.0
OVERTIME_S = 0.2  # after the deadline of a call, for its answer to be taken
REFUSAL_BYTES_DRAINED_MAX = 64 << 20  # read after a refusal, so that it arrives before the end of the connection

SMALL_BYTES = 4096  # copied together before they are encrypted

_INT = struct.Struct("i")


class ConnectionOver(Exception):
    """Nothing more can be heard from the client or said to it. ``result`` is the one of a call that runs."""

    def __init__(self, result: str) -> None:
        super().__init__(result)
        self.result = result


class BulkConnection:
    """The thread that serves the connection calls everything but ``end`` and ``end_if_overdue``, which any other may.

    No call of the kernel has a time limit of its own. Whoever watches the connection ends it instead, and whatever the
    thread waits for then is over at once.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Takes ``connection`` over."""
        connection.setblocking(True)
        with contextlib.suppress(OSError):  # it broke already: whoever uses it finds out
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, BULK_SOCKET_BUFFER_BYTES)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._lock = threading.Lock()  # between ``end`` and ``close``: the number of a closed descriptor is another's
        self._over: Future[None] = Future()
        self._result = "cancelled"
        self._waiting_since_s = math.inf  # for the client, within a call
        self._is_receiving = False
        self._is_impatient = False
        self._ends_at_s = math.inf
        self.is_busy = False  # within a call

    @contextmanager
    def call(self, *, deadline_s: float) -> Iterator[None]:
        """Within it the client must not keep the daemon waiting, and after the deadline the connection is ended."""
        self.set_deadline(deadline_s)
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False
            self._ends_at_s = math.inf

    def set_deadline(self, deadline_s: float) -> None:
        """Of the call that runs."""
        self._ends_at_s = deadline_s + OVERTIME_S

    def end(self, result: str = "cancelled") -> None:
        """Wakes the thread, whatever it waits for: it raises ConnectionOver. Idempotent, thread-safe."""
        with self._lock:
            if self._over.done():
                return
            self._result = result
            self._over.set_result(None)
            self._shut(socket.SHUT_RDWR)

    def end_if_overdue(self, now_s: float) -> None:
        """Ends a call that its client keeps waiting, or whose time is over. Thread-safe."""
        if now_s >= self._ends_at_s:
            self.end("deadline")
        elif now_s - self._waiting_since_s >= PATIENCE_S:
            if not self._is_receiving:
                self.end("deadline")
                return
            with self._lock:
                self._is_impatient = True
                self._shut(socket.SHUT_RD)

    def close(self) -> None:
        """To be called by the thread as the last thing. Idempotent."""
        with self._lock:
            if not self._over.done():
                self._over.set_result(None)
            self._socket.close()

    def await_first_bytes(self, buffer: memoryview) -> int:
        """Waits for as long as it takes. How many of the bytes came."""
        return self._receive_some(buffer, 0)

    def receive(self, buffer: memoryview) -> None:
        """Fills all of ``buffer``. Raises Refusal(BAD_STREAM) when that is not done within PATIENCE_S of a call."""
        filled = 0
        with self._waiting_for_client(is_receiving=True):
            while filled < len(buffer):
                filled += self._receive_some(buffer[filled:], socket.MSG_WAITALL)

    def receive_bytes(self, size_bytes: int) -> bytes:
        """So many bytes. Raises as ``receive``."""
        received = bytearray(size_bytes)
        self.receive(memoryview(received))
        return bytes(received)

    def available_bytes(self) -> int:
        """How much has been sent and not been received; waits for at least one byte. Raises as ``receive``.

        Over TLS that is what came encrypted, which is a little more.
        """
        decrypted_bytes = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0
        if not decrypted_bytes:
            with self._waiting_for_client(is_receiving=True):
                self._receive_checked(partial(socket.socket.recv_into, self._socket, bytearray(1), 1, socket.MSG_PEEK))
        count: int = _INT.unpack(fcntl.ioctl(self._socket, termios.FIONREAD, _INT.pack(0)))[0]
        return max(1, decrypted_bytes + count)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends all of it."""
        with self._waiting_for_client(is_receiving=False):
            try:
                if self._is_tls:
                    for run in _runs(parts):
                        self._socket.sendall(run)
                    return
                sent = self._socket.sendmsg(parts)
                for part in parts:
                    if sent < len(part):
                        self._socket.sendall(memoryview(part)[sent:])
                    sent = max(0, sent - len(part))
            except OSError as error:
                raise ConnectionOver(self._result) from error

    def wait(self, future: Future[T], *, deadline_s: float) -> T:
        """The result of ``future``. Raises TimeoutError after the deadline, and ConnectionOver."""
        if not future.done():
            either: tuple[Future[Any], ...] = (future, self._over)  # Any: each has a result of its own type
            wait_for_any(either, max(0.0, deadline_s - time.monotonic()), FIRST_COMPLETED)
        if future.done():
            return future.result()
        if self._over.done():
            raise ConnectionOver(self._result)
        raise TimeoutError

    def discard_input(self) -> None:
        """Says that nothing more will be said, and reads on for a while: else the client might miss what was said."""
        with contextlib.suppress(OSError, ConnectionOver, Refusal), self._waiting_for_client(is_receiving=True):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            buffer = memoryview(bytearray(64 * 1024))
            left = REFUSAL_BYTES_DRAINED_MAX
            while left > 0:
                left -= self._receive_some(buffer, 0)

    @contextmanager
    def _waiting_for_client(self, *, is_receiving: bool) -> Iterator[None]:
        self._is_receiving = is_receiving
        if self.is_busy:
            self._waiting_since_s = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since_s = math.inf

    def _receive_some(self, buffer: memoryview, flags: int) -> int:
        """``flags`` are for sockets without TLS, which returns what is in one record, 16 KiB at most."""
        if self._is_tls:
            return self._receive_checked(partial(self._socket.recv_into, buffer))
        return self._receive_checked(partial(self._socket.recv_into, buffer, 0, flags))

    def _receive_checked(self, receive: Callable[[], int]) -> int:
        try:
            count = receive()
        except OSError as error:
            raise ConnectionOver(self._result) from error
        if count == 0:
            if self._is_impatient:
                raise Refusal(RefusalCode.BAD_STREAM, f"what was announced did not come within {PATIENCE_S:g} s")
            raise ConnectionOver(self._result)
        return count

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # that of SSLSocket would take the state of TLS from under its thread
            socket.socket.shutdown(self._socket, how)


def _runs(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """What is sent together: each becomes a record of its own, and small ones cost as much as large ones."""
    small = bytearray()
    for part in parts:
        if len(part) < SMALL_BYTES:
            small += part
            continue
        if small:
            yield small
            small = bytearray()
        yield part
    if small:
        yield small
