"""Where log lines go: to a descriptor that never holds up who writes, whatever becomes of its reader."""

from __future__ import annotations

import io
import os
import select
import threading

PIECE_BYTES = select.PIPE_BUF  # a pipe, or a socket, that is ready to be written to takes so many


class LogStream(io.TextIOBase):
    """A reader that is slow, stopped or gone loses lines, and hears how many when it reads again. Thread-safe.

    journald that is restarted, a pipe to a script that hangs: the daemon serves its clients all the same.
    """

    def __init__(self, descriptor: int) -> None:
        """``descriptor`` stays the caller's, and blocking: its file may be that of other processes, too."""
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._ready = select.poll()
        self._ready.register(descriptor, select.POLLOUT)
        self.lost_lines = 0

    def write(self, text: str, /) -> int:
        """Writes lines, or loses them."""
        with self._lock:
            if self.lost_lines:
                self._write_all(f"{self.lost_lines} log lines were lost: nobody read them in time\n{text}", text)
            else:
                self._write_all(text, text)
        return len(text)

    def _write_all(self, told: str, text: str) -> None:
        """``told``, which ends with ``text``."""
        raw = told.encode(errors="replace")
        try:
            for start in range(0, len(raw), PIECE_BYTES):
                if not self._is_ready():
                    self.lost_lines += text.count("\n")
                    return
                os.write(self._descriptor, raw[start : start + PIECE_BYTES])
        except OSError:  # the reader is gone, or the disk is full
            self.lost_lines += text.count("\n")
            return
        self.lost_lines = 0

    def _is_ready(self) -> bool:
        return any(events & select.POLLOUT for _, events in self._ready.poll(0))
