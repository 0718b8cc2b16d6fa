"""Whether a medium takes what is written: told by what becomes of the writes, since one that only looks cannot tell."""

from __future__ import annotations

import os
import threading

FAILURES_MIN = 3  # in a row; fewer may be a moment's


class WriteHealth:
    """Thread-safe. A file system that has made itself read-only after an error says that it can be written, for
    example, and so does a folder whose files may not be made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._error = ""

    def took(self) -> None:
        """Something was written, or there was no room for it, which is another matter."""
        if self._failures:
            with self._lock:
                self._failures = 0

    def failed(self, error: Exception) -> None:
        """Something could not be written."""
        with self._lock:
            self._failures += 1
            self._error = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)

    def problem(self, place: object) -> str:
        """Why nothing is stored in ``place``, for people; empty: it is, as far as anybody has tried."""
        with self._lock:
            if self._failures < FAILURES_MIN:
                return ""
            return f"{place} takes no objects: the last {self._failures} could not be written ({self._error})"
