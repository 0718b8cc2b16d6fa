"""A histogram of durations: how many fell into which bucket."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Self

LATENCY_S = (
    1e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class Histogram:
    """Values by bucket: ``(bounds[i - 1], bounds[i]]``, and one for all that is larger. Not thread-safe."""

    def __init__(self, bounds: Sequence[float] = LATENCY_S) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, *, count: int = 1) -> None:
        """So many times this value."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """All values."""
        return sum(self._counts)

    def copy(self) -> Self:
        """As it is now."""
        other = type(self)(self.bounds)
        other.sum, other._counts = self.sum, self._counts.copy()
        return other

    def since(self, before: Self | None) -> Self:
        """What has come since ``before``, which is an earlier copy; None: everything."""
        other = self.copy()
        if before is not None:
            other.sum -= before.sum
            other._counts = [now - then for now, then in zip(self._counts, before._counts, strict=True)]
        return other

    def plus(self, other: Self) -> Self:
        """All values of both."""
        both = self.copy()
        both.sum += other.sum
        both._counts = [ours + theirs for ours, theirs in zip(self._counts, other._counts, strict=True)]
        return both

    def quantile(self, share: float) -> float | None:
        """The value that ``share`` of all do not exceed, within its bucket by its place there; None without values.

        What is beyond the last bound counts as that.
        """
        rank = share * self.count
        if not self.count:
            return None
        below = 0
        for index, count in enumerate(self._counts[:-1]):
            if count and below + count >= rank:
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * max(0.0, rank - below) / count
            below += count
        return self.bounds[-1]

    def cumulative(self) -> list[tuple[str, float]]:
        """Values up to each bound, as Prometheus has them: ``("0.001", 3.0), ..., ("+Inf", 5.0)``."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


assert all(low < high for low, high in zip(LATENCY_S, [*LATENCY_S[1:], math.inf], strict=True))
