"""Eviction: which of the entries that may go shall go first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from hicache.policies.facts import EvictionFacts

Item = TypeVar("Item")
Described_contra = TypeVar("Described_contra", contravariant=True)


class EvictionPolicy(Protocol[Item]):
    """Holds the entries that may be evicted now. A used entry is removed, and added again when nobody uses it.

    The engine keeps children from being stranded: what may not go because of what is below it is removed, and added
    again when that has gone.

    - ``watches_use``: ``used`` is called, and ``uses``, ``used_s`` and ``last`` of the facts are kept.
    - ``by_page``: pages that were always used together may still differ here. Else a replay may hold them as one item.
    """

    watches_use: bool
    by_page: bool

    def add(self, item: Item) -> None:
        """``item`` may go from now on. Does nothing when it was there."""
        ...

    def remove(self, item: Item) -> None:
        """``item`` may not go any more. Does nothing when it was not there."""
        ...

    def pop(self) -> Item | None:
        """Take out the entry that shall go first, which goes for good; None when there is none."""
        ...

    def first(self) -> Item | None:
        """The entry that ``pop`` would take out."""
        ...

    def used(self, item: Item) -> None:
        """A request uses ``item``, which may be there or not. Its facts do not tell of that yet."""
        ...

    def expired(self, now_s: float) -> Item | None:
        """``first``, if it shall go though there is room; None otherwise. ``now_s`` never falls."""
        ...

    def __contains__(self, item: Item) -> bool: ...

    def __len__(self) -> int: ...


class Describe(Protocol[Described_contra]):
    """What an engine tells of its items."""

    def last_use(self, item: Described_contra) -> int:
        """``used_at`` of its facts, and nothing else."""
        ...

    def facts(self, item: Described_contra) -> EvictionFacts:
        """All that is known of it now."""
        ...


EvictionFactory: TypeAlias = Callable[[Describe[Any]], EvictionPolicy[Any]]


class Heap(Generic[Item]):
    """Lowest rank first. The rank never falls for an item, and is asked when the item surfaces.

    Using an item, taking it away and adding it again cost no work here: an item has one record in the heap, which is
    put right, or dropped, when it comes up. O(log n) a record.
    """

    watches_use = False
    by_page = False

    def __init__(self, rank: Callable[[Item], Any]) -> None:
        self._rank = rank
        self._heap: list[tuple[Any, int, Item]] = []
        self._live: set[Item] = set()
        self._recorded: dict[Item, Any] = {}  # the rank in the record of each item that has one, live or not
        self._sequence = 0
        self._named: Item | None = None  # at the top of the heap, as ``first`` has found, until something changes

    def add(self, item: Item) -> None:
        self._live.add(item)
        self._named = None
        if item not in self._recorded:
            self._push(item)
            if len(self._heap) > 2 * len(self._live) + 64:
                self._compact()

    def remove(self, item: Item) -> None:
        self._live.discard(item)
        self._named = None

    def pop(self) -> Item | None:
        item = self._named or self.first()
        if item is not None:
            self._named = None
            heapq.heappop(self._heap)
            del self._recorded[item]
            self._live.remove(item)
        return item

    def first(self) -> Item | None:
        heap, live, rank = self._heap, self._live, self._rank
        while heap:
            stamp, _, item = heap[0]
            if item in live and rank(item) == stamp:
                self._named = item
                return item
            heapq.heappop(heap)
            self._recorded.pop(item, None)
            if item in live:
                self._push(item)
        return None

    def used(self, item: Item) -> None:
        pass

    def expired(self, now_s: float) -> Item | None:
        return None

    def __contains__(self, item: Item) -> bool:
        return item in self._live

    def __len__(self) -> int:
        return len(self._live)

    def _push(self, item: Item) -> None:
        self._sequence += 1
        self._recorded[item] = rank = self._rank(item)
        heapq.heappush(self._heap, (rank, self._sequence, item))

    def _compact(self) -> None:
        """Forget what is not live: it may have gone for good."""
        self._heap = [record for record in self._heap if record[2] in self._live]
        heapq.heapify(self._heap)
        self._recorded = {item: rank for item, rank in self._recorded.items() if item in self._live}


class Lru(Heap[Item]):
    """Least recently used first, by ``last_use``."""

    def __init__(self, last_use: Callable[[Item], int]) -> None:
        super().__init__(last_use)

    def first_use_min(self) -> int | None:
        """No item was used before; None when there is none. O(1)."""
        return self._heap[0][0] if self._heap else None


class Ranked(Heap[Item]):
    """Base of policies that order by the facts of an item. ``self._state`` is what a policy remembers of items.

    An item that nobody adds any more is forgotten in the end, and one that is in use for long may be.
    """

    watches_use = True

    def __init__(self, items: Describe[Item]) -> None:
        self._items = items
        self._state: dict[Item, Any] = {}
        super().__init__(lambda item: self.rank(item, items.facts(item)))

    def rank(self, item: Item, facts: EvictionFacts) -> Any:
        """What orders the items: comparable, and never lower than before for the same item."""
        raise NotImplementedError

    def pop(self) -> Item | None:
        item = super().pop()
        if item is not None:
            self._state.pop(item, None)
        return item

    def add(self, item: Item) -> None:
        super().add(item)
        if len(self._state) > 2 * len(self._live) + 64:
            self._state = {known: state for known, state in self._state.items() if known in self._live}


class Reranked(Ranked[Item]):
    """Base of those whose ranks change only when an item is used, which may make them fall: its record is made anew
    then, so that an item that surfaces is where it belongs, and its rank is not asked again."""

    def __init__(self, items: Describe[Item]) -> None:
        super().__init__(items)
        self._changed: dict[Item, None] = {}  # its rank may not be that in its record

    def add(self, item: Item) -> None:
        if item in self._recorded and item not in self._live:
            self._changed[item] = None
        super().add(item)

    def remove(self, item: Item) -> None:
        super().remove(item)
        self._changed.pop(item, None)

    def used(self, item: Item) -> None:
        if item in self._live:
            self._changed[item] = None
            self._named = None

    def first(self) -> Item | None:
        if self._changed:
            self._put_right()
        heap, live, recorded = self._heap, self._live, self._recorded
        while heap:
            stamp, _, item = heap[0]
            is_last = recorded.get(item) is stamp  # an item has one record that counts
            if is_last and item in live:
                self._named = item
                return item
            heapq.heappop(heap)
            if is_last:
                del recorded[item]
        return None

    def _put_right(self) -> None:
        for item in self._changed:
            if self._rank(item) != self._recorded[item]:
                self._push(item)
        self._changed.clear()
        if len(self._heap) > 2 * len(self._live) + 64:
            self._compact()

    def _compact(self) -> None:
        """One record for each item that is live."""
        items = dict.fromkeys(record[2] for record in self._heap if record[2] in self._live)
        self._heap.clear()
        self._recorded.clear()
        for item in items:
            self._push(item)
