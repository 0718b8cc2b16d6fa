"""What a trace reuses: the share of prompt tokens that a cache with a TTL finds, and what it holds meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError
from hicache.plan.workload import Block, Workload

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
        gaps, tokens, left = _uses(workload)
        self.gaps_s: npt.NDArray[np.float64] = gaps  # [uses]: since the use before; inf at the first
        self.tokens: npt.NDArray[np.float64] = tokens  # [uses]: prompt tokens of the block
        self.left_s: npt.NDArray[np.float64] = left  # [uses]: to the next use, or to the end of the trace
        first, last = workload.requests[0], workload.requests[-1]
        self.duration_s = last.at_s - first.at_s
        if self.duration_s <= 0:
            raise ConfigError("trace", self.duration_s, "requests at more than one moment")
        self.served_token_s = sum((r.input_tokens + r.output_tokens) * r.service_s for r in workload.requests)

    def at(self, ttl_s: float) -> TtlPoint:
        """The point of one TTL."""
        hits = float(self.tokens[self.gaps_s <= ttl_s].sum())
        total = float(self.tokens.sum())
        held = float((self.tokens * np.minimum(self.left_s, ttl_s)).sum())
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


def _uses(workload: Workload) -> tuple[npt.NDArray[np.float64], ...]:
    gaps: list[float] = []
    tokens: list[int] = []
    left: list[float] = []
    last_use: dict[Block, int] = {}  # by block: which use
    uses_at: list[float] = []
    end_s = workload.requests[-1].at_s
    for request in workload.requests:
        at = request.at_s
        for position, block in enumerate(request.blocks or ()):
            use, before = len(gaps), last_use.get(block)
            gaps.append(np.inf if before is None else at - uses_at[before])
            if before is not None:
                left[before] = at - uses_at[before]
            tokens.append(max(0, min(workload.block_tokens, request.input_tokens - position * workload.block_tokens)))
            left.append(end_s - at)
            uses_at.append(at)
            last_use[block] = use
    return np.array(gaps), np.array(tokens, dtype=np.float64), np.array(left)
