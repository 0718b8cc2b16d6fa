"""Eviction: which of the entries that may go shall go first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")


class EvictionPolicy(Protocol[Item]):
    """Holds the entries that may be evicted now. A used entry is removed, and added again when nobody uses it."""

    def add(self, item: Item) -> None:
        """``item`` may go from now on. Does nothing when it was there."""
        ...

    def remove(self, item: Item) -> None:
        """``item`` may not go any more. Does nothing when it was not there."""
        ...

    def pop(self) -> Item | None:
        """Take out the entry that shall go first; None when there is none."""
        ...

    def first(self) -> Item | None:
        """The entry that ``pop`` would take out."""
        ...

    def __contains__(self, item: Item) -> bool: ...

    def __len__(self) -> int: ...


class Lru(Generic[Item]):
    """Least recently used first, by ``last_use``, which never falls for an item and is asked when the item surfaces.

    Using an item, taking it away and adding it again cost no work here: an item has one record in the heap, which is
    put right, or dropped, when it comes up. O(log n) a record.
    """

    def __init__(self, last_use: Callable[[Item], int]) -> None:
        self._last_use = last_use
        self._heap: list[tuple[int, int, Item]] = []
        self._live: set[Item] = set()
        self._recorded: set[Item] = set()  # items with a record in the heap, live or not
        self._sequence = 0

    def add(self, item: Item) -> None:
        self._live.add(item)
        if item not in self._recorded:
            self._push(item)
            if len(self._heap) > 2 * len(self._live) + 64:
                self._heap = [record for record in self._heap if record[2] in self._live]
                heapq.heapify(self._heap)
                self._recorded &= self._live

    def remove(self, item: Item) -> None:
        self._live.discard(item)

    def pop(self) -> Item | None:
        item = self.first()
        if item is not None:
            heapq.heappop(self._heap)
            self._recorded.remove(item)
            self._live.remove(item)
        return item

    def first(self) -> Item | None:
        while self._heap:
            stamp, _, item = self._heap[0]
            if item in self._live and self._last_use(item) == stamp:
                return item
            heapq.heappop(self._heap)
            self._recorded.remove(item)
            if item in self._live:
                self._push(item)
        return None

    def first_use_min(self) -> int | None:
        """No item was used before; None when there is none. O(1)."""
        return self._heap[0][0] if self._heap else None

    def __contains__(self, item: Item) -> bool:
        return item in self._live

    def __len__(self) -> int:
        return len(self._live)

    def _push(self, item: Item) -> None:
        self._sequence += 1
        self._recorded.add(item)
        heapq.heappush(self._heap, (self._last_use(item), self._sequence, item))
