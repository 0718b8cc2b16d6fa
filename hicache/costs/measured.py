"""Costs as they turn out: learnt from what was loaded and computed. Knows no clock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from hicache.costs.fit import REACH, OnlineFit, Row
from hicache.errors import UsageError


class MeasuredCosts:
    """What is not known yet is None: nothing like it has happened so far."""

    def __init__(self) -> None:
        self._prefill = OnlineFit()
        self.largest_computed_tokens = 0  # since whoever reads it has set it to 0
        self._loads: defaultdict[str, OnlineFit] = defaultdict(OnlineFit)

    def computed(self, start_tokens: int, end_tokens: int, seconds: float) -> None:
        """The tokens ``[start, end)`` of a prompt were computed in so many seconds."""
        self.computed_together([(start_tokens, end_tokens)], seconds)

    def computed_together(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Such parts of several prompts were computed in one step, in so many seconds."""
        tokens, pairs = map(sum, zip(*(_work(start, end) for start, end in parts), strict=True))
        self._prefill.add((tokens, pairs, 1.0), seconds)
        self.largest_computed_tokens = max(self.largest_computed_tokens, *(end - start for start, end in parts))

    def moved(self, tier: str, size_bytes: int, seconds: float) -> None:
        """So many bytes, with those that were waiting before them, took so long to come from ``tier``."""
        self._loads[tier].add((float(size_bytes), 1.0), seconds)

    def prefill_s(self, start_tokens: int, end_tokens: int) -> float | None:
        """What is saved by not computing ``[start, end)``: without the fixed cost of a step, which is there anyway.

        Far beyond all that was computed so far it is taken to be a quarter of what it seems: that may be fixed costs of
        short steps. Where it matters, it is then computed, once, and known.
        """
        work = _work(start_tokens, end_tokens)
        seconds = self._prefill.at((*work, 0.0))
        return seconds if seconds is None or self._prefill.reaches(work[0]) else seconds / REACH

    def transfer_s(self, tier: str, size_bytes: int) -> float | None:
        """How long so many bytes take, from the request for them on; None for far more than were ever asked for."""
        fit = self._loads[tier]
        return fit.at((float(size_bytes), 1.0)) if fit.reaches(size_bytes) else None


def _work(start: int, end: int) -> Row:
    """Tokens through the layers, and pairs of tokens in attention."""
    return float(end - start), float(end**2 - start**2)


def tell_prefill(costs: MeasuredCosts, parts: Sequence[tuple[int, int]], seconds: float) -> None:
    """``costs.computed_together`` of what an engine says. Raises UsageError for what cannot be."""
    for start, end in parts:
        if not 0 <= start < end:
            raise UsageError(f"tell_prefill: [{start}, {end}): expected 0 <= start < end, in tokens")
    if not parts:
        raise UsageError("tell_prefill: no tokens: expected one part at least")
    if not 0 < seconds < math.inf:
        raise UsageError(f"tell_prefill: seconds = {seconds}: expected a finite time above 0")
    costs.computed_together(parts, seconds)
