"""The share of memory for state that lets most requests of the planned lengths run, and what is lost beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hicache.plan.capacity import Bound, Capacity, work_out
from hicache.plan.settings import RATIO_MAX, Settings

RATIO_END = 1e9  # beyond it, there is as good as nothing for KV
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

    @property
    def span(self) -> str:
        """The ratios that are as good, as people read them."""
        if self.highest > RATIO_END:
            return f"{self.lowest:.3g} or more" if self.lowest > 1 / RATIO_END else "any"
        return f"{self.lowest:.3g} to {self.highest:.3g}"


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
    if not settings.model.recurrence or settings.engine != "sglang" or _has_slots_for_each(settings):
        return None
    free = replace(settings, state_slots=None)
    meeting = _lowest_share(free, lambda found: _by_state(found) >= _by_kv(found))
    best = max(_at(free, meeting).concurrent_requests, _at(free, meeting - 2.0**-STEPS).concurrent_requests)
    if best < 1:
        return None
    lowest = _lowest_share(free, lambda found: _by_state(found) >= best)
    highest = _lowest_share(free, lambda found: _by_kv(found) < best) - 2.0**-STEPS
    highest = max(lowest, highest)
    middle = _rounded_within((lowest + highest) / 2, _ratio(lowest), _ratio(highest))
    return Solved(middle, _ratio(lowest), _ratio(highest), best)


def _has_slots_for_each(settings: Settings) -> bool:
    """Without a radix cache, and with a limit, each request that may run has its slot, at any ratio."""
    return not settings.radix_cache and settings.running_max_per_dp is not None


def sensitivity(settings: Settings) -> list[Variation]:
    """Requests that run beside each other with other ratios, and with other lengths at this ratio."""
    variations = []
    is_by_ratio = settings.state_slots is None and not _has_slots_for_each(settings)
    if settings.model.recurrence and settings.engine == "sglang" and is_by_ratio:
        for factor in RATIO_FACTORS:
            ratio = min(settings.ratio * factor, RATIO_MAX)
            found = work_out(replace(settings, ratio=ratio))
            label = f"ratio {ratio:.3g}"
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


def _rounded_within(share: float, lowest: float, highest: float) -> float:
    """The ratio of a share, in as few digits as stay between two ratios."""
    middle = _ratio(share)
    for digits in range(2, 17):
        rounded = float(f"{middle:.{digits}g}")
        if lowest <= rounded <= highest:
            return rounded
    return middle
