"""Every eviction policy, each held against what its engine relies on while the model drives it."""

from __future__ import annotations

from functools import partial
from typing import Any

from hicache.node import Entry
from hicache.policies.eviction import Describe, EvictionFactory, EvictionPolicy, Heap
from hicache.policies.eviction_choice import EVICTION_POLICIES
from hicache.policies.eviction_kinds import Marconi, TailTrim, Ttl
from hicache.policies.facts import EvictionFacts

TTL_S = 60.0
EVICTIONS: dict[str, EvictionFactory] = {  # with settings that matter to prompts of a few pages
    **EVICTION_POLICIES,
    "ttl": partial(Ttl, ttl_s=TTL_S),
    "tail_trim": partial(TailTrim, budget_tokens=8, turn_tokens=2),
    "marconi": partial(Marconi, doubling_s=20.0),
}


class CheckedFacts:
    """What the engine tells of its entries, which must be possible."""

    def __init__(self, items: Describe[Entry]) -> None:
        self._items = items
        self.last_use = items.last_use

    def facts(self, entry: Entry) -> EvictionFacts:
        facts = self._items.facts(entry)
        assert facts.used_s <= facts.now_s
        assert facts.uses >= 1
        assert 0 < facts.tokens <= facts.end_tokens
        assert facts.bytes > 0
        assert facts.used_at == self._items.last_use(entry)
        assert facts.last is None or facts.last.at_s <= facts.used_s
        return facts


class CheckedEviction:
    """A policy beside the plain set of what may go. What can be ranked is compared with the lowest rank of all."""

    by_page = True

    def __init__(self, factory: EvictionFactory, items: Describe[Any]) -> None:
        described = CheckedFacts(items)
        self.facts = described.facts
        self.policy: EvictionPolicy[Entry] = factory(described)
        self.watches_use = self.policy.watches_use
        self._there: set[Entry] = set()
        self._told_s = 0.0

    def add(self, item: Entry) -> None:
        assert item.node.entries[item.tier][item.group] is item, "what has gone may not go again"
        self.policy.add(item)
        self._there.add(item)
        self._check(item)

    def remove(self, item: Entry) -> None:
        self.policy.remove(item)
        self._there.discard(item)
        self._check(item)

    def first(self) -> Entry | None:
        item = self.policy.first()
        assert (item in self._there) if self._there else item is None, "nothing is forgotten, and nothing made up"
        return item

    def pop(self) -> Entry | None:
        named = self.first()
        if isinstance(self.policy, Heap) and named is not None:
            assert self._rank(named) == min(map(self._rank, self._there)), "something else is worth less"
        item = self.policy.pop()
        assert item is named, "what was named is what goes"
        if item is not None:
            self._there.remove(item)
            self._check(item)
        return item

    def used(self, item: Entry) -> None:
        assert self.watches_use
        self.policy.used(item)
        self._check(item)

    def expired(self, now_s: float) -> Entry | None:
        assert now_s >= self._told_s
        self._told_s = now_s
        item = self.policy.expired(now_s)
        assert item is None or item is self.first()
        assert item is None or now_s - self.facts(item).used_s > TTL_S
        return item

    def __contains__(self, item: Entry) -> bool:
        return item in self._there

    def __len__(self) -> int:
        return len(self._there)

    def _rank(self, item: Entry) -> Any:
        assert isinstance(self.policy, Heap)
        return self.policy._rank(item)

    def _check(self, item: Entry) -> None:
        assert (item in self.policy) == (item in self._there)
        assert len(self.policy) == len(self._there)


def checked(factory: EvictionFactory) -> EvictionFactory:
    return partial(CheckedEviction, factory)
