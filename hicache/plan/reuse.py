"""What a trace reuses: the share of prompt tokens that a cache with a TTL finds, and what it holds meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError
from hicache.plan.workload import Workload

STEPS = 50


@dataclass(frozen=True, slots=True)
class TtlPoint:
    """A cache that drops what was not used for ``ttl_s``.

    ``hit_ratio``: prompt tokens that it has, of all. ``resident_tokens``: what it holds on average.
    ``storage_ratio``: token-seconds that it holds for reuse, over those of requests being served.
    ``written_tokens_per_s``: prompt tokens that it has to take in, each time anew when they were dropped.
    """

    ttl_s: float
    hit_ratio: float
    resident_tokens: float
    storage_ratio: float
    written_tokens_per_s: float


class ReuseCurve:
    """Gaps between the uses of each prefix block of a trace.

    Every use of a block is one of all blocks before it, so that none is ever dropped before its successors: hits are
    hits of whole prefixes. Exact for an unbounded cache with a TTL; for one with a bound the TTL at which it is full on
    average is the usual estimate (Che's).
    """

    def __init__(self, workload: Workload) -> None:
        """Raises ConfigError for a trace without block ids, or of a single moment."""
        if not workload.has_blocks:
            raise ConfigError("trace", "lengths only", "block ids, to tell what is reused")
        first, last = workload.requests[0], workload.requests[-1]
        self.duration_s = last.at_s - first.at_s
        if self.duration_s <= 0:
            raise ConfigError("trace", self.duration_s, "requests at more than one moment")
        self.served_token_s = sum((r.input_tokens + r.output_tokens) * r.service_s for r in workload.requests)
        self.total_tokens, self._reused, self._kept = _uses(workload, end_s=last.at_s)

    def at(self, ttl_s: float) -> TtlPoint:
        """The point of one TTL."""
        hits = float(self._reused.tokens[self._reused.gaps_s <= ttl_s].sum())
        held = self._reused.held(ttl_s) + self._kept.held(ttl_s)
        total = self.total_tokens
        return TtlPoint(
            ttl_s=ttl_s,
            hit_ratio=hits / total,
            resident_tokens=held / self.duration_s,
            storage_ratio=held / self.served_token_s if self.served_token_s else 0.0,
            written_tokens_per_s=(total - hits) / self.duration_s,
        )

    def holding(self, tokens: float) -> TtlPoint:
        """The longest TTL at which a cache of ``tokens`` is not full on average; the whole trace, where it never is."""
        low, high = 0.0, self.duration_s
        if self.at(high).resident_tokens <= tokens:
            return self.at(high)
        for _ in range(STEPS):
            middle = (low + high) / 2
            if self.at(middle).resident_tokens <= tokens:
                low = middle
            else:
                high = middle
        return self.at(low)


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Tokens by the time that they were not used for: both [n], neighbours of one gap together."""

    gaps_s: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]

    def held(self, ttl_s: float) -> float:
        """Token-seconds that a TTL keeps them for."""
        return float((self.tokens * np.minimum(self.gaps_s, ttl_s)).sum())


def _uses(workload: Workload, *, end_s: float) -> tuple[float, _Gaps, _Gaps]:
    """All prompt tokens, the gaps before they were used again, and the times from last uses to the end.

    A prompt's blocks were mostly last used together: runs of one gap are kept as one.
    """
    used_at = np.full(workload.block_count, -np.inf)
    block_tokens = np.zeros(workload.block_count)
    total = 0.0
    gaps: list[npt.NDArray[np.float64]] = []
    weights: list[npt.NDArray[np.float64]] = []
    for request in workload.requests:
        blocks = request.blocks
        if blocks is None or not len(blocks):
            continue
        ends = np.arange(1, len(blocks) + 1) * workload.block_tokens
        tokens = np.clip(workload.block_tokens - (ends - request.input_tokens), 0, workload.block_tokens).astype(float)
        gap = request.at_s - used_at[blocks]
        starts = np.flatnonzero(np.append(True, gap[1:] != gap[:-1]))
        gaps.append(gap[starts])
        weights.append(np.add.reduceat(tokens, starts))
        used_at[blocks], block_tokens[blocks] = request.at_s, tokens
        total += float(tokens.sum())
    gap, weight = np.concatenate(gaps), np.concatenate(weights)
    again, seen = np.isfinite(gap), np.isfinite(used_at)
    return total, _Gaps(gap[again], weight[again]), _Gaps(end_s - used_at[seen], block_tokens[seen])
