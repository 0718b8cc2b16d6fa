"""The keys that something was noted of last, as many as fit."""

from __future__ import annotations

import threading


class LastKeys:
    """Thread-safe. Where there are more, the oldest are forgotten."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._lock = threading.Lock()
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def note(self, key: bytes) -> bool:
        """Whether it was noted already."""
        with self._lock:
            was_there = key in self._keys
            self._keys[key] = None
            if len(self._keys) > self._count_max:
                del self._keys[next(iter(self._keys))]
            return was_there

    def forget(self, key: bytes) -> None:
        """It is as if it had never been noted."""
        if key in self._keys:
            with self._lock:
                self._keys.pop(key, None)
