"""Finds what was used least recently, without keeping all objects in order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SCAN_SLOTS = 1 << 17  # looked at in one step: what a lock is held for
QUEUE_SHARE = 256  # a queue has a 256th of the objects ...
QUEUE_MIN, QUEUE_MAX = 1 << 10, 1 << 15  # ... within these bounds
NEVER = np.inf  # as a time of use: not a candidate

Times = NDArray[np.float64]
Places = NDArray[np.int64]


class VictimQueue:
    """The least recently used slots of one owner, or of all: found by a scan, sorted, and given out in exact order.

    The caller's columns say when each slot was used last, all later uses later, NEVER for what may not go; and whose it
    is. What is used after the scan has another time than the queue remembers and is passed over; what is not in the
    queue was used after all that is, so a queue needs no change until it is empty. Then the next scan begins.
    """

    def __init__(self, owner: int | None) -> None:
        self._owner = owner
        self._slots: Places = np.empty(0, dtype=np.int64)
        self._times: Times = np.empty(0)
        self._next = 0
        self._cursor = 0  # of the scan; 0: none is going on
        self._limit = NEVER  # what the scan takes was used before
        self._found: list[tuple[Places, Times]] = []
        self._found_count = 0

    def is_ready(self) -> bool:
        """Whether ``head`` has something to show."""
        return self._next < len(self._slots)

    def head(self, used_at_s: Times, count: int) -> tuple[Places, Times, Places, int]:
        """Those of the next ``count`` entries that are still what they were, least recently used first.

        Returns their slots, their times, how many entries end with each, and how many were looked at; for ``drop``.
        """
        slots = self._slots[self._next : self._next + count]
        times = self._times[self._next : self._next + count]
        same = np.flatnonzero(used_at_s[slots] == times)
        return slots[same], times[same], same + 1, len(slots)

    def drop(self, entries: int) -> None:
        """Take out the next ``entries``."""
        self._next += entries

    def scan(self, used_at_s: Times, owners: NDArray[np.uint32], *, newest_s: float, count: int) -> bool:
        """Look at the next SCAN_SLOTS slots; True when all have been looked at and the queue is filled.

        ``newest_s`` is the latest time that there is, ``count`` how many objects the owner has.
        """
        if self._cursor == 0:
            self._limit = np.nextafter(newest_s, np.inf)
        keep_max = min(max(count // QUEUE_SHARE, QUEUE_MIN), QUEUE_MAX)
        window = slice(self._cursor, self._cursor + SCAN_SLOTS)
        wanted = used_at_s[window] < self._limit
        if self._owner is not None:
            wanted &= owners[window] == self._owner
        slots = np.flatnonzero(wanted) + self._cursor
        self._found.append((slots, used_at_s[slots]))
        self._found_count += len(slots)
        if self._found_count > 2 * keep_max:
            self._trim(keep_max)
        self._cursor += SCAN_SLOTS
        if self._cursor < len(used_at_s):
            return False
        self._finish()
        return True

    def _trim(self, keep: int) -> None:
        slots, times = self._gathered()
        oldest = np.argpartition(times, keep - 1)[:keep]
        self._found, self._found_count = [(slots[oldest], times[oldest])], keep
        self._limit = float(times[oldest].max())

    def _finish(self) -> None:
        slots, times = self._gathered()
        order = np.argsort(times, kind="stable")
        self._slots, self._times, self._next = slots[order], times[order], 0
        self._found, self._found_count, self._cursor = [], 0, 0

    def _gathered(self) -> tuple[Places, Times]:
        slots, times = zip(*self._found, strict=True)
        return np.concatenate(slots), np.concatenate(times)
