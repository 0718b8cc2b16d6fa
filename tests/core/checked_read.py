"""A read policy that checks what it is told, and whether L3 is asked for what may be worth it, and for nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hicache.policies.read import LoadFacts, ReadCosts, read_policy_of
from hicache.prefetch import Prefetcher
from hicache.read_admission import Offer
from hicache.stats import DirectoryStats
from tests.core.live import PAGE


class CheckedRead:
    """A read policy that holds what it is told, and what it answers, against what must hold of both."""

    def __init__(self, choice: str, costs: ReadCosts) -> None:
        self._policy = read_policy_of(choice, costs)

    def tokens(self, facts: LoadFacts) -> int:
        self._check(facts)
        assert facts.bytes >= 0
        tokens = self._policy.tokens(facts)
        assert 0 <= tokens <= facts.usable_tokens - facts.held_tokens
        assert tokens % PAGE == 0
        return tokens

    def patience_s(self, facts: LoadFacts) -> float:
        self._check(facts)
        return self._policy.patience_s(facts)

    def _check(self, facts: LoadFacts) -> None:
        assert facts.held_tokens < facts.usable_tokens <= facts.prompt_tokens
        assert facts.queue_s >= 0
        assert facts.patience_s >= 0


def could_pay(prefetcher: Prefetcher, keys: Sequence[bytes], *, own: int) -> bool:
    """Whether the read policy would load some prefix if L3 had all of it: each legal length by itself."""
    index, admission, coming = prefetcher._index, prefetcher._admission, prefetcher.fetches._coming
    local = max(own, index.match(keys, own=own))
    objects = len(prefetcher._missing(keys, beyond=local, own=own))
    for stop in range(local + 1, len(keys) + 1):
        parts = [(page, group) for page, group in index.rule.needed(stop) if (keys[page], group) not in coming]
        size_bytes = sum(
            prefetcher._stats.object_bytes[group]
            for page, group in parts
            if page >= own and not index.resident(keys[page]) >> group & 1
        )
        offer = Offer(local, [stop], len(keys), lambda _, size=size_bytes: size, math.inf, lookup_objects=objects)
        if admission._policy.tokens(admission._facts(offer, stop)):
            return True
    return False


def declined_requests(stats: DirectoryStats) -> int:
    """Requests for which L3 was not asked since that takes too long, or nobody knows how long."""
    return stats.prefetch_declined["faster_computed"] + stats.prefetch_declined["unmeasured"]


@contextmanager
def declines_what_cannot_pay(prefetcher: Prefetcher, keys: Sequence[bytes], *, own: int = 0) -> Iterator[None]:
    """Within it a prefetch starts: L3 is asked if, and only if, something that it may have is worth it."""
    declined = prefetcher._stats.prefetch_declined
    before = declined.copy()
    pays = could_pay(prefetcher, keys, own=own)
    yield
    reasons = declined - before
    if prefetcher._admission._costs._prefill.reaches(len(keys) * PAGE):  # else longer ones are doubted more
        assert not (pays and reasons["faster_computed"]), "what L3 has might be worth it"
        assert pays or reasons or not keys, "L3 is asked in vain"
