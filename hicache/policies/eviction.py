"""Eviction: which of the entries that may go shall go first."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")


class EvictionPolicy(Protocol[Item]):
    """Holds the entries that may be evicted now. A used entry is removed, and added again when nobody uses it."""

    def add(self, item: Item, stamp: int) -> None:
        """``item`` may go from now on; ``stamp`` grows with the time of its last use."""
        ...

    def remove(self, item: Item) -> None:
        """``item`` may not go any more. Does nothing when it was not there."""
        ...

    def pop(self) -> Item | None:
        """Take out the entry that shall go first; None when there is none."""
        ...

    def __len__(self) -> int: ...


class Lru(Generic[Item]):
    """Least recently used first. O(log n), by a heap whose outdated records are dropped when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Item]] = []
        self._live: dict[Item, int] = {}  # item -> sequence number of its valid heap record
        self._sequence = 0

    def add(self, item: Item, stamp: int) -> None:
        self._sequence += 1
        self._live[item] = self._sequence
        heapq.heappush(self._heap, (stamp, self._sequence, item))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [record for record in self._heap if self._live.get(record[2]) == record[1]]
            heapq.heapify(self._heap)

    def remove(self, item: Item) -> None:
        self._live.pop(item, None)

    def pop(self) -> Item | None:
        while self._heap:
            _, sequence, item = heapq.heappop(self._heap)
            if self._live.get(item) == sequence:
                del self._live[item]
                return item
        return None

    def __len__(self) -> int:
        return len(self._live)
