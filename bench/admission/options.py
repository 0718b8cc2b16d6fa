"""What the command line names: policies, capacities, tiers, loads. Every name is checked before a trace is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.admission.replay import TierSpec
from hicache.costs.model import ModelCosts
from hicache.errors import ConfigError
from hicache.policies.eviction_choice import eviction_policy_of
from hicache.policies.read import READ_POLICIES
from hicache.policies.write import write_policy_of

TIER_NAMES = ("L1", "L2", "L3")
SPEEDUP_MAX = 1e6
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Policies by name: what goes first and what comes into the tier that is studied, and what is loaded from all."""

    eviction: str
    write: str = "write_through"
    read: str = "always"


@dataclass(frozen=True, slots=True)
class TierChoice:
    """A tier; without ``capacity_tokens`` it is the one that is studied: its capacity and policies vary."""

    name: str
    capacity_tokens: int | None = None
    eviction: str = "lru"
    write: str = "write_through"


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come in a timed run: at ``speedup`` times the trace's speed, or from so many ``clients``, each with
    one request at a time, who think as long as the trace says or, ``saturated``, not at all."""

    speedup: float = 1.0
    clients: int | None = None
    saturated: bool = False

    @property
    def name(self) -> str:
        """As tables and plots say it."""
        if self.saturated:
            return "saturated"
        return f"x{self.speedup:g}" if self.clients is None else f"{self.clients} clients"


def parse_policies(text: str, tiers: Sequence[TierChoice] = (TierChoice("L3"),)) -> Iterator[PolicyChoice]:
    """Of ``EVICTION[+WRITE[+READ]]``, with commas between. Raises ConfigError for a name that there is not."""
    for part in text.split(","):
        names = part.strip().split("+")
        if len(names) > 3:
            raise ConfigError("policies", part, "EVICTION, EVICTION+WRITE or EVICTION+WRITE+READ")
        choice = PolicyChoice(*names)
        _check_tier(choice.eviction, choice.write, part, is_first=tiers[0].capacity_tokens is None)
        if choice.read not in READ_POLICIES:
            raise ConfigError("policies", part, f"as the third, what is read: one of {', '.join(READ_POLICIES)}")
        yield choice


def _check_tier(eviction: str, write: str, part: str, *, is_first: bool) -> None:
    eviction_policy_of(eviction)
    if write_policy_of(write).ahead_share and is_first:
        raise ConfigError("policies", part, "a write policy that admits what comes: there is no tier above")


def parse_tokens(text: str, *, setting: str = "capacities") -> int | None:
    """``3M`` is 3,000,000; None for ``inf``. Raises ConfigError."""
    text = text.strip()
    if text == "inf":
        return None
    try:
        tokens = float(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else float(text)
    except ValueError:
        tokens = 0.0
    if not 1 <= tokens < 1e15:
        raise ConfigError(setting, text, "tokens: a number of at least 1, with k, M or G behind it, or inf")
    return int(tokens)


def parse_tiers(text: str, costs: ModelCosts) -> tuple[TierChoice, ...]:
    """``NAME:TOKENS[:EVICTION[:WRITE]]`` from the fastest tier down, with commas between; one of them is a name alone,
    and is studied. Raises ConfigError."""
    tiers: list[TierChoice] = []
    for part in text.split(","):
        name, *rest = part.strip().split(":")
        place = TIER_NAMES.index(name) if name in TIER_NAMES else -1
        if place < 0 or len(rest) > 3 or any(TIER_NAMES.index(tier.name) >= place for tier in tiers):
            raise ConfigError("tiers", text, f"{', '.join(TIER_NAMES)} or some of them in this order, as NAME:TOKENS")
        if name != "L1" and name not in costs.tiers:
            raise ConfigError("tiers", part, f"L1 or one of {', '.join(costs.tiers)}, which the hardware has")
        if not rest:
            tiers.append(TierChoice(name))
            continue
        capacity = parse_tokens(rest[0], setting="tiers")
        if capacity is None:
            raise ConfigError("tiers", part, "a number of tokens: what has no end needs nothing below it")
        tiers.append(TierChoice(name, capacity, *rest[1:]))
        _check_tier(tiers[-1].eviction, tiers[-1].write, part, is_first=len(tiers) == 1)
    if [tier.capacity_tokens for tier in tiers].count(None) != 1:
        raise ConfigError("tiers", text, "one tier without a capacity, which is studied, such as L1:200k,L2:2M,L3")
    return tuple(tiers)


def parse_loads(speedups: str, clients: str | None) -> tuple[Load, ...]:
    """Open loop at each of ``speedups``, closed loop with each number of ``clients``. Raises ConfigError."""
    loads: list[Load] = []
    for text in speedups.split(","):
        speedup = _number("speedup", text)
        if not 0 < speedup <= SPEEDUP_MAX:
            raise ConfigError("speedup", text, f"a number above 0 and at most {SPEEDUP_MAX:g}")
        loads.append(Load(speedup))
    for text in [] if clients is None else clients.split(","):
        count = _number("clients", text)
        if count != int(count) or not 1 <= count <= 1e6:
            raise ConfigError("clients", text, "a whole number of 1 to 1000000")
        loads.append(Load(clients=int(count)))
    return tuple(loads)


def _number(setting: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(setting, text, "numbers with commas between")
    return number


def tier_specs(
    tiers: Sequence[TierChoice], policy: PolicyChoice, capacity_tokens: int | None, block_tokens: int
) -> list[TierSpec]:
    """Of one replay. Raises ConfigError for a capacity that has no room for a block."""
    specs: list[TierSpec] = []
    for tier in tiers:
        if tier.capacity_tokens is None:
            tokens, eviction, write = capacity_tokens, policy.eviction, policy.write
        else:
            tokens, eviction, write = tier.capacity_tokens, tier.eviction, tier.write
        specs.append(TierSpec(tier.name, pages_of(tokens, block_tokens), eviction, write))
    return specs


def pages_of(tokens: int | None, block_tokens: int) -> int | None:
    """Whole blocks. Raises ConfigError where there is room for none."""
    if tokens is not None and tokens < block_tokens:
        raise ConfigError("capacities", tokens, f"at least {block_tokens}, the tokens of one block of the trace")
    return None if tokens is None else tokens // block_tokens
