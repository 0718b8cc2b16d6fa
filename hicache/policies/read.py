"""Read policy: how much of what a tier below has of a prompt is loaded, and how much is computed again.

A policy is asked of all that a tier may have of a prompt, before the tier is asked; of what it has, when that is known;
and again when it wants less than that and the next shorter prefix that can be used has another size. It has neither
clock nor memory: costs are those of a model (``hicache.costs``) in the replayer, and in a running engine what it has
measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """What ``tier`` has, or might have, of a prompt.

    tokens  [0, held) in faster tiers | [held, usable) can be loaded | [usable, prompt) to compute in any case
    """

    now_s: float
    tier: str  # L2 | L3
    held_tokens: int
    usable_tokens: int
    prompt_tokens: int
    bytes: int  # of [held, usable), states included
    page_tokens: int
    queue_s: float = 0.0  # until the tier has said what it has, and its bandwidth is free
    patience_s: float = math.inf  # the request computes what has not come by then


class ReadCosts(Protocol):
    """What a policy weighs; None for what is not known."""

    def prefill_s(self, start_tokens: int, end_tokens: int) -> float | None: ...

    def transfer_s(self, tier: str, size_bytes: int) -> float | None: ...


class ReadPolicy(Protocol):
    """Pure: the same facts and costs give the same answer."""

    def tokens(self, facts: LoadFacts) -> int:
        """Load ``[held, held + tokens)``: whole pages, or all; 0: compute everything."""
        ...

    def patience_s(self, facts: LoadFacts) -> float:
        """How long a request should wait at most for what ``facts`` offer."""
        ...


class Always:
    """Everything that is found is loaded, whatever it takes."""

    def tokens(self, facts: LoadFacts) -> int:
        return facts.usable_tokens - facts.held_tokens

    def patience_s(self, facts: LoadFacts) -> float:
        return math.inf


class Never:
    """What is not in a faster tier is computed: the control of a measurement."""

    def tokens(self, facts: LoadFacts) -> int:
        return 0

    def patience_s(self, facts: LoadFacts) -> float:
        return 0.0


class LatencyBreakEven:
    """What comes sooner than it would be computed: ``queue + load < prefill``, by at least ``margin_share`` of it.

    Savings grow faster with the length than loads do, so that of all lengths the longest pays best; a shorter one is
    loaded where the request would not wait for the whole. Unknown costs: load, and learn from it. Nobody waits longer
    than computing would have taken, so that a tier that has become slow costs at most that, once.
    """

    def __init__(self, costs: ReadCosts, *, margin_share: float = 0.1) -> None:
        if not 0 <= margin_share < 1:
            raise ConfigError("margin_share", margin_share, "a share of at least 0 and below 1")
        self._costs = costs
        self._margin_share = margin_share

    def tokens(self, facts: LoadFacts) -> int:
        all_tokens = facts.usable_tokens - facts.held_tokens
        load_s = self._costs.transfer_s(facts.tier, facts.bytes)
        if load_s is None:
            return all_tokens
        wanted = all_tokens
        if facts.queue_s + load_s > facts.patience_s:
            wanted = self._in_time(facts)
            load_s = self._costs.transfer_s(facts.tier, facts.bytes * wanted // max(1, all_tokens)) or 0.0
        prefill_s = self._costs.prefill_s(facts.held_tokens, facts.held_tokens + wanted)
        if prefill_s is None:
            return wanted
        return wanted if facts.queue_s + load_s < prefill_s * (1 - self._margin_share) else 0

    def patience_s(self, facts: LoadFacts) -> float:
        prefill_s = self._costs.prefill_s(facts.held_tokens, facts.usable_tokens)
        return math.inf if prefill_s is None else prefill_s

    def _in_time(self, facts: LoadFacts) -> int:
        """The most whole pages that arrive while the request waits."""
        pages = -(-(facts.usable_tokens - facts.held_tokens) // facts.page_tokens)
        low, high = 0, pages  # low arrives in time, or is nothing; high does not
        while high - low > 1:
            middle = (low + high) // 2
            load_s = self._costs.transfer_s(facts.tier, facts.bytes * middle // pages)
            if load_s is not None and facts.queue_s + load_s <= facts.patience_s:
                low = middle
            else:
                high = middle
        return low * facts.page_tokens


class GpuBreakEven:
    """What costs the GPU less to load than to compute, however long the request waits: for throughput, not for TTFT.

    ``interference_share``: the part of the GPU that is lost to others while a load is running.
    """

    def __init__(self, costs: ReadCosts, *, interference_share: float = 0.05) -> None:
        if not 0 <= interference_share <= 1:
            raise ConfigError("interference_share", interference_share, "a share of 0 to 1")
        self._costs = costs
        self._interference_share = interference_share

    def tokens(self, facts: LoadFacts) -> int:
        all_tokens = facts.usable_tokens - facts.held_tokens
        load_s = self._costs.transfer_s(facts.tier, facts.bytes)
        prefill_s = self._costs.prefill_s(facts.held_tokens, facts.usable_tokens)
        if load_s is None or prefill_s is None:
            return all_tokens
        return all_tokens if self._interference_share * load_s < prefill_s else 0

    def patience_s(self, facts: LoadFacts) -> float:
        return math.inf


ReadFactory: TypeAlias = Callable[[ReadCosts], ReadPolicy]

READ_POLICIES: dict[str, ReadFactory] = {
    "latency": LatencyBreakEven,
    "gpu": GpuBreakEven,
    "always": lambda costs: Always(),
    "never": lambda costs: Never(),
}
READ_POLICY_DEFAULT = "latency"


def read_policy_of(choice: str | ReadFactory, costs: ReadCosts) -> ReadPolicy:
    """By name, or made by a factory, such as ``partial(LatencyBreakEven, margin_share=0.2)``. Raises ConfigError."""
    if callable(choice):
        return choice(costs)
    if choice not in READ_POLICIES:
        raise ConfigError("read_policy", choice, f"{', '.join(READ_POLICIES)}, or what makes a policy of costs")
    return READ_POLICIES[choice](costs)
