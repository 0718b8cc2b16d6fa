"""How memory is shared between the state pool and the KV pool: SGLang's rule, which decides how many requests run."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.plan import formulas
from hicache.plan.formula import Ledger
from hicache.plan.settings import Settings
from hicache.plan.sizes import StateSizes

BASE_SLOTS = 3


@dataclass(frozen=True, slots=True)
class Pools:
    """What a rank's memory is made into. Too little of it: ``state_slots`` of 0 or less, ``kv_pool_bytes`` below 0."""

    slots_per_request: int
    state_slots: int
    state_pool_bytes: int
    draft_state_bytes: int
    kv_pool_bytes: int

    @property
    def requests_by_state(self) -> int:
        """Requests that the state slots let run."""
        return self.state_slots // self.slots_per_request


def slots_per_request(settings: Settings, ledger: Ledger) -> int:
    """State slots that one running request takes."""
    if not settings.radix_cache:
        base, tracking = 1, 0
    else:
        base = BASE_SLOTS - (1 if settings.skip_decode_lock else 0)
        tracking = {
            "extra_buffer": 2 if settings.overlap else 1,
            "extra_buffer_lazy": 1,
            # Its peak, at the hand-over from prefill to decode, is no lower with the decode lock skipped.
            "no_buffer": 1 if settings.skip_decode_lock else 0,
        }[settings.strategy]
    slots: int = ledger.work_out(formulas.SLOTS_PER_REQUEST, base_slots=base, tracking_slots=tracking)
    return slots


def share_memory(settings: Settings, sizes: StateSizes, rest_bytes: int, ledger: Ledger) -> Pools:
    """The pools of one rank out of ``rest_bytes``: by the number of slots wanted, of requests, or by the ratio."""
    slots_each = slots_per_request(settings, ledger)
    running = settings.running_max_per_dp
    if running is not None:
        ledger.work_out(
            formulas.RUNNING_PER_DP, max_running_requests=settings.max_running_requests or 0, dp=settings.dp
        )
    fixed = _fixed_ring_bytes(settings, sizes, ledger)
    slots = _slot_count(settings, sizes, rest_bytes, ledger, slots_each=slots_each, fixed_bytes=fixed)
    drafts = 0
    if _reserves_drafts(settings) and running is not None:
        drafts = ledger.work_out(
            formulas.INTERMEDIATES,
            slot_bytes=sizes.slot_bytes,
            running_max=running,
            state_slots=slots,
            slots_per_request=slots_each,
            draft_tokens=settings.draft_tokens,
        )
    state = ledger.work_out(
        formulas.STATE_POOL,
        state_slots=slots,
        slot_bytes=sizes.slot_bytes,
        ring_bytes=sizes.ring_bytes_per_slot,
        fixed_bytes=fixed,
    )
    kv = ledger.work_out(formulas.KV_POOL, rest_bytes=rest_bytes, draft_state_bytes=drafts, state_pool_bytes=state)
    ledger.work_out(formulas.STATE_CAP, state_slots=slots, slots_per_request=slots_each)
    return Pools(slots_each, slots, state, drafts, kv)


def _reserves_drafts(settings: Settings) -> bool:
    """Whether each request that runs keeps a state for each draft token, which a replay ring stands in for."""
    return settings.draft_tokens > 0 and not settings.replay_ring


def _fixed_ring_bytes(settings: Settings, sizes: StateSizes, ledger: Ledger) -> int:
    running = settings.running_max_per_dp
    if not settings.replay_ring or sizes.ring_is_per_slot or running is None:
        return 0
    fixed: int = ledger.work_out(formulas.RING_FIXED, ring_bytes=sizes.ring_bytes, running_max=running)
    return fixed


def _slot_count(
    settings: Settings, sizes: StateSizes, rest_bytes: int, ledger: Ledger, *, slots_each: int, fixed_bytes: int
) -> int:
    """As many as were asked for, as may run where there is no radix cache, or as the ratio gives."""
    running = settings.running_max_per_dp
    if settings.state_slots is not None:
        return int(ledger.work_out(formulas.SLOTS_GIVEN, slots_wanted=settings.state_slots, dp=settings.dp))
    if not settings.radix_cache and running is not None:
        return int(ledger.work_out(formulas.SLOTS_RUNNING, running_max=running))
    numbers = {
        "budget_bytes": ledger.work_out(formulas.STATE_BUDGET, rest_bytes=rest_bytes, ratio=settings.ratio),
        "slot_bytes": sizes.slot_bytes,
        "ring_bytes": sizes.ring_bytes_per_slot,
    }
    if not _reserves_drafts(settings):
        return int(ledger.work_out(formulas.SLOTS_BY_RATIO, fixed_bytes=fixed_bytes, **numbers))
    drafts = {"draft_tokens": settings.draft_tokens, "slots_per_request": slots_each}
    return int(ledger.work_out(formulas.SLOTS_SPECULATIVE, **numbers, **drafts))
