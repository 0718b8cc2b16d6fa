"""Whether a policy is ahead of another one, or had luck: how the difference varies with the stretches of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bench.admission.replay import Dense8bCosts, Replayer, TierSpec
from bench.admission.traces import Trace

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

_STRETCH_REQUESTS = 40  # what follows each other is of the same sessions: it is drawn together
_DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Duel:
    """One policy against another on the requests that are scored. Shares are of the GPU time of their prompts."""

    ahead_share: float  # saved by the one, less what the other one saves
    deviation: float  # of that, over traces that are made of stretches of this one, drawn with replacement
    behind_chance: float  # share of those traces on which the one is behind
    requests: int
    differing: int


def duel(trace: Trace, pages: int, one: str, other: str, *, warm_share: float = 0.0, seed: int = 0) -> Duel:
    """Both policies, by their names, with the same room. Deterministic under ``seed``."""
    start = int(len(trace.requests) * warm_share)
    costs = Dense8bCosts()
    total_s = np.array([costs.prefill_s(0, request.tokens) for request in trace.requests[start:]])
    ahead_s = (_saved_s(trace, pages, one) - _saved_s(trace, pages, other))[start:]
    stretches = max(1, len(ahead_s) // _STRETCH_REQUESTS)
    ahead, total = (_sums(values, stretches) for values in (ahead_s, total_s))
    drawn = np.random.default_rng(seed).integers(0, stretches, (_DRAWS, stretches))
    shares = ahead[drawn].sum(1) / total[drawn].sum(1)
    return Duel(
        float(ahead_s.sum() / total_s.sum()),
        float(shares.std()),
        float((shares < 0).mean()),
        len(ahead_s),
        int(np.count_nonzero(ahead_s)),
    )


def _saved_s(trace: Trace, pages: int, policy: str) -> Array:
    """[requests]: GPU time that each one saves."""
    eviction, _, write = policy.partition("+")
    replayer = Replayer(trace.block_tokens, [TierSpec("cache", pages, eviction, write or "write_through")])
    costs = Dense8bCosts()
    return np.array([costs.prefill_s(0, replayer.serve(request).usable_tokens) for request in trace.requests])


def _sums(values: Array, parts: int) -> Array:
    return np.array([part.sum() for part in np.array_split(values, parts)])
