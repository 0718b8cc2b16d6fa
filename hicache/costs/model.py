"""Costs by formula or table: what a prefill takes on a GPU, and what a load takes from a tier."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from hicache.costs.machine import Tier
from hicache.errors import ConfigError


class PrefillTime(Protocol):
    """What tokens take to compute, beside what a step takes in any case."""

    @property
    def fixed_s(self) -> float:
        """What a step takes however few tokens it computes."""
        ...

    def seconds(self, start_tokens: int, end_tokens: int) -> float:
        """The tokens ``[start, end)``, with the KV of all before them there; without ``fixed_s``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """``token_s`` for each token, and ``pair_s`` for each of tokens squared."""

    token_s: float
    pair_s: float
    fixed_s: float = 0.0

    @classmethod
    def roofline(cls, *, parameters: float, pair_flops: float, flops_per_s: float) -> Self:
        """A multiply and an add for each active weight, and half of all pairs of tokens in attention: ``pair_flops``
        for each of tokens squared. ``flops_per_s``: what prefill reaches, not what the sheet says."""
        return cls(token_s=2 * parameters / flops_per_s, pair_s=pair_flops / flops_per_s)

    def seconds(self, start_tokens: int, end_tokens: int) -> float:
        """See ``PrefillTime``."""
        return self.token_s * (end_tokens - start_tokens) + self.pair_s * (end_tokens**2 - start_tokens**2)


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """Measured times of whole prompts, ``(tokens, seconds)`` from short to long, and straight lines between them.

    Raises ConfigError for fewer than two points, and for longer prompts that take less.
    """

    points: Sequence[tuple[int, float]]
    fixed_s: float = field(init=False)

    def __post_init__(self) -> None:
        rising = all(a[0] < b[0] and a[1] < b[1] for a, b in zip(self.points, self.points[1:], strict=False))
        if len(self.points) < 2 or not rising or self.points[0][0] <= 0:
            raise ConfigError("prefill table", list(self.points), "two or more (tokens, seconds), both rising")
        (tokens, seconds), (more_tokens, more_seconds) = self.points[:2]
        slope = (more_seconds - seconds) / (more_tokens - tokens)
        object.__setattr__(self, "fixed_s", max(0.0, seconds - slope * tokens))

    def seconds(self, start_tokens: int, end_tokens: int) -> float:
        """See ``PrefillTime``. Beyond the last point, the last line goes on."""
        return self._whole(end_tokens) - self._whole(start_tokens)

    def _whole(self, tokens: int) -> float:
        if tokens <= 0:
            return 0.0
        points = [(0, self.fixed_s), *self.points]
        index = min(max(1, bisect_right(points, (tokens, 0.0))), len(points) - 1)
        (low, low_s), (high, high_s) = points[index - 1], points[index]
        return low_s + (high_s - low_s) * (tokens - low) / (high - low) - self.fixed_s


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """One model on one rig: implements ``Costs``, and what read policies weigh.

    ``token_bytes`` of KV each token has; ``state_bytes`` come with every load of a model that has a recurrent state.
    """

    prefill: PrefillTime
    tiers: Mapping[str, Tier]
    token_bytes: int
    state_bytes: int = 0

    def prefill_s(self, start_tokens: int, end_tokens: int) -> float:
        """See ``Costs``; without the fixed cost of a step, which is there as long as any token is computed."""
        return self.prefill.seconds(start_tokens, end_tokens)

    def load_s(self, tier: str, tokens: int) -> float:
        """See ``Costs``."""
        return self.transfer_s(tier, tokens * self.token_bytes + self.state_bytes)

    def transfer_s(self, tier: str, size_bytes: int) -> float:
        """See ``Costs``. Raises ConfigError for a tier that the rig has not."""
        if tier not in self.tiers:
            raise ConfigError("tier", tier, f"one of {', '.join(self.tiers) or 'none: the rig has no tiers'}")
        return self.tiers[tier].load_s(size_bytes)

    def break_even_tokens(self, tier: str, *, longest: int) -> int | None:
        """The fewest reused tokens that are loaded faster than computed, however long the prompt is that they begin;
        None: not up to ``longest``. What is saved less what it costs is convex: it changes sign once."""
        if not self._pays(tier, longest):
            return None
        low, high = 0, longest
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._pays(tier, middle) else (middle, high)
        return high

    def break_even_bytes_per_s(self, tokens: int) -> float:
        """The bandwidth from which on loading the first ``tokens`` is faster than computing them, without latency."""
        return (tokens * self.token_bytes + self.state_bytes) / self.prefill_s(0, tokens)

    def _pays(self, tier: str, tokens: int) -> bool:
        return self.load_s(tier, tokens) < self.prefill_s(0, tokens)
