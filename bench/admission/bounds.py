"""What no policy can beat: an infinite cache, Belady's rule with bypass, and a linear program of what hits save.

The three hold for one tier whose pages are all of one size. Belady's rule is optimal for hits, not for what they save:
the pages at the end of a long prompt save more attention than those at its start. The program bounds that from above,
Belady's rule from below, so the regret of a policy is an interval.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.admission.traces import Trace, TraceRequest

Prefill = Callable[[int, int], float]  # what it costs to compute tokens [start, end) of a prompt, in any unit
_NEVER = 1 << 62
_SETTLED = 1e-3  # of the ceiling: an interval as narrow as that is not worth minutes of a solver


def prefill_8b_flops(start: int, end: int) -> float:
    """FLOPs of a dense model of 8 billion parameters with 32 layers, 4,096 wide."""
    return 13.96e9 * (end - start) + 262144.0 * (end * end - start * start)


@dataclass(frozen=True, slots=True)
class Reached:
    """What one way of keeping pages has reached on a trace, in counts and as shares of all prompts."""

    hit_blocks: int
    usable_tokens: int
    written_blocks: int  # so many times a page was taken into the tier
    block_share: float
    token_share: float
    saved_share: float  # of what computing every prompt in full costs


@dataclass(frozen=True, slots=True)
class UpperBound:
    """The optimum of the linear program: no policy of the tier saves a greater share."""

    saved_share: float
    block_share: float  # with weight 1 for each page: what Belady's rule reaches
    intervals: int


def ceiling(trace: Trace, prefill: Prefill = prefill_8b_flops, *, warm_share: float = 0.0) -> Reached:
    """An infinite cache: every page is kept for ever. The first ``warm_share`` of requests do not count."""
    first_scored = int(len(trace.requests) * warm_share)
    seen = bytearray(trace.block_count)
    score = _Score(trace, prefill)
    for number, request in enumerate(trace.requests):
        if number >= first_scored:
            score.add(request, _leading(request.blocks, seen))
        for block in request.blocks:
            score.written += not seen[block]
            seen[block] = 1
    return score.reached()


def belady(
    trace: Trace,
    capacity_pages: int,
    prefill: Prefill = prefill_8b_flops,
    *,
    bypass: bool = True,
    warm_share: float = 0.0,
) -> Reached:
    """Keep what is used next soonest; of one request that is its start, so no page outlives those before it.

    With ``bypass`` a page that is used later than all that are there is not taken in, nor one that is never used again.
    The first ``warm_share`` of requests count for nothing but what they leave.
    """
    first_scored = int(len(trace.requests) * warm_share)
    nexts = _next_uses(trace)
    resident: dict[int, int] = {}  # page: its next use
    latest: list[tuple[int, int]] = []  # (-next use, page), with records that no longer hold
    score = _Score(trace, prefill)
    place = 0
    for number, request in enumerate(trace.requests):
        if number >= first_scored:
            score.add(request, _leading(request.blocks, resident))
        for block in request.blocks:
            after = int(nexts[place])
            place += 1
            if block not in resident:
                if bypass and after == _NEVER:
                    continue
                if len(resident) >= capacity_pages:
                    farthest = _farthest(latest, resident)
                    if bypass and -farthest[0] <= after:
                        continue
                    heapq.heappop(latest)
                    del resident[farthest[1]]
                score.written += 1
            resident[block] = after
            heapq.heappush(latest, (-after, block))
        if len(latest) > 4 * len(resident) + 65_536:
            latest = [(-after, block) for block, after in resident.items()]
            heapq.heapify(latest)
    return score.reached()


def upper_bound(
    trace: Trace, capacity_pages: int, prefill: Prefill = prefill_8b_flops, *, parents: bool = True
) -> UpperBound:
    """The best share of what prompts cost that a tier of so many pages saves; with scipy, of the extra ``bench``.

    One variable for each time that a page is used again: the share of it that is kept in between, worth what the page
    saves. What is kept after each request fits; with ``parents`` a page counts as far as the one before it does.
    """
    intervals = list(_intervals(trace, prefill))
    total = sum(prefill(0, request.tokens) for request in trace.requests)
    saved = _solve(trace, capacity_pages, intervals, np.array([each.worth for each in intervals]), parents=parents)
    hits = _solve(trace, capacity_pages, intervals, np.ones(len(intervals)), parents=False)
    return UpperBound(saved / total, hits / trace.references, len(intervals))


def compute_bounds(
    trace: Trace, capacity_pages: int, prefill: Prefill = prefill_8b_flops, *, solve: bool = True
) -> dict[str, Any]:
    """All bounds of one trace and capacity, as the report reads them. ``solve=False`` leaves the program out.

    It is left out, too, where Belady's rule reaches the ceiling, between which nothing is left to be found.
    """
    everything, best = ceiling(trace, prefill), belady(trace, capacity_pages, prefill)
    bounds: dict[str, Any] = {
        "trace": trace.name,
        "capacity_pages": capacity_pages,
        "capacity_tokens": capacity_pages * trace.block_tokens,
        "ceiling": asdict(everything),
        "belady": asdict(best),
    }
    if solve and best.saved_share < (1 - _SETTLED) * everything.saved_share:
        bounds["upper"] = asdict(upper_bound(trace, capacity_pages, prefill))
    return bounds


class _Score:
    """Counts what requests find."""

    def __init__(self, trace: Trace, prefill: Prefill) -> None:
        self._trace, self._prefill = trace, prefill
        self.written = 0
        self._hits, self._tokens, self._saved, self._total = 0, 0, 0.0, 0.0
        self._references, self._input_tokens = 0, 0

    def add(self, request: TraceRequest, pages: int) -> None:
        """``pages`` leading ones of the request were there."""
        tokens = min(pages * self._trace.block_tokens, request.tokens)
        self._hits += pages
        self._tokens += tokens
        self._saved += self._prefill(0, tokens)
        self._total += self._prefill(0, request.tokens)
        self._references += len(request.blocks)
        self._input_tokens += request.tokens

    def reached(self) -> Reached:
        references, tokens = max(1, self._references), max(1, self._input_tokens)
        return Reached(
            self._hits,
            self._tokens,
            self.written,
            self._hits / references,
            self._tokens / tokens,
            self._saved / max(1.0, self._total),
        )


def _leading(blocks: Sequence[int], there: bytearray | dict[int, int]) -> int:
    """How many of ``blocks``, from the first on, are there."""
    if isinstance(there, dict):
        return next((place for place, block in enumerate(blocks) if block not in there), len(blocks))
    return next((place for place, block in enumerate(blocks) if not there[block]), len(blocks))


def _next_uses(trace: Trace) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each reference the place of the next one to the same page."""
    nexts = np.full(trace.references, _NEVER, np.int64)
    latest: dict[int, int] = {}
    place = 0
    for request in trace.requests:
        for block in request.blocks:
            before = latest.get(block)
            if before is not None:
                nexts[before] = place
            latest[block] = place
            place += 1
    return nexts


def _farthest(latest: list[tuple[int, int]], resident: dict[int, int]) -> tuple[int, int]:
    while resident.get(latest[0][1]) != -latest[0][0]:
        heapq.heappop(latest)
    return latest[0]


@dataclass(frozen=True, slots=True)
class _Interval:
    start: int  # the request that uses the page
    end: int  # the next one that does
    parent: int  # the interval of the page before it that ends there; -1 for a first page
    worth: float


def _intervals(trace: Trace, prefill: Prefill) -> Iterator[_Interval]:
    latest: dict[int, int] = {}
    size, count = trace.block_tokens, 0
    for number, request in enumerate(trace.requests):
        parent = -1
        for depth, block in enumerate(request.blocks):
            before = latest.get(block)
            latest[block] = number
            if before is None:
                continue
            worth = prefill(depth * size, min((depth + 1) * size, request.tokens))
            yield _Interval(before, number, parent, worth)
            parent = count
            count += 1


def _solve(
    trace: Trace,
    capacity_pages: int,
    intervals: Sequence[_Interval],
    worths: np.ndarray[Any, Any],
    *,
    parents: bool,
) -> float:
    from scipy.optimize import linprog  # type: ignore[import-untyped]  # no stubs among the dependencies
    from scipy.sparse import coo_array  # type: ignore[import-untyped]

    count, steps = len(intervals), len(trace.requests)
    if not count:
        return 0.0
    # Variables: what is kept of each interval, then the pages held after each step:
    # held[t] - held[t - 1] - (what starts at t) + (what ends at t) = 0
    number = np.arange(count)
    starts = np.array([each.start for each in intervals])
    ends = np.array([each.end for each in intervals])
    step = np.arange(steps)
    rows = np.concatenate([starts, ends, step, step[1:]])
    columns = np.concatenate([number, number, count + step, count + step[:-1]])
    values = np.concatenate([-np.ones(count), np.ones(count), np.ones(steps), -np.ones(steps - 1)])
    balance = coo_array((values, (rows, columns)), shape=(steps, count + steps)).tocsr()
    bounds = np.zeros((count + steps, 2))
    bounds[:count, 1] = 1
    bounds[count:, 1] = capacity_pages
    above = None
    if parents:
        inner = np.array([place for place, each in enumerate(intervals) if each.parent >= 0], dtype=int)
        of = np.array([intervals[place].parent for place in inner], dtype=int)
        row = np.arange(len(inner))
        entries = np.concatenate([np.ones(len(inner)), -np.ones(len(inner))])
        place_of = (np.concatenate([row, row]), np.concatenate([inner, of]))
        above = coo_array((entries, place_of), shape=(len(inner), count + steps)).tocsr()
    scale = float(worths.max())
    goal = np.concatenate([-worths / scale, np.zeros(steps)])
    limits = None if above is None else np.zeros(above.shape[0])
    solved = linprog(goal, A_ub=above, b_ub=limits, A_eq=balance, b_eq=np.zeros(steps), bounds=bounds, method="highs")
    if solved.status != 0:
        raise RuntimeError(f"the linear program of {count} intervals has no solution: {solved.message}")
    return float(-solved.fun * scale)
