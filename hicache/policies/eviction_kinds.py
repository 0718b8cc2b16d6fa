"""Eviction by one rank: each policy says what is worth least, the heap finds it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from hicache.errors import ConfigError
from hicache.policies.eviction import Describe, Item, Ranked, Reranked
from hicache.policies.facts import EvictionFacts

PrefillCost: TypeAlias = Callable[[int, int], float]  # of computing tokens [start, end), in any unit


def dense_8b_flops(start_tokens: int, end_tokens: int) -> float:
    """FLOPs of Llama-3.1-8B: linear layers, and attention over all that comes before."""
    return 13.96e9 * (end_tokens - start_tokens) + 262144.0 * (end_tokens**2 - start_tokens**2)


class Fifo(Ranked[Item]):
    """What was published first goes first."""

    watches_use = False

    def rank(self, item: Item, facts: EvictionFacts) -> tuple[int, int]:
        return facts.born_at, facts.used_at


class Lfu(Ranked[Item]):
    """What fewer requests have used goes first, and of those what was used least recently."""

    def rank(self, item: Item, facts: EvictionFacts) -> tuple[int, int]:
        return facts.uses, facts.used_at


class Ttl(Ranked[Item]):
    """What nobody has used for ``ttl_s`` goes, though there is room; short of room, what was used least recently."""

    def __init__(self, items: Describe[Item], *, ttl_s: float = 600.0) -> None:
        if not ttl_s > 0:
            raise ConfigError("ttl_s", ttl_s, "a time above 0 s; math.inf for no limit")
        super().__init__(items)
        self.ttl_s = ttl_s

    def rank(self, item: Item, facts: EvictionFacts) -> tuple[float, int]:
        return facts.used_s, facts.used_at

    def expired(self, now_s: float) -> Item | None:
        item = self.first()
        if item is None or now_s - self._items.facts(item).used_s <= self.ttl_s:
            return None
        return item


class Gdsf(Reranked[Item]):
    """Greedy dual size frequency, by prefill cost: what it would take to compute an item again, times how often it was
    used, per byte; on top of what the last victim was worth when the item was last used, so that all grow old.

    With ``prefill=None`` all costs are equal, which makes it LFU with dynamic ageing. (Cherkasova 1998)
    """

    by_page = True

    def __init__(self, items: Describe[Item], *, prefill: PrefillCost | None = dense_8b_flops) -> None:
        super().__init__(items)
        self._prefill = prefill
        self._age = 0.0
        self._unit: float | None = None  # worth per byte of the first item that was seen: ages stay near 1

    def rank(self, item: Item, facts: EvictionFacts) -> tuple[float, int]:
        age, worth = self._state.get(item, (self._age, None))
        if worth is None:  # a state's changes with the states before it: what it was at the last use counts
            worth = self._worth(facts)
            self._state[item] = age, worth
        return age + facts.uses * worth, facts.used_at

    def used(self, item: Item) -> None:
        super().used(item)
        if item in self._state:
            self._state[item] = self._age, None

    def pop(self) -> Item | None:
        item = self.first()
        if item is not None:
            self._age = self._heap[0][0][0]
        return super().pop()

    def _worth(self, facts: EvictionFacts) -> float:
        if self._prefill is None:
            return 1.0
        worth = self._prefill(facts.end_tokens - facts.tokens, facts.end_tokens) / facts.bytes
        if self._unit is None:
            self._unit = worth or 1.0
        return worth / self._unit


class Marconi(Reranked[Item]):
    """Recency against the compute that a byte saves, for pages and for states of hybrid models.

    An item that saves twice as much per byte may be idle ``doubling_s`` longer before it goes. States are priced by
    all the tokens that they save to compute, and by their own bytes. Follows the idea of Marconi (MLSys 2025), which
    weighs recency against saving, each normalised over all candidates: a rank that is fixed at the last use needs no
    look at them.
    """

    by_page = True

    def __init__(
        self, items: Describe[Item], *, doubling_s: float = 60.0, prefill: PrefillCost = dense_8b_flops
    ) -> None:
        if not 0 <= doubling_s < math.inf:
            raise ConfigError("doubling_s", doubling_s, "a time of at least 0 s")
        super().__init__(items)
        self._doubling_s = doubling_s
        self._prefill = prefill

    def rank(self, item: Item, facts: EvictionFacts) -> tuple[float, int]:
        if (bonus_s := self._state.get(item)) is None:  # a state's changes: what it was at the last use counts
            saved = self._prefill(facts.end_tokens - facts.tokens, facts.end_tokens) / facts.bytes
            self._state[item] = bonus_s = self._doubling_s * math.log2(max(saved, 1e-300))
        return facts.used_s + bonus_s, facts.used_at

    def used(self, item: Item) -> None:
        super().used(item)
        self._state.pop(item, None)


class TailTrim(Reranked[Item]):
    """Least recently used first, but before all that the ends of prompts: what can be computed within the budget for a
    first token need not be kept. Of a prompt of n tokens the last ``budget_tokens - turn_tokens`` are such an end,
    where a turn is expected to bring ``turn_tokens`` of its own. (T-LRU, arXiv 2510.15152)
    """

    by_page = True

    def __init__(self, items: Describe[Item], *, budget_tokens: int = 4096, turn_tokens: int = 1024) -> None:
        if not 0 <= turn_tokens <= budget_tokens:
            raise ConfigError("turn_tokens", turn_tokens, f"0 to budget_tokens, {budget_tokens}")
        super().__init__(items)
        self._end_tokens = budget_tokens - turn_tokens

    def rank(self, item: Item, facts: EvictionFacts) -> tuple[bool, int]:
        prompt_tokens = facts.end_tokens if facts.last is None else facts.last.prompt_tokens
        is_end = facts.last is not None and facts.end_tokens > prompt_tokens - self._end_tokens
        return not is_end, facts.used_at
