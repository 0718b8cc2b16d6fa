"""Prefetch modes: how long a request waits for what L3 is bringing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hicache.errors import ConfigError

PrefetchMode: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """When a request stops waiting. Times in seconds, counted from the moment the prefetch was issued.

    - ``best_effort`` waits ``grace_s``, 0 unless set: what has arrived when the engine schedules counts.
    - ``wait_complete`` waits until every page has arrived or is a final miss, at most ``hard_cap_s``.
    - ``timeout`` waits ``base_s + per_ki_token_s x tokens / 1024``, at most ``hard_cap_s``.

    Not issued when fewer than ``threshold_tokens`` could be gained.
    """

    mode: PrefetchMode = "timeout"
    base_s: float = 1.0
    per_ki_token_s: float = 0.25
    hard_cap_s: float = 30.0
    grace_s: float = 0.0
    threshold_tokens: int = 256

    def __post_init__(self) -> None:
        check_mode(self.mode)
        for name in ("base_s", "per_ki_token_s", "hard_cap_s", "grace_s", "threshold_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"prefetch.{name}", getattr(self, name), "a finite number of at least 0")

    def patience_s(self, mode: PrefetchMode, *, tokens: int) -> float:
        """How long a request that may gain ``tokens`` waits at the most."""
        if mode == "best_effort":
            return min(self.grace_s, self.hard_cap_s)
        if mode == "wait_complete":
            return self.hard_cap_s
        return min(self.base_s + self.per_ki_token_s * tokens / 1024, self.hard_cap_s)

    def horizon_s(self, mode: PrefetchMode, *, tokens: int) -> float:
        """How long what L3 brings is of use to it: to one that does not wait, until the engine gets to it."""
        return math.inf if mode == "best_effort" else self.patience_s(mode, tokens=tokens)


def check_mode(mode: str) -> None:
    """Raises ConfigError unless ``mode`` is one of the three."""
    if mode not in get_args(PrefetchMode):
        raise ConfigError("prefetch.mode", mode, f"one of {', '.join(get_args(PrefetchMode))}")
