"""What fits: tokens, states and requests of one DP rank, and which of them binds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hicache.plan import formulas, vllm_pool
from hicache.plan.formula import Ledger
from hicache.plan.lengths import requests_that_fit
from hicache.plan.settings import Settings
from hicache.plan.sizes import NO_STATE, KvSizes, StateSizes, kv_sizes, rest_bytes, state_sizes
from hicache.plan.state_pool import Pools, share_memory

Bound: TypeAlias = Literal[
    "weights", "context_tokens", "state_slots", "kv_tokens", "window_tokens", "max_running_requests", "engine"
]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one DP rank can run. ``limits`` are the requests that each bound allows; the lowest one binds.

    ``max_running_requests`` is what the engine will admit, whatever the lengths; ``concurrent_requests`` is how many of
    the planned lengths fit beside each other with 95 % certainty.
    """

    rest_bytes: int
    kv: KvSizes
    state: StateSizes
    pools: Pools
    kv_tokens: int
    max_running_requests: int
    limits: dict[Bound, int]

    @property
    def concurrent_requests(self) -> int:
        """Requests of the planned lengths that run beside each other."""
        return max(0, min(self.limits.values()))

    @property
    def bound_by(self) -> Bound:
        """The bound that is reached first."""
        return min(self.limits, key=lambda bound: self.limits[bound])


def work_out(settings: Settings, ledger: Ledger | None = None) -> Capacity:
    """The capacity of one DP rank; each figure goes into ``ledger``. Never raises for too little memory."""
    ledger = Ledger() if ledger is None else ledger
    rest = rest_bytes(settings, ledger)
    kv = kv_sizes(settings, ledger)
    state = state_sizes(settings, ledger)
    if settings.engine == "vllm":
        return _within_context(settings, _of_vllm(settings, ledger, rest, kv, state))
    pools = share_memory(settings, state, rest, ledger) if state is not NO_STATE else Pools(1, 0, 0, 0, rest)
    tokens, window_tokens = _tokens(settings, kv, max(0, pools.kv_pool_bytes), ledger)
    limits: dict[Bound, int] = {"kv_tokens": _requests_by_tokens(settings, tokens)}
    if window_tokens is not None:
        limits["window_tokens"] = _requests_by_windows(settings, window_tokens)
    running = _admitted(settings, tokens, ledger)
    limits["engine" if settings.max_running_requests is None else "max_running_requests"] = running
    if state is not NO_STATE:
        limits["state_slots"] = max(0, pools.requests_by_state)
        running = min(running, limits["state_slots"])
    if rest <= 0:
        limits, running = {"weights": 0}, 0
    return _within_context(settings, Capacity(rest, kv, state, pools, tokens, running, limits))


def _within_context(settings: Settings, found: Capacity) -> Capacity:
    """No request runs where the longest is longer than the engine takes."""
    if found.rest_bytes <= 0 or settings.lengths.longest_tokens <= settings.context:
        return found
    return replace(found, limits={"context_tokens": 0, **found.limits})


def _of_vllm(settings: Settings, ledger: Ledger, rest: int, kv: KvSizes, state: StateSizes) -> Capacity:
    pool = vllm_pool.work_out(settings, kv, state, rest, ledger)
    bound: Bound = "kv_tokens" if settings.model.attention else "state_slots"
    limits: dict[Bound, int] = {"weights": 0} if rest <= 0 else {bound: pool.requests}
    admitted = settings.running_max_per_dp or vllm_pool.sequences_max(settings.machine)
    if rest > 0:
        limits["engine" if settings.running_max_per_dp is None else "max_running_requests"] = admitted
    pools = Pools(pool.states_per_request, pool.state_slots, 0, 0, max(0, rest))
    admitted = min(admitted, pool.sequences_max)
    return Capacity(rest, kv, state, pools, pool.attention_tokens, admitted, limits)


def _tokens(settings: Settings, kv: KvSizes, pool_bytes: int, ledger: Ledger) -> tuple[int, int | None]:
    """Tokens of the KV pool, and of the windows where there are any (all of attention, where it has no other)."""
    numbers = {"kv_pool_bytes": pool_bytes, "page_tokens": settings.page_tokens}
    if not kv.window_cell_bytes or not kv.full_cell_bytes:
        cell = kv.full_cell_bytes or kv.window_cell_bytes
        if not cell:
            return settings.context * 4096, None  # no attention at all: tokens cost nothing
        tokens = ledger.work_out(formulas.KV_TOKENS, cell_bytes=cell, dcp=settings.dcp, **numbers)
        return tokens, None if kv.full_cell_bytes else tokens
    cell = ledger.work_out(
        formulas.KV_CELL_SWA,
        full_cell_bytes=kv.full_cell_bytes,
        window_ratio=settings.window_ratio,
        window_cell_bytes=kv.window_cell_bytes,
    )
    tokens = ledger.work_out(formulas.KV_TOKENS_SWA, cell_bytes=cell, **numbers)
    windows = ledger.work_out(
        formulas.WINDOW_TOKENS,
        kv_tokens=tokens,
        window_ratio=settings.window_ratio,
        page_tokens=settings.page_tokens,
    )
    return tokens, windows


def _admitted(settings: Settings, tokens: int, ledger: Ledger) -> int:
    """What the engine admits, apart from state."""
    running = settings.running_max_per_dp
    if running is None:
        return int(ledger.work_out(formulas.RUNNING_AUTO, kv_tokens=tokens, context_tokens=settings.context))
    return int(ledger.work_out(formulas.RUNNING_GIVEN, running_max=running, kv_tokens=tokens))


def _requests_by_tokens(settings: Settings, tokens: int) -> int:
    if settings.lengths.longest_tokens > tokens or not settings.model.full_attention:
        return 0 if settings.model.full_attention else 1 << 20
    return requests_that_fit(tokens, *settings.lengths.held_tokens(page_tokens=settings.page_tokens * settings.dcp))


def _requests_by_windows(settings: Settings, tokens: int) -> int:
    return requests_that_fit(tokens, *held_in_windows(settings))


def held_in_windows(settings: Settings) -> tuple[float, float]:
    """Mean and deviation of a request's tokens in a window: those, and a page more while a chunk is computed."""
    [group] = settings.model.window_attention
    window = (group.window_tokens or 0) + settings.page_tokens
    return settings.lengths.held_tokens(page_tokens=settings.page_tokens, at_most=window)
