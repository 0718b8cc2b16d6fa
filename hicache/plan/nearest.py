"""An infeasible request: what stands in its way, and the settings nearest to it that can be served."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hicache.costs.machine import GIB
from hicache.errors import ConfigError
from hicache.plan.capacity import work_out
from hicache.plan.lengths import LengthMix
from hicache.plan.ratio import Solved, solve
from hicache.plan.settings import Settings
from hicache.plan.vllm_pool import sequences_max

CHANGES_MAX = 3  # settings that one proposal changes
PROPOSALS_MAX = 3  # of each kind
GPU_FACTORS = (2, 4, 8, 16)
GPUS_MAX = 1024
MEMORY_MAX_GIB = 1 << 20
LENGTH_STEPS = 20
RUNNING_AUTO_MIN = 2048  # what SGLang may keep to by itself: formulas.RUNNING_AUTO


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings that can be served: what is changed, as flags of `hicache plan`, and how many requests run then."""

    changes: tuple[str, ...]
    requests: int


@dataclass(frozen=True, slots=True)
class Change:
    """A change of settings, and the flag that makes it."""

    label: str
    fields: dict[str, Any]  # of Settings, whose fields have their own types


def wanted(settings: Settings) -> int:
    """Requests that one DP rank has to run beside each other for what was asked; at least 1."""
    return max(1, -(-(settings.concurrency or 1) // settings.dp))


def is_feasible(settings: Settings) -> bool:
    """Whether as many requests run as were asked for, of the lengths that were asked for."""
    return work_out(settings).concurrent_requests >= wanted(settings)


def nearest(settings: Settings) -> list[Proposal]:
    """Proposals: the same request under other settings, on more GPUs, then less of it; fewest changes first."""
    kept, grown = _settings_changes(settings), _hardware_changes(settings)
    return [
        *itertools.islice(_combined(settings, kept, ()), PROPOSALS_MAX),
        *itertools.islice(_combined(settings, kept, grown), PROPOSALS_MAX),
        *_smaller_requests(settings),
    ]


def _combined(settings: Settings, kept: Sequence[Change], grown: Sequence[Change]) -> Iterator[Proposal]:
    """Up to CHANGES_MAX changes together that suffice; with ``grown``, at least one of those among them."""
    found: list[frozenset[str]] = []  # the settings that were changed in what was proposed
    for count in range(1, CHANGES_MAX + 1):
        for chosen in itertools.combinations([*kept, *grown], count):
            fields: dict[str, Any] = {name: value for change in chosen for name, value in change.fields.items()}
            is_twice = sum(len(change.fields) for change in chosen) > len(fields)
            if is_twice or (grown and not any(change in grown for change in chosen)):
                continue
            if any(less <= fields.keys() for less in found):
                continue  # more than what was enough
            tried = _tried(settings, fields)
            if tried is not None:
                flags, requests = tried
                found.append(frozenset(fields))
                yield Proposal((*(change.label for change in chosen), *flags), requests)


def _tried(settings: Settings, fields: dict[str, Any]) -> tuple[tuple[str, ...], int] | None:
    """Further flags and the requests that run, where these fields make the request feasible.

    As they are, or with as many state slots as the requests take: if those do not leave enough for KV, no ratio does.
    """
    try:
        changed = replace(settings, **fields)
    except ConfigError:  # this model cannot be cut so
        return None
    flags: tuple[str, ...] = ()
    found = work_out(changed)
    can_have_slots = changed.model.recurrence and changed.engine == "sglang" and fields.get("state_slots") is None
    if found.concurrent_requests < wanted(changed) and can_have_slots:
        slots = wanted(changed) * found.pools.slots_per_request * changed.dp
        found = work_out(replace(changed, state_slots=slots))
        flags = (f"--state-slots {slots}",)
    if found.concurrent_requests < wanted(changed):
        return None
    return flags, found.concurrent_requests * changed.dp


def _best_shares(settings: Settings, solved: Solved) -> Change:
    """The solved ratio, or as many state slots where their number was given: it wins over any ratio."""
    if settings.state_slots is None:
        return Change(f"--ratio {solved.ratio:g}", {"ratio": solved.ratio})
    at_ratio = work_out(replace(settings, ratio=solved.ratio, state_slots=None))
    slots = at_ratio.pools.state_slots * settings.dp
    return Change(f"--state-slots {slots}", {"state_slots": slots})


def _settings_changes(settings: Settings) -> list[Change]:
    """What costs no GPU, cheapest first: pools, then precision."""
    changes: list[Change] = []
    longest = settings.lengths.longest_tokens
    if settings.context < longest <= settings.model.context_tokens:
        changes.append(Change(f"--context-tokens {longest}", {"context_tokens": longest}))
    if settings.model.recurrence and settings.engine == "sglang":
        solved = solve(settings)
        if solved is not None:
            changes.append(_best_shares(settings, solved))
        if settings.radix_cache and settings.strategy == "extra_buffer" and settings.overlap:
            changes.append(Change("--strategy extra_buffer_lazy", {"strategy": "extra_buffer_lazy"}))
        if settings.radix_cache and not settings.skip_decode_lock:
            changes.append(Change("--skip-decode-lock", {"skip_decode_lock": True}))
        if settings.draft_tokens > 1 and not settings.replay_ring:
            changes.append(Change("--replay-ring", {"replay_ring": True}))
    asked = settings.concurrency or 0
    if _running_limit(settings) < asked:
        changes.append(Change(f"--max-running-requests {asked}", {"max_running_requests": asked}))
    if settings.model.recurrence and settings.state_dtype == "float32":
        changes.append(Change("--state-dtype bfloat16", {"state_dtype": "bfloat16"}))
    if settings.kv_dtype in ("bfloat16", "float16", "float32"):
        changes.append(Change("--kv-dtype fp8_e4m3", {"kv_dtype": "fp8_e4m3"}))
    if settings.dcp < settings.tp and not settings.model.window_attention:
        changes.append(Change(f"--dcp {settings.tp}", {"dcp": settings.tp}))
    return changes


def _running_limit(settings: Settings) -> int:
    """Requests that the engine admits over all DP ranks: those it is told, or its own least default."""
    if settings.max_running_requests is not None:
        return settings.max_running_requests
    return (sequences_max(settings.machine) if settings.engine == "vllm" else RUNNING_AUTO_MIN) * settings.dp


def _hardware_changes(settings: Settings) -> list[Change]:
    """More GPUs. None where the memory was measured, which says nothing of other machines."""
    if settings.rest_bytes is not None:
        return []
    factors = [factor for factor in GPU_FACTORS if settings.gpus * factor <= GPUS_MAX]
    return [
        Change(f"--{axis} {getattr(settings, axis) * factor}", {axis: getattr(settings, axis) * factor})
        for axis in ("tp", "pp")
        for factor in factors
    ]


def _smaller_requests(settings: Settings) -> Iterator[Proposal]:
    """The concurrency that fits, the lengths that fit, and the memory that would do."""
    solved = solve(settings)
    shares = () if solved is None else (_best_shares(settings, solved).label,)
    most = max(work_out(settings).concurrent_requests, solved.requests if solved else 0)
    if most:
        yield Proposal((f"--concurrency {most * settings.dp}", *shares), most * settings.dp)
    factor = _longest_factor(settings)
    if factor:
        lengths = settings.lengths.scaled(factor)
        label = f"prompts of at most {max(i for i, _, _ in lengths.requests)} tokens"
        found = _tried(settings, {"lengths": lengths})
        if found is not None:
            yield Proposal((label, *found[0]), found[1])
    gib = _memory_that_suffices(settings)
    if gib is not None:
        yield Proposal((f"{gib:.2f} GiB left for KV and state on each GPU",), wanted(settings) * settings.dp)


def _longest_factor(settings: Settings) -> float:
    """The largest share of the lengths at which the request can be served; 0 where there is none."""
    low, high = 0.0, 1.0
    for _ in range(LENGTH_STEPS):
        middle = (low + high) / 2
        scaled: LengthMix = settings.lengths.scaled(middle)
        if _tried(settings, {"lengths": scaled}) is None:
            high = middle
        else:
            low = middle
    return low


def _memory_that_suffices(settings: Settings) -> float | None:
    """GiB beside weights, in steps of a hundredth; None where no memory is enough."""
    low, high = 0, MEMORY_MAX_GIB * 100
    if not _suffices(settings, high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _suffices(settings, middle):
            high = middle
        else:
            low = middle
    return high / 100


def _suffices(settings: Settings, hundredths: int) -> bool:
    return is_feasible(replace(settings, rest_bytes=hundredths * GIB // 100))
