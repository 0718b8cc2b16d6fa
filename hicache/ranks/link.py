"""One connection between a leader and a worker: messages out without ever blocking, and bytes in."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from hicache.ranks.messages import FrameReader

UNSENT_BYTES_MAX = 128 * 1024 * 1024  # what waits for a peer that does not read; one more byte and it is given up
_RECEIVE_BYTES = 256 * 1024


class LinkBroken(Exception):
    """The connection is over, or its peer cannot be trusted any more; the text says why."""


class Link:
    """``send`` from any thread; everything else from the thread of the loop that watches it."""

    def __init__(self, connection: socket.socket, reader: FrameReader) -> None:
        """Takes the socket over."""
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = reader
        self.on_backlog: Callable[[], None] = lambda: None  # called when ``send`` has left something to ``flush``
        self._socket = connection
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._is_closed = False

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, framed: bytes) -> None:
        """Send at once what the socket takes, and leave the rest to ``flush``. Never blocks.

        Raises LinkBroken when the peer has gone, or leaves too much unread.
        """
        with self._lock:
            if self._is_closed:
                raise LinkBroken("the link is closed")
            had_backlog = bool(self._unsent)
            if not had_backlog:
                framed = framed[self._sent(framed) :]
            if len(self._unsent) + len(framed) > UNSENT_BYTES_MAX:
                raise LinkBroken(f"it leaves more than {UNSENT_BYTES_MAX} bytes unread")
            self._unsent += framed
        if framed and not had_backlog:
            self.on_backlog()

    @property
    def has_backlog(self) -> bool:
        """Whether something waits for the peer to read."""
        with self._lock:
            return bool(self._unsent)

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it. Raises LinkBroken."""
        with self._lock:
            if self._unsent and not self._is_closed:
                del self._unsent[: self._sent(self._unsent)]

    def receive(self) -> Iterator[bytes]:
        """The payloads that have come. Raises LinkBroken at the end of the stream, and Garbage."""
        try:
            received = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkBroken(f"the connection failed: {error.strerror or error}") from error
        if not received:
            raise LinkBroken("the connection ended")
        yield from self.reader.feed(received)

    def close(self) -> None:
        """Hang up. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _sent(self, part: bytes | bytearray) -> int:
        """Bytes that the socket took. Call with the lock held."""
        try:
            return self._socket.send(part)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkBroken(f"the connection failed: {error.strerror or error}") from error
