"""Log lines that do not flood: each kind of notice at most once per interval."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

NOTICE_KINDS_MAX = 64  # kinds are names in the code; whatever exceeds this is logged under one shared kind


class Notices:
    """Thread-safe. A notice that was held back is counted, and the next one of its kind tells how many there were."""

    def __init__(
        self, logger: logging.Logger, *, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._said_at_s: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def info(self, kind: str, message: str, *values: object) -> None:
        """Something that a reader of the log wants to know, such as a recovery."""
        self._say(logging.INFO, kind, message, values)

    def warning(self, kind: str, message: str, *values: object) -> None:
        """A fault that costs speed."""
        self._say(logging.WARNING, kind, message, values)

    def error(self, kind: str, message: str, *values: object) -> None:
        """A fault that lasts until somebody changes something."""
        self._say(logging.ERROR, kind, message, values)

    def _say(self, level: int, kind: str, message: str, values: tuple[object, ...]) -> None:
        with self._lock:
            if kind not in self._said_at_s and len(self._said_at_s) >= NOTICE_KINDS_MAX:
                kind = "other"
            now_s = self._clock()
            said_at_s = self._said_at_s.get(kind)
            if said_at_s is not None and now_s - said_at_s < self._interval_s:
                self._held_back[kind] = self._held_back.get(kind, 0) + 1
                return
            self._said_at_s[kind] = now_s
            held_back = self._held_back.pop(kind, 0)
        if held_back:
            message += " (and %d more like this since the last such line)"
            values = (*values, held_back)
        self._logger.log(level, message, *values)
