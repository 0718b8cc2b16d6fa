"""Continuation: keep what will be used again soon, for the GPU time that it saves. No parameters.

One object is both the write policy and the eviction policy of a tier, which share a forecast (see ``own_forecast``)::

    policy = Continuation()
    TierSpec("L3", pages, eviction=policy.eviction, write=lambda: policy)

A page is worth its forecast rate of use, times what its last token costs to compute, which grows with the depth. The
page that is worth least goes first, and prices the room: a request's pages are written if what they are expected to
save, less that room for as long as they had best be kept, is more than writing costs. A last page that is not full,
and so never used again with the others, is found out and not written either while room is short.

What a second request uses without going on from the first one is shared: it is worth the rate of its own last uses.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Generic

from hicache.errors import ConfigError
from hicache.policies.eviction import Describe, Item
from hicache.policies.eviction_kinds import PrefillCost, dense_8b_flops
from hicache.policies.facts import EvictionFacts, Key, RequestFacts, SuffixFacts
from hicache.policies.own_forecast import Forecast, Life

_REMEMBERED_PAGES = 1 << 20
WRITE_COST = 0.125  # 3.0 of 23.5 us a token: docs/policies.md, the costs of a published rig
_TAIL_SHARE = 0.25  # a last page that is used in fewer continuations is not worth writing


class Continuation:
    """See the module. Not thread-safe; about 150 bytes for each of the million pages that it remembers.

    ``write_cost`` is what writing a token costs, in terms of computing the first token of a prompt. ``forecast`` is
    for studies of what a better one would bring.
    """

    ahead_share = 0.0

    def __init__(
        self,
        *,
        prefill: PrefillCost = dense_8b_flops,
        forecast: Forecast | None = None,
        write_cost: float = WRITE_COST,
        remembered_pages: int = _REMEMBERED_PAGES,
    ) -> None:
        if not 0 <= write_cost < math.inf:
            raise ConfigError("write_cost", write_cost, "a finite share of at least 0 of the cost of computing a token")
        self._prefill = prefill
        self._write_price = write_cost * prefill(0, 1)
        self._forecast = forecast or Forecast()
        self._remembered_pages = remembered_pages
        self._lives: deque[tuple[Life, Sequence[Key]]] = deque()
        self._pages = 0
        self._life_of: dict[Key, Life] = {}
        self._life_by_request: dict[int, Life] = {}  # by the identity of the facts, which the life keeps
        self._shared_by_request: dict[int, list[tuple[int, Life]]] = {}  # what else it used: where that ends, in tokens
        self._is_told = False  # of touches: else lives begin and end as resident pages are used
        self._tails_used, self._tails = 1.0, 2.0

    # -- write policy ------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[Key], facts: SuffixFacts) -> bool:
        """The lives that the request goes on from end, and one begins, or gets longer where it had begun.

        A part of a life that a request takes without going on from it is shared from then on.
        """
        self._is_told = True
        now_s, request, page_tokens = facts.now_s, facts.request, facts.page_tokens
        own, shared = list[Key](), list[tuple[int, Life]]()
        turn = new_pages = end = 0
        for life, pages in self._users(keys):
            start, end = end, end + pages
            if life is not None and (life.uses_s is not None or 2 * pages < life.pages):
                end_tokens = (facts.first_page + end) * page_tokens
                shared.append((end_tokens, self._share(life, now_s, end_tokens, keys[start:end])))
                continue
            own += keys[start:end]
            if life is None:
                new_pages += pages
            else:
                turn = life.turn + 1
                self._go_on(life, now_s, pages)
        itself = self._life_by_request.get(id(request))
        if own and (itself is None or itself.uses_s is not None):
            itself = self._forecast.begin(
                now_s,
                tenant=request.tenant if request else "",
                kind=request.kind if request else None,
                tokens=request.prompt_tokens if request else (facts.first_page + len(keys)) * page_tokens,
                new_tokens=new_pages * page_tokens,
                turn=turn,
            )
        if itself is not None and own:
            itself.pages += len(own)
            self._remember(itself, own)
        if itself is not None or shared:
            self._name(itself or shared[-1][1], request, shared)
        return True

    def admits(self, keys: Sequence[Key], facts: SuffixFacts) -> int:
        """All while there is room. Else what is shared and what is the request's own, each whole or not at all, but for
        a last page that nobody uses."""
        life = self._life_by_request.get(id(facts.request)) or (self._life_of.get(keys[-1]) if keys else None)
        victim = facts.victim()
        if life is None or victim is None:
            return len(keys)
        least = self.worth(victim)
        saved = self._prefill(life.tokens, life.tokens + 1)
        if self._forecast.gain(life, saved, least) > self._write_price:
            return len(keys) - (self._tails_used < _TAIL_SHARE * self._tails)
        return self._shared_pages(keys, facts.now_s, least)

    def _shared_pages(self, keys: Sequence[Key], now_s: float, least: float) -> int:
        """How many of the pages, from the first on, are shared and worth more than the victim."""
        pages = 0
        for life, its in self._users(keys):
            if life is None or life.uses_s is None or self._worth_of(life, now_s, life.tokens) <= least:
                break
            pages += its
        return pages

    def wrote(self, size_bytes: int) -> None:
        pass

    def _go_on(self, life: Life, now_s: float, pages: int) -> None:
        """A request uses ``pages`` of a life, which are most of it."""
        self._tails += not life.ended
        self._tails_used += pages == life.pages and not life.ended
        self._forecast.end(life, now_s)
        life.pages -= pages

    def _share(self, life: Life, now_s: float, end_tokens: int, keys: Sequence[Key]) -> Life:
        """A request uses these pages of a life besides others, that it goes on from."""
        if life.uses_s is None or len(keys) < life.pages:
            life.pages -= len(keys)
            life = Life.shared(life, end_tokens, len(keys))
            self._remember(life, keys)
        assert life.uses_s is not None, "what is shared has uses"
        life.uses_s.append(now_s)
        return life

    def _users(self, keys: Sequence[Key]) -> list[tuple[Life | None, int]]:
        """Lives of the keys, and how many pages each of them has there, from the root on."""
        return [(life, len(list(pages))) for life, pages in groupby(map(self._life_of.get, keys))]

    def _remember(self, life: Life, keys: Sequence[Key]) -> None:
        self._life_of.update(dict.fromkeys(keys, life))
        self._lives.append((life, keys))
        self._pages += len(keys)
        while self._pages > self._remembered_pages and len(self._lives) > 1:
            old, old_keys = self._lives.popleft()
            if old.uses_s is not None and old.uses_s[-1] > old.started_s:  # since it was last here
                old.started_s = old.uses_s[-1]
                self._lives.append((old, old_keys))
                continue
            self._pages -= len(old_keys)
            for request in old.requests:
                self._forget_request(request, old)
            for key in old_keys:
                if self._life_of.get(key) is old:
                    del self._life_of[key]

    def _name(self, life: Life, request: RequestFacts | None, shared: list[tuple[int, Life]]) -> None:
        """``request`` stands for the life. The one before still does: pages are told of with it until they are used."""
        if request is None:
            return
        if self._life_by_request.get(id(request)) is not life:
            if len(life.requests) == 2:
                self._forget_request(life.requests.popleft(), life)
            life.requests.append(request)
            self._life_by_request[id(request)] = life
        if shared:
            self._shared_by_request.setdefault(id(request), []).extend(shared)

    def _forget_request(self, request: object, life: Life) -> None:
        if self._life_by_request.get(id(request)) is life:
            del self._life_by_request[id(request)]
            self._shared_by_request.pop(id(request), None)

    # -- what the eviction policy asks -------------------------------------------------------------------------------

    def eviction(self, items: Describe[Item]) -> ContinuationEviction[Item]:
        """An eviction policy that is told of the same requests: of a tier, or of a group in one."""
        return ContinuationEviction(items, self)

    def worth(self, facts: EvictionFacts) -> float:
        """What a page is worth: cost saved per second of room."""
        return self._worth_of(self._life(facts), facts.now_s, facts.end_tokens)

    def _worth_of(self, life: Life, now_s: float, end_tokens: int) -> float:
        end_tokens = min(end_tokens, life.tokens)
        return self._forecast.rate(life, now_s) * self._prefill(end_tokens, end_tokens + 1)

    def used(self, facts: EvictionFacts) -> None:
        """A resident page is used by the next request. Ends lives where nobody tells of touches."""
        if not self._is_told:
            self._forecast.end(self._life(facts), facts.now_s)

    def _life(self, facts: EvictionFacts) -> Life:
        """Of a page. A request that has found it, and has not touched it yet, may still go on from its life or not."""
        request = facts.last
        life = None
        if request is not None:
            shared = self._shared_by_request.get(id(request), ())
            within = (life for end_tokens, life in shared if facts.end_tokens <= end_tokens)
            life = next(within, None) or self._life_by_request.get(id(request))
        if life is None and (request is None or self._is_told):
            life = self._life_of.get(facts.key)
        if life is None:
            life = self._forecast.begin(
                facts.used_s,
                tenant=request.tenant if request else "",
                kind=request.kind if request else None,
                tokens=request.prompt_tokens if request else facts.end_tokens,
                new_tokens=request.new_tokens if request else facts.tokens,
                turn=(request.turn or 0) if request else 0,
            )
            self._remember(life, (facts.key,))
            self._name(life, request, [])
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
            heapq.heappop(self._heap)
            if self._live.get(item) == number:
                self._push(item)
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
        if item in self._live:
            self._record(item, 0.0, 0)  # surfaces first, and is put where it belongs then

    def expired(self, now_s: float) -> Item | None:
        return None

    def __contains__(self, item: Item) -> bool:
        return item in self._live

    def __len__(self) -> int:
        return len(self._live)

    def _push(self, item: Item) -> None:
        facts = self._items.facts(item)
        self._record(item, self._policy.worth(facts), facts.used_at)

    def _record(self, item: Item, worth: float, used_at: int) -> None:
        self._number += 1
        self._changes += 1
        self._live[item] = self._number
        heapq.heappush(self._heap, (worth, used_at, self._number, item))

    def _look_again(self) -> None:
        items = list(self._live)
        self._heap.clear()
        for item in items:
            self._push(item)
        self._changes = 0
