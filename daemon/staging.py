"""Memory that objects pass through between the store and a socket, kept for the next one: pages exist already then."""

from __future__ import annotations

import threading


class Staging:
    """Lends buffers of any size. How much is lent at a time is bounded by who borrows: see budget.py. Thread-safe."""

    def __init__(self, *, idle_bytes_max: int) -> None:
        """``idle_bytes_max`` bounds what is kept while nobody has it."""
        self._idle_bytes_max = idle_bytes_max
        self._lock = threading.Lock()
        self._idle: dict[int, list[bytearray]] = {}  # by size; what was given back last is at the end
        self.idle_bytes = 0

    def lend(self, size_bytes: int) -> bytearray:
        """A buffer of exactly this size, with any content. Give it back once, when nothing touches it any more."""
        with self._lock:
            kept = self._idle.get(size_bytes)
            if kept:
                self.idle_bytes -= size_bytes
                return kept.pop()
        return bytearray(size_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """The end of a loan. What does not fit makes room at the cost of other sizes, or goes."""
        size_bytes = len(buffer)
        with self._lock:
            for other in list(self._idle):
                self._make_room(size_bytes, at_the_cost_of=other)
            if self.idle_bytes + size_bytes <= self._idle_bytes_max:
                self._idle.setdefault(size_bytes, []).append(buffer)
                self.idle_bytes += size_bytes

    def _make_room(self, size_bytes: int, *, at_the_cost_of: int) -> None:
        if at_the_cost_of == size_bytes:
            return
        buffers = self._idle[at_the_cost_of]
        while buffers and self.idle_bytes + size_bytes > self._idle_bytes_max:
            buffers.pop()
            self.idle_bytes -= at_the_cost_of
        if not buffers:
            del self._idle[at_the_cost_of]
