"""Random eviction as simulators on a heap do it: a rank is drawn when a page comes in and when a request uses it, and
the lowest rank goes. Unlike drawing a victim among all, what has drawn a high rank stays, used or not."""

from __future__ import annotations

import heapq
import random
from typing import Any

from bench.admission.blocks import BlockResult
from bench.admission.traces import Trace
from hicache.policies.eviction import Describe


class RandomRank:
    """An eviction policy of the replayer."""

    watches_use = True
    by_page = True

    def __init__(self, items: Describe[Any], *, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._heap: list[tuple[float, int, Any]] = []
        self._ranks: dict[Any, float] = {}
        self._records = 0

    def add(self, item: Any) -> None:
        if item not in self._ranks:
            self._records += 1
            self._ranks[item] = self._random.random()
            heapq.heappush(self._heap, (self._ranks[item], self._records, item))

    def remove(self, item: Any) -> None:
        self._ranks.pop(item, None)

    def first(self) -> Any | None:
        while self._heap and self._ranks.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Any | None:
        item = self.first()
        self.remove(item)
        return item

    def used(self, item: Any) -> None:
        if item in self._ranks:
            self.remove(item)
            self.add(item)

    def expired(self, now_s: float) -> Any | None:
        return None

    def __contains__(self, item: Any) -> bool:
        return item in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)


def replay_without_leaf_rule(trace: Trace, capacity: int, *, seed: int = 0) -> BlockResult:
    """The same, whatever is below a block: a request draws again for its usable prefix, and evicts none of its own."""
    draw = random.Random(seed).random
    ranks: dict[int, float] = {}  # of what is resident
    heap: list[tuple[float, int]] = []
    hit_blocks = usable_blocks = usable_tokens = 0
    for request in trace.requests:
        here = [block in ranks for block in request.blocks]
        usable = here.index(False) if False in here else len(here)
        hit_blocks += sum(here)
        usable_blocks += usable
        usable_tokens += min(usable * trace.block_tokens, request.tokens)
        own, spared = set(request.blocks), list[tuple[float, int]]()
        for place, block in enumerate(request.blocks):
            if here[place] and place >= usable:
                continue
            while not here[place] and len(ranks) >= capacity:
                rank, victim = heapq.heappop(heap)
                if ranks.get(victim) != rank:
                    continue
                if victim in own:
                    spared.append((rank, victim))
                else:
                    del ranks[victim]
            ranks[block] = draw()
            heapq.heappush(heap, (ranks[block], block))
        for record in spared:
            heapq.heappush(heap, record)
    return BlockResult(trace.references, hit_blocks, usable_blocks, usable_tokens, trace.input_tokens)
