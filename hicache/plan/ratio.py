"""The share of memory for state that lets most requests of the planned lengths run, and what is lost beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hicache.plan.capacity import Bound, Capacity, work_out
from hicache.plan.settings import Settings

STEPS = 40  # halvings of the share of state: finer than a single slot on any machine
RATIO_FACTORS = (0.5, 0.8, 1.0, 1.25, 2.0)
LENGTH_FACTORS = (0.5, 0.8, 1.25, 2.0)


@dataclass(frozen=True, slots=True)
class Solved:
    """A ratio of state to KV, and the span of ratios that let as many requests run."""

    ratio: float
    lowest: float
    highest: float
    requests: int


@dataclass(frozen=True, slots=True)
class Variation:
    """What one change makes of the requests that run beside each other on a DP rank."""

    change: str
    requests: int
    bound_by: Bound


def solve(settings: Settings) -> Solved | None:
    """The best ratio for the lengths; None where no ratio plays a part, or none lets a request run.

    More for state never lets fewer requests run by state, nor more by KV: the best is where the two meet.
    """
    if not settings.model.recurrence or settings.engine != "sglang":
        return None
    free = replace(settings, state_slots=None)
    meeting = _lowest_share(free, lambda found: _by_state(found) >= _by_kv(found))
    best = max(_at(free, meeting).concurrent_requests, _at(free, meeting - 2.0**-STEPS).concurrent_requests)
    if best < 1:
        return None
    lowest = _lowest_share(free, lambda found: _by_state(found) >= best)
    highest = _lowest_share(free, lambda found: _by_kv(found) < best) - 2.0**-STEPS
    lowest, highest = _ratio(lowest), _ratio(max(lowest, highest))
    middle = _rounded_within(lowest, highest)
    return Solved(middle, lowest, highest, best)


def sensitivity(settings: Settings) -> list[Variation]:
    """Requests that run beside each other with other ratios, and with other lengths at this ratio."""
    variations = []
    if settings.model.recurrence and settings.engine == "sglang" and settings.state_slots is None:
        for factor in RATIO_FACTORS:
            found = work_out(replace(settings, ratio=settings.ratio * factor))
            label = f"ratio {settings.ratio * factor:.3g}"
            variations.append(Variation(label, found.concurrent_requests, found.bound_by))
    for factor in LENGTH_FACTORS:
        found = work_out(replace(settings, lengths=settings.lengths.scaled(factor)))
        variations.append(Variation(f"prompts x {factor:g}", found.concurrent_requests, found.bound_by))
    return variations


def _lowest_share(settings: Settings, holds: Callable[[Capacity], bool]) -> float:
    """The lowest share of state at which something holds that holds for every greater share."""
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if holds(_at(settings, middle)):
            high = middle
        else:
            low = middle
    return high


def _at(settings: Settings, share: float) -> Capacity:
    return work_out(replace(settings, ratio=_ratio(share)))


def _ratio(share: float) -> float:
    share = min(max(share, 2.0**-STEPS), 1 - 2.0**-STEPS)
    return share / (1 - share)


def _by_state(found: Capacity) -> int:
    return found.limits.get("state_slots", 0)


def _by_kv(found: Capacity) -> int:
    return min((limit for bound, limit in found.limits.items() if bound != "state_slots"), default=0)


def _rounded_within(lowest: float, highest: float) -> float:
    """The middle, in as few digits as stay between the two."""
    middle = (lowest + highest) / 2
    for digits in range(2, 17):
        rounded = float(f"{middle:.{digits}g}")
        if lowest <= rounded <= highest:
            return rounded
    return middle
