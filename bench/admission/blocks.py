"""Blocks cached one by one, as if they had nothing to do with each other: what simulators of object caches replay, and
what a cache of prefixes loses by that."""

from __future__ import annotations

from dataclasses import dataclass

from bench.admission.traces import Trace
from hicache.policies.eviction import EvictionFactory
from hicache.policies.eviction_choice import eviction_policy_of
from hicache.policies.facts import EvictionFacts


@dataclass(frozen=True, slots=True)
class BlockResult:
    """``hit_blocks`` were resident when they were named; only those of a prefix without a gap are usable."""

    references: int
    hit_blocks: int
    usable_blocks: int
    usable_tokens: int
    input_tokens: int

    @property
    def orphan_share(self) -> float:
        """References that found a block that was of no use, for want of one before it."""
        return (self.hit_blocks - self.usable_blocks) / self.references if self.references else 0.0


class _Block:
    __slots__ = ("block", "born_at", "page", "used_at", "used_s", "uses")

    def __init__(self, block: int, page: int, now: int, now_s: float) -> None:
        self.block = block
        self.page = page
        self.born_at = self.used_at = now
        self.used_s = now_s
        self.uses = 1


class BlockCache:
    """Each block on its own, in the order in which requests name them: what is evicted may leave those after it."""

    def __init__(self, capacity: int, *, block_tokens: int, eviction: str | EvictionFactory) -> None:
        assert capacity > 0, capacity
        self._capacity = capacity
        self._block_tokens = block_tokens
        self._blocks: dict[int, _Block] = {}
        self._policy = eviction_policy_of(eviction)(self)
        self._now = 0
        self._now_s = 0.0

    def last_use(self, block: _Block) -> int:
        """See ``Describe``."""
        return block.used_at

    def facts(self, block: _Block) -> EvictionFacts:
        """See ``Describe``."""
        end_tokens = (block.page + 1) * self._block_tokens
        return EvictionFacts(
            block.block,
            self._now_s,
            block.used_s,
            block.used_at,
            block.born_at,
            block.uses,
            end_tokens,
            self._block_tokens,
            self._block_tokens,
        )

    def access(self, number: int, page: int, now_s: float) -> bool:
        """Name a block. Returns whether it was resident; it is then."""
        self._now += 1
        self._now_s = now_s
        block = self._blocks.get(number)
        if block is not None:
            self._policy.used(block)
            block.uses += 1
            block.used_at, block.used_s = self._now, now_s
            return True
        if len(self._blocks) == self._capacity:
            victim = self._policy.pop()
            assert victim is not None, "everything may go"
            del self._blocks[victim.block]
        block = self._blocks[number] = _Block(number, page, self._now, now_s)
        self._policy.add(block)
        return False


def replay_blocks(
    trace: Trace, capacity: int, eviction: str | EvictionFactory, *, warm_share: float = 0.0
) -> BlockResult:
    """All requests of a trace, block by block. The first ``warm_share`` of them count for nothing."""
    cache = BlockCache(capacity, block_tokens=trace.block_tokens, eviction=eviction)
    references = hit_blocks = usable_blocks = usable_tokens = input_tokens = 0
    first_scored = int(len(trace.requests) * warm_share)
    for number, request in enumerate(trace.requests):
        hits = [cache.access(block, page, request.at_s) for page, block in enumerate(request.blocks)]
        if number < first_scored:
            continue
        usable = hits.index(False) if False in hits else len(hits)
        references += len(hits)
        input_tokens += request.tokens
        hit_blocks += sum(hits)
        usable_blocks += usable
        usable_tokens += min(usable * trace.block_tokens, request.tokens)
    return BlockResult(references, hit_blocks, usable_blocks, usable_tokens, input_tokens)
