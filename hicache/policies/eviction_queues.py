"""Eviction by several queues, ghosts or chance: policies that move items instead of ranking them once."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic

from hicache.errors import ConfigError
from hicache.policies.eviction import Describe, Heap, Item, Ranked
from hicache.policies.facts import EvictionFacts, Key


class Sieve(Ranked[Item]):
    """A hand goes from the oldest item to the newest one and round again: what was used since it last came by stays,
    the first one that was not goes. (Zhang, NSDI 2024)"""

    by_page = True

    def __init__(self, items: Describe[Item]) -> None:
        super().__init__(items)
        self._round = 0

    def rank(self, item: Item, facts: EvictionFacts) -> tuple[int, int]:
        turn, _ = self._state.setdefault(item, (self._round, facts.uses if facts.uses == 1 else facts.uses - 1))
        return turn, facts.born_at

    def first(self) -> Item | None:
        while (item := super().first()) is not None:
            self._round = self._heap[0][0][0]
            uses = self._items.facts(item).uses
            if uses == self._state[item][1]:
                return item
            self._state[item] = (self._round + 1, uses)  # so its record is put right by the next look
        return None

    def pop(self) -> Item | None:
        item = super().pop()
        if self._heap:
            self._round = self._heap[0][0][0]
        return item


@dataclass(slots=True)
class _Place:
    """Where an item stands: in which queue, from which place on, and how many uses have been counted."""

    is_main: bool
    sequence: int
    uses: int
    credits: int = 0


class TwoQueues(Generic[Item]):
    """Base of policies with a queue for what is new and one for what has proved itself, and memory of what has gone.

    An item keeps its place while it is in use. ``_rank`` orders both queues.
    """

    watches_use = True
    by_page = True

    def __init__(self, items: Describe[Item]) -> None:
        self._items = items
        self._places: dict[Item, _Place] = {}
        self._queues: tuple[Heap[Item], Heap[Item]] = (Heap(self._rank), Heap(self._rank))
        self._ghosts: tuple[OrderedDict[Key, None], OrderedDict[Key, None]] = (OrderedDict(), OrderedDict())
        self._sequence = 0

    def add(self, item: Item) -> None:
        if item not in self._places:
            self._places[item] = self._born(self._items.facts(item))
        self._queues[self._places[item].is_main].add(item)
        if len(self._places) > 2 * len(self) + 64:
            self._places = {known: place for known, place in self._places.items() if known in self}

    def remove(self, item: Item) -> None:
        for queue in self._queues:
            queue.remove(item)

    def pop(self) -> Item | None:
        item = self.first()
        if item is None:
            return None
        place = self._places.pop(item)
        self.remove(item)
        self._ghosts[place.is_main][self._items.facts(item).key] = None
        self._forget_ghosts()
        return item

    def first(self) -> Item | None:
        raise NotImplementedError

    def used(self, item: Item) -> None:
        pass

    def expired(self, now_s: float) -> Item | None:
        return None

    def __contains__(self, item: Item) -> bool:
        return item in self._queues[0] or item in self._queues[1]

    def __len__(self) -> int:
        return len(self._queues[0]) + len(self._queues[1])

    def _rank(self, item: Item) -> int:
        raise NotImplementedError

    def _born(self, facts: EvictionFacts) -> _Place:
        """Where an item starts that has just been published. Ghosts of its page may be taken out."""
        raise NotImplementedError

    def _forget_ghosts(self) -> None:
        """Keep as many as are of use."""
        raise NotImplementedError

    def _new_place(self, facts: EvictionFacts, *, is_main: bool) -> _Place:
        self._sequence += 1
        return _Place(is_main, self._sequence, facts.uses)

    def _move(self, item: Item, *, is_main: bool) -> None:
        self._queues[self._places[item].is_main].remove(item)
        self._places[item] = self._new_place(self._items.facts(item), is_main=is_main)
        self._queues[is_main].add(item)


class Slru(TwoQueues[Item]):
    """Segmented LRU: an item that is used again is protected. Of the protected ones, those that were used least
    recently lose that when they are more than ``protected_share`` of all. (Karedla 1994)"""

    def __init__(self, items: Describe[Item], *, protected_share: float = 0.8) -> None:
        if not 0 < protected_share < 1:
            raise ConfigError("protected_share", protected_share, "a share above 0 and below 1")
        super().__init__(items)
        self._share = protected_share

    def first(self) -> Item | None:
        new, protected = self._queues
        while (item := new.first()) is not None and self._items.facts(item).uses > self._places[item].uses:
            self._move(item, is_main=True)
            while len(protected) > self._share * len(self) and (idle := protected.first()) is not None:
                self._move(idle, is_main=False)
        return item if item is not None else protected.first()

    def _rank(self, item: Item) -> int:
        return self._items.last_use(item)

    def _born(self, facts: EvictionFacts) -> _Place:
        place = self._new_place(facts, is_main=False)
        place.uses = 1
        return place

    def _forget_ghosts(self) -> None:
        for ghosts in self._ghosts:
            ghosts.clear()


class S3Fifo(TwoQueues[Item]):
    """Three queues: what is new waits in a small one of ``small_share`` of all, and reaches the main one when it is
    used ``touches`` times there, or soon after it has gone; the main one passes over what was used. (Yang, SOSP 2023)
    """

    def __init__(self, items: Describe[Item], *, small_share: float = 0.1, touches: int = 1) -> None:
        if not 0 < small_share < 1:
            raise ConfigError("small_share", small_share, "a share above 0 and below 1")
        if touches not in (1, 2, 3):
            raise ConfigError("touches", touches, "1 to 3 uses in the small queue")
        super().__init__(items)
        self._share = small_share
        self._touches = touches

    def first(self) -> Item | None:
        small, main = self._queues
        while True:
            if len(small) > self._share * len(self) or not len(main):
                if (item := small.first()) is None:
                    return None
                if self._items.facts(item).uses - self._places[item].uses < self._touches:
                    return item
                self._move(item, is_main=True)
            else:
                item = main.first()
                assert item is not None, "it is not empty"
                if not self._is_passed_over(item):
                    return item

    def _is_passed_over(self, item: Item) -> bool:
        place, uses = self._places[item], self._items.facts(item).uses
        place.credits = min(3, place.credits + uses - place.uses)
        place.uses = uses
        if not place.credits:
            return False
        place.credits -= 1
        self._sequence += 1
        place.sequence = self._sequence  # behind all others
        return True

    def _rank(self, item: Item) -> int:
        return self._places[item].sequence

    def _born(self, facts: EvictionFacts) -> _Place:
        was_here = facts.key in self._ghosts[0]
        self._ghosts[0].pop(facts.key, None)
        place = self._new_place(facts, is_main=was_here)
        place.uses = facts.uses if was_here else 1
        return place

    def _forget_ghosts(self) -> None:
        self._ghosts[1].clear()
        while len(self._ghosts[0]) > max(len(self._queues[1]), 64):
            self._ghosts[0].popitem(last=False)


class Arc(TwoQueues[Item]):
    """Adaptive replacement: the share of what was used once grows when pages come back that went from there, and
    shrinks when such come back that were used more often. (Megiddo, FAST 2003)"""

    def __init__(self, items: Describe[Item]) -> None:
        super().__init__(items)
        self._target = 0.0  # items that were used once
        self._size = 1  # the most items that there were

    def add(self, item: Item) -> None:
        super().add(item)
        self._size = max(self._size, len(self))

    def first(self) -> Item | None:
        once, often = self._queues
        while (item := once.first()) is not None and self._items.facts(item).uses > self._places[item].uses:
            self._move(item, is_main=True)
        if item is not None and (len(once) > self._target or not len(often)):
            return item
        return often.first()

    def _rank(self, item: Item) -> int:
        return self._items.last_use(item)

    def _born(self, facts: EvictionFacts) -> _Place:
        once, often = self._ghosts
        if facts.key in once:
            self._target = min(self._size, self._target + max(1.0, len(often) / len(once)))
        elif facts.key in often:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(often)))
        place = self._new_place(facts, is_main=facts.key in once or facts.key in often)
        once.pop(facts.key, None)
        often.pop(facts.key, None)
        place.uses = 1
        return place

    def _forget_ghosts(self) -> None:
        once, often = self._ghosts
        while once and len(once) + len(self._queues[0]) > self._size:
            once.popitem(last=False)
        while often and len(once) + len(often) > self._size:
            often.popitem(last=False)


class RandomLeaf(Generic[Item]):
    """Any item, each with the same chance: a measure for what the others know. The same ones for the same ``seed``."""

    watches_use = False
    by_page = True

    def __init__(self, items: Describe[Item], *, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._all: list[Item] = []
        self._indices: dict[Item, int] = {}
        self._chosen: Item | None = None

    def add(self, item: Item) -> None:
        if item not in self._indices:
            self._indices[item] = len(self._all)
            self._all.append(item)

    def remove(self, item: Item) -> None:
        index = self._indices.pop(item, None)
        if index is None:
            return
        last = self._all.pop()
        if last is not item:
            self._all[index] = last
            self._indices[last] = index
        if item is self._chosen:
            self._chosen = None

    def pop(self) -> Item | None:
        item = self.first()
        if item is not None:
            self.remove(item)
        return item

    def first(self) -> Item | None:
        if self._chosen is None and self._all:
            self._chosen = self._all[self._random.randrange(len(self._all))]
        return self._chosen

    def used(self, item: Item) -> None:
        pass

    def expired(self, now_s: float) -> Item | None:
        return None

    def __contains__(self, item: Item) -> bool:
        return item in self._indices

    def __len__(self) -> int:
        return len(self._all)
