"""Continuation: keep what will be used again soon, for the GPU time that it saves. No parameters.

One object is both the write policy and the eviction policy of a tier, which share a forecast (see ``own_forecast``)::

    policy = Continuation()
    TierSpec("L3", pages, eviction=policy.eviction, write=lambda: policy)

A page is worth its forecast rate of use, times what a token at the end of its prompt costs to compute, which grows
with the length: the end is what is left to a life, since others share the start. The page that is worth least goes
first; what is not worth clearly more than that is not written. A last page that is not full, and so never used again
with the others, is found out and not written either while room is short.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Generic

from hicache.policies.eviction import Describe, Item
from hicache.policies.eviction_kinds import PrefillCost, dense_8b_flops
from hicache.policies.facts import EvictionFacts, Key, RequestFacts, SuffixFacts
from hicache.policies.own_forecast import Forecast, Life

_REMEMBERED_PAGES = 1 << 20
_WRITE_MARGIN = 1.3  # a page that is worth less than so many times its victim is not worth the exchange
SHARED_S = 60.0
_TAIL_SHARE = 0.25  # a last page that is used in fewer continuations is not worth writing


class Continuation:
    """See the module. Not thread-safe; about 150 bytes for each of the million pages that it remembers."""

    ahead_share = 0.0

    def __init__(self, *, prefill: PrefillCost = dense_8b_flops, remembered_pages: int = _REMEMBERED_PAGES) -> None:
        self._prefill = prefill
        self._forecast = Forecast()
        self._remembered_pages = remembered_pages
        self._lives: deque[tuple[Life, Sequence[Key]]] = deque()
        self._pages = 0
        self._life_of: dict[Key, Life] = {}
        self._life_by_request: dict[int, Life] = {}  # by the identity of the facts, which the life keeps
        self._forks: dict[int, list[tuple[int, Life]]] = {}
        self._touched: Sequence[Key] | None = None  # by a request that nothing else is known of yet
        self._unnamed: Life | None = None
        self._tails_used, self._tails = 1.0, 2.0
        self._evictions: ContinuationEviction[object] | None = None

    # -- write policy ------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[Key]) -> bool:
        self._touched = keys
        return True

    def admits(self, keys: Sequence[Key], facts: SuffixFacts) -> int:
        """All pages while there is room. Else all or none: they share a fate, but for a last one that nobody uses."""
        life = self._observe(facts.now_s, facts.request, facts.page_tokens) or self._life_of.get(keys[-1])
        if life is None or self._evictions is None or facts.victim() is None:
            return len(keys)
        least = self._evictions.least()
        if least is not None and self.worth_of(life, facts.now_s) <= _WRITE_MARGIN * least:
            return 0
        return len(keys) - (self._tails_used < _TAIL_SHARE * self._tails)

    def _observe(self, now_s: float, request: RequestFacts | None, page_tokens: int) -> Life | None:
        """A request has touched pages: the lives that it goes on from end, and one begins.

        A part of a life that a request takes without going on from it is a fork: its pages are shared from then on.
        """
        keys, self._touched = self._touched, None
        if not keys:
            return None
        own, turn, end, users = list[Key](), 0, 0, self._users(keys)
        shared = list[tuple[Life, Sequence[Key]]]()
        new_pages = 0
        for life, pages in users:
            start, end = end, end + pages
            if life is None:
                new_pages += pages
                own += keys[start:end]
                continue
            goes_on = 2 * pages >= life.pages
            if life.uses_s is None and goes_on:
                self._tails += not life.ended
                self._tails_used += pages == life.pages and not life.ended
                self._forecast.end(life, now_s)
                turn = life.turn + 1
                own += keys[start:end]
            else:
                shared.append((Life.shared(life, now_s, end * page_tokens, pages), keys[start:end]))
            life.pages -= pages
        for life, its_keys in shared:
            self._remember(life, its_keys, None)
        if own:
            life = self._forecast.begin(
                now_s,
                tenant=request.tenant if request else "",
                kind=request.kind if request else None,
                tokens=request.prompt_tokens if request else len(keys) * page_tokens,
                new_tokens=new_pages * page_tokens,
                turn=turn,
            )
            life.pages = len(own)
            self._remember(life, own, request)
        else:
            life = shared[-1][0]
        self._unnamed = life if request is None else None
        if request is not None and shared:
            self._forks[id(request)] = [(each.tokens, each) for each, _ in shared]
        return life

    def _users(self, keys: Sequence[Key]) -> list[tuple[Life | None, int]]:
        """Lives of the keys, and how many pages each of them has there, from the root on."""
        return [(life, len(list(pages))) for life, pages in groupby(map(self._life_of.get, keys))]

    def _remember(self, life: Life, keys: Sequence[Key], request: RequestFacts | None) -> None:
        self._life_of.update(dict.fromkeys(keys, life))
        self._name(life, request)
        self._lives.append((life, keys))
        self._pages += len(keys)
        while self._pages > self._remembered_pages and len(self._lives) > 1:
            old, old_keys = self._lives.popleft()
            self._pages -= len(old_keys)
            self._life_by_request.pop(id(old.request), None)
            self._forks.pop(id(old.request), None)
            for key in old_keys:
                if self._life_of.get(key) is old:
                    del self._life_of[key]

    def _name(self, life: Life, request: RequestFacts | None) -> None:
        if request is not None:
            life.request = request
            self._life_by_request[id(request)] = life

    # -- what the eviction policy asks -------------------------------------------------------------------------------

    def eviction(self, items: Describe[Item]) -> ContinuationEviction[Item]:
        """The eviction policy of the tier, which is told of the same requests."""
        policy = ContinuationEviction(items, self)
        self._evictions = policy  # type: ignore[assignment]  # asked for worths alone, whatever its items are
        return policy

    def worth(self, facts: EvictionFacts) -> float:
        """What a page is worth: cost saved per second of room."""
        return self.worth_of(self._life(facts), facts.now_s)

    def worth_of(self, life: Life, now_s: float) -> float:
        """The same, of all that a life has left."""
        if life.uses_s is not None:
            rate = len(life.uses_s) / (now_s - life.uses_s[0] + SHARED_S)
        else:
            rate = self._forecast.rate(life, now_s)
        return rate * self._prefill(life.tokens, life.tokens + 1)

    def used(self, facts: EvictionFacts) -> None:
        """A resident page is used by the next request. Ends lives where nobody tells of touches."""
        if self._touched is not None:
            self._observe(facts.now_s, None, facts.tokens)
        life = self._life(facts)
        if not life.pages:
            self._forecast.end(life, facts.now_s)

    def _life(self, facts: EvictionFacts) -> Life:
        request = facts.last
        if request is None:
            life = self._life_of.get(facts.key)
        else:
            for end_tokens, life in self._forks.get(id(request), ()):
                if facts.end_tokens <= end_tokens:
                    return life
            life = self._life_by_request.get(id(request))
        if life is not None:
            return life
        life, self._unnamed = self._unnamed, None
        if life is None:
            life = self._forecast.begin(
                facts.used_s,
                tenant=request.tenant if request else "",
                kind=request.kind if request else None,
                tokens=request.prompt_tokens if request else facts.end_tokens,
                new_tokens=request.new_tokens if request else facts.tokens,
                turn=(request.turn or 0) if request else 0,
            )
            self._remember(life, (facts.key,), request)
        else:
            self._name(life, request)
        return life


class ContinuationEviction(Generic[Item]):
    """Least worth first. Worths change with time, so an item is looked at again when it surfaces, and all of them after
    as many changes as there are items: O(log n) an operation."""

    watches_use = True
    by_page = False

    def __init__(self, items: Describe[Item], policy: Continuation | None = None) -> None:
        self._items = items
        self._policy = policy or Continuation()
        self._heap: list[tuple[float, int, int, Item]] = []
        self._live: dict[Item, int] = {}  # the number of its record
        self._number = 0
        self._changes = 0
        self._choice = -1  # the number of the record that ``first`` has named

    def add(self, item: Item) -> None:
        if item not in self._live:
            self._push(item)

    def remove(self, item: Item) -> None:
        self._live.pop(item, None)
        self._choice = -1

    def first(self) -> Item | None:
        if self._heap and self._heap[0][2] == self._choice == self._live.get(self._heap[0][3]):
            return self._heap[0][3]  # what was named goes, whatever was learned in between
        if self._changes > 64 + len(self._live) // 4:
            self._look_again()
        while self._heap:
            worth, _, number, item = self._heap[0]
            if self._live.get(item) == number:
                current = self._policy.worth(self._items.facts(item))
                if current <= worth * 1.05:
                    self._choice = number
                    return item
                self._push(item)
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Item | None:
        item = self.first()
        if item is not None:
            heapq.heappop(self._heap)
            del self._live[item]
        return item

    def used(self, item: Item) -> None:
        self._choice = -1
        self._policy.used(self._items.facts(item))

    def expired(self, now_s: float) -> Item | None:
        return None

    def least(self) -> float | None:
        """What the first item is worth; None when there is none."""
        item = self.first()
        return None if item is None else self._policy.worth(self._items.facts(item))

    def __contains__(self, item: Item) -> bool:
        return item in self._live

    def __len__(self) -> int:
        return len(self._live)

    def _push(self, item: Item) -> None:
        self._number += 1
        self._changes += 1
        self._live[item] = self._number
        facts = self._items.facts(item)
        heapq.heappush(self._heap, (self._policy.worth(facts), facts.used_at, self._number, item))

    def _look_again(self) -> None:
        items = list(self._live)
        self._heap.clear()
        for item in items:
            self._push(item)
        self._changes = 0
