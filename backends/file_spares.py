"""Files of removed objects, kept to be written again: pages that exist cost a fraction of new ones."""

from __future__ import annotations

import threading
from collections import OrderedDict

SPARES_MAX = 1 << 14


class SpareFiles:
    """Paths by the size of their file, the oldest to go first. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._by_size: dict[int, dict[str, None]] = {}
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        """What all spares take."""
        return self._total_bytes

    def add(self, path: str, size_bytes: int) -> list[str]:
        """Keep a file; returns those to remove, itself perhaps, so that no bound is exceeded."""
        with self._lock:
            self._sizes[path] = size_bytes
            self._by_size.setdefault(size_bytes, {})[path] = None
            self._total_bytes += size_bytes
            return self._shrink(self.bytes_max)

    def take(self, size_bytes: int) -> str | None:
        """A file of exactly this size, the latest added; None when there is none."""
        with self._lock:
            paths = self._by_size.get(size_bytes)
            if not paths:
                return None
            path = next(reversed(paths))
            self._forget(path)
            return path

    def give_up(self, bytes_max: int = 0) -> list[str]:
        """Forget the oldest until all together take no more than ``bytes_max``; returns the files to remove."""
        with self._lock:
            return self._shrink(bytes_max)

    def _shrink(self, bytes_max: int) -> list[str]:
        removed: list[str] = []
        while self._sizes and (self._total_bytes > bytes_max or len(self._sizes) > SPARES_MAX):
            path = next(iter(self._sizes))
            self._forget(path)
            removed.append(path)
        return removed

    def _forget(self, path: str) -> None:
        size_bytes = self._sizes.pop(path)
        paths = self._by_size[size_bytes]
        del paths[path]
        if not paths:
            del self._by_size[size_bytes]
        self._total_bytes -= size_bytes
