"""One registration of the L2 memory with hicached, and the items whose bytes hicached may still be touching."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from hicache.wire.protocol import (
    MEMORY_ACCEPTED,
    MEMORY_HELLO,
    MEMORY_REFUSED,
    MEMORY_STATUS_OK,
    MEMORY_STATUS_REFUSED,
)

Settle = Callable[[], None]


@dataclass(frozen=True, slots=True)
class NotRegistered:
    """Why hicached does not share the memory. ``is_lasting``: trying again gives the same answer."""

    reason: str
    is_lasting: bool


class LinkState(StrEnum):
    """The life of a link goes this way only."""

    OPEN = "open"  # new transfers may name the region
    DRAINING = "draining"  # half-closed: no new transfers; hicached ends those that it runs
    GONE = "gone"  # end of file: hicached touches no byte of the region any more


class MemoryLink:
    """The connection on which the memfd was handed over. Thread-safe; no method blocks.

    The daemon closes its end only when no transfer touches the region any more, and a process that dies closes it too.
    So the end of file, and nothing else, makes a transfer without an answer a finished one.
    """

    def __init__(self, connection: socket.socket, region_id: int) -> None:
        self.region_id = region_id
        self._connection = connection
        self._lock = threading.Lock()
        self._state = LinkState.OPEN
        self._in_doubt: list[tuple[int, Settle]] = []
        self._transfers = 0

    @property
    def state(self) -> LinkState:
        """Where in its life the link is."""
        return self._state

    @property
    def items_in_doubt(self) -> int:
        """Items whose bytes hicached may still touch although their call has ended."""
        with self._lock:
            return sum(count for count, _ in self._in_doubt)

    def fileno(self) -> int:
        """For a selector; readable means that something ended. -1 once it is gone."""
        return self._connection.fileno()

    @property
    def is_idle(self) -> bool:
        """No transfer runs on it and nothing is in doubt: it may be closed without waiting for the end of file."""
        with self._lock:
            return not self._transfers and not self._in_doubt

    def acquire(self) -> bool:
        """Begin a transfer, to be followed by ``release``. False, and nothing begun, unless the link is open."""
        with self._lock:
            if self._state is not LinkState.OPEN:
                return False
            self._transfers += 1
            return True

    def release(self) -> None:
        """End a transfer. Whoever doubts its bytes has said so before."""
        with self._lock:
            assert self._transfers > 0, "released more often than acquired"
            self._transfers -= 1

    def doubt(self, item_count: int, settle: Settle) -> None:
        """A call about ``item_count`` items ended without an answer: ``settle`` is called when their bytes are free.

        That is at the end of file, from the thread that sees it, or now if that has come already. The link drains: no
        new transfer may use it.
        """
        with self._lock:
            if self._state is not LinkState.GONE:
                self._in_doubt.append((item_count, settle))
                self._half_close()
                return
        settle()

    def detach(self) -> None:
        """Ask hicached to let go of the region. The end of file follows when it has."""
        with self._lock:
            if self._state is not LinkState.GONE:
                self._half_close()

    def has_ended(self) -> bool:
        """Read what is there to read, after a selector said so. Whether it is the end of file."""
        try:
            return self._connection.recv(4096, socket.MSG_DONTWAIT) == b""  # more bytes than the answer mean nothing
        except BlockingIOError:
            return False
        except OSError:
            return True  # the peer is gone without having read everything

    def end(self) -> list[Settle]:
        """Close the connection; what to call now. Only after ``has_ended``, or when it ``is_idle`` for good."""
        with self._lock:
            self._state = LinkState.GONE
            settles = [settle for _, settle in self._in_doubt]
            self._in_doubt.clear()
            self._connection.close()
        return settles

    def _half_close(self) -> None:
        if self._state is LinkState.OPEN:
            self._state = LinkState.DRAINING
            with contextlib.suppress(OSError):  # the peer is gone: the end of file is there to be read
                self._connection.shutdown(socket.SHUT_WR)


def register(
    socket_path: str, *, session_secret: bytes, fd: int, size_bytes: int, timeout_s: float
) -> MemoryLink | NotRegistered:
    """Hand the memfd ``fd`` to hicached. Blocks for at most ``timeout_s``; raises nothing for a fault of the peer."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        reader = _Reader(connection, deadline_s=time.monotonic() + timeout_s)
        connection.connect(socket_path)
        socket.send_fds(connection, [MEMORY_HELLO.pack(session_secret, size_bytes)], [fd])
        answer = _read_answer(reader)
    except TimeoutError:
        answer = NotRegistered("hicached did not answer on its memory socket in time", is_lasting=False)
    except OSError as error:
        answer = NotRegistered(f"memory socket {socket_path}: {error}", is_lasting=False)
    if isinstance(answer, NotRegistered):
        connection.close()
        return answer
    connection.settimeout(None)
    return MemoryLink(connection, answer)


def _read_answer(reader: _Reader) -> int | NotRegistered:
    """The region id, or the daemon's refusal."""
    status = reader.read(1)
    if status[0] == MEMORY_STATUS_OK:
        _, region_id = MEMORY_ACCEPTED.unpack(status + reader.read(MEMORY_ACCEPTED.size - 1))
        return int(region_id)
    if status[0] == MEMORY_STATUS_REFUSED:
        _, reason_bytes = MEMORY_REFUSED.unpack(status + reader.read(MEMORY_REFUSED.size - 1))
        return NotRegistered(reader.read(reason_bytes).decode(errors="replace"), is_lasting=True)
    return NotRegistered(f"unknown status {status[0]} on the memory socket", is_lasting=True)


class _Reader:
    """Reads exactly so many bytes before one deadline, however they trickle in."""

    def __init__(self, connection: socket.socket, *, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self._set_timeout()

    def read(self, size_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < size_bytes:
            self._set_timeout()
            part = self._connection.recv(size_bytes - len(parts))
            if not part:
                raise ConnectionResetError("hicached closed the connection instead of answering")
            parts += part
        return bytes(parts)

    def _set_timeout(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
