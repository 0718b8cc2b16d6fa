"""Standard error of hicached: a reader that is slow, stuck or gone costs log lines and nothing else."""

from __future__ import annotations

import os
import select
import threading

PIECE_BYTES = select.PIPE_BUF  # so much can be written without waiting to what says that it can be written to


class LogStream:
    """What `logging` and structlog need of a text stream. Thread-safe; ``write`` never waits and never raises.

    A pipe that is full, or broken, loses what is written to it, and hears how many lines that were when it can be
    written to again. To a file everything goes, as long as its disk takes it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._lock = threading.RLock()  # what is collected as garbage in the middle of a line may log, too
        self._lost_count = 0
        self._is_within_line = False

    def write(self, text: str) -> int:
        """Whole lines. Returns the number of characters, whatever became of them."""
        with self._lock:
            raw = text.encode(errors="replace")
            if self._lost_count:
                said = f"{self._lost_count} log lines were lost: nobody read them\n".encode()
                raw = b"\n" * self._is_within_line + said + raw
            self._write(raw, lines=text.count("\n"))
        return len(text)

    def _write(self, raw: bytes, *, lines: int) -> None:
        left = memoryview(raw)
        while left and self._is_writable():
            try:
                left = left[os.write(self._descriptor, left[:PIECE_BYTES]) :]
            except OSError:  # the reader has gone, or the disk is full
                break
        is_whole = not left
        if len(left) < len(raw):
            self._is_within_line = not is_whole
            self._lost_count = 0
        self._lost_count += 0 if is_whole else lines

    def _is_writable(self) -> bool:
        return any(events & select.POLLOUT for _, events in self._poll.poll(0))

    def flush(self) -> None:
        """Nothing is kept back."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)
