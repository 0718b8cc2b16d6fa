"""A plan: every figure of a model on a machine, whether the request is feasible, and what to change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hicache.plan import formulas, traps
from hicache.plan.capacity import Capacity, held_in_windows, work_out
from hicache.plan.formula import Ledger
from hicache.plan.nearest import Proposal, nearest, wanted
from hicache.plan.ratio import Solved, Variation, sensitivity, solve
from hicache.plan.settings import Settings
from hicache.plan.tiers import TierPlan, TierRequest, plan_tiers


@dataclass(frozen=True, slots=True)
class Plan:
    """What `hicache plan` answers. ``capacity`` is that of one DP rank."""

    settings: Settings
    ledger: Ledger
    capacity: Capacity
    solved: Solved | None
    sensitivity: list[Variation]
    proposals: list[Proposal]
    tiers: TierPlan
    l2_bytes: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def is_feasible(self) -> bool:
        """Whether what was asked for can be served."""
        return self.capacity.concurrent_requests >= wanted(self.settings)

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        found, settings = self.capacity, self.settings
        requests, bound = found.concurrent_requests * settings.dp, found.bound_by
        asked = f"{wanted(settings) * settings.dp} asked for" if settings.concurrency else "at least one is needed"
        if self.is_feasible:
            return f"feasible: {requests} requests of these lengths run beside each other, bound by {bound}"
        if found.bound_by == "context_tokens":
            longest = settings.lengths.longest_tokens
            return (
                f"infeasible: requests of up to {longest:,} tokens are longer than the context of {settings.context:,}"
            )
        if found.rest_bytes <= 0:
            missing = -found.rest_bytes / 2**30
            return f"infeasible: weights leave no memory, {missing:.1f} GiB are missing on each GPU"
        return f"infeasible: {requests} requests of these lengths run beside each other ({asked}), bound by {bound}"

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON: figures by name, and under ``figures`` their units, scopes and formulas."""
        figures = {name: figure.value for name, figure in self.ledger.items()}
        return {
            "model": self.settings.model.name,
            "machine": self.settings.machine.name,
            "engine": self.settings.engine,
            **figures,
            "max_running_requests": self.capacity.max_running_requests * self.settings.dp,
            "concurrent_requests": self.capacity.concurrent_requests * self.settings.dp,
            "bound_by": self.capacity.bound_by,
            "limits": {bound: limit * self.settings.dp for bound, limit in self.capacity.limits.items()},
            "feasible": self.is_feasible,
            "verdict": self.verdict,
            "solved_ratio": None if self.solved is None else _fields(self.solved),
            "sensitivity": [_fields(variation) for variation in self.sensitivity],
            "proposals": [_fields(proposal) for proposal in self.proposals],
            "tiers": self.tiers.as_json(),
            "warnings": self.warnings,
            "figures": {name: figure.as_json() for name, figure in self.ledger.items()},
        }


def make_plan(settings: Settings, tiers: TierRequest | None = None, *, solve_ratio: bool = False) -> Plan:
    """The plan for settings; with ``solve_ratio`` at the ratio that suits the lengths best."""
    solved = solve(settings)
    if solve_ratio and solved is not None:
        settings = replace(settings, ratio=solved.ratio, state_slots=None)
    ledger = Ledger()
    capacity = work_out(settings, ledger)
    _always_there(ledger)
    _of_a_request(settings, capacity, ledger)
    _of_the_cluster(settings, ledger)
    request = tiers or TierRequest()
    plan = Plan(
        settings=settings,
        ledger=ledger,
        capacity=capacity,
        solved=solved,
        sensitivity=sensitivity(settings),
        proposals=[],
        tiers=plan_tiers(settings, capacity, request, ledger),
        l2_bytes=request.l2_bytes,
    )
    proposals = [] if plan.is_feasible else nearest(settings)
    plan = replace(plan, proposals=proposals)
    return replace(plan, warnings=traps.warnings(plan))


_ZERO_WITHOUT_STATE = (
    formulas.STATE_PER_SLOT,
    formulas.CONV_PER_SLOT,
    formulas.SSM_PER_SLOT,
    formulas.SLOTS_GIVEN,
    formulas.SLOTS_PER_REQUEST,
)


def _always_there(ledger: Ledger) -> None:
    """Names that a reader of the JSON finds in every plan: 0 where the model has no such thing."""
    for formula in (*_ZERO_WITHOUT_STATE, formulas.RING):
        if formula.figure not in ledger:
            ledger.nothing(formula)


def _of_a_request(settings: Settings, capacity: Capacity, ledger: Ledger) -> None:
    """What a request of the mean length takes, on a rank and on all ranks that keep a part of it."""
    mean, _ = settings.lengths.held_tokens(page_tokens=settings.page_tokens)
    numbers = {"tokens": round(mean), "bytes_per_token": capacity.kv.bytes_per_token}
    formula = formulas.REQUEST_KV
    if settings.model.window_attention:
        formula = formulas.REQUEST_KV_WINDOWS
        in_windows, _ = held_in_windows(settings)
        numbers |= {"window_tokens": round(in_windows), "window_bytes_per_token": capacity.kv.window_cell_bytes}
    kv = ledger.work_out(formula, **numbers)
    state = ledger.work_out(
        formulas.REQUEST_STATE,
        slots_per_request=capacity.pools.slots_per_request if capacity.state.slot_bytes else 0,
        slot_bytes=capacity.state.slot_bytes,
        ring_bytes=capacity.state.ring_bytes_per_slot,
    )
    ledger.work_out(formulas.REQUEST_CLUSTER, kv_bytes=kv, state_bytes=state, ranks=settings.tp * settings.pp)
    if settings.model.recurrence:
        ledger.work_out(
            formulas.SNAPSHOTS,
            input_tokens=round(settings.lengths.mean_input_tokens),
            chunk_tokens=max(1, settings.chunk_tokens // settings.dp),
        )


def _of_the_cluster(settings: Settings, ledger: Ledger) -> None:
    ledger.work_out(formulas.CHUNK_PER_DP, chunk_tokens=settings.chunk_tokens, dp=settings.dp)
    gpus = min(settings.gpus, settings.machine.gpus_per_node)
    here = min(settings.dp, max(1, gpus // (settings.tp * settings.pp)))  # DP ranks of a node
    ledger.work_out(formulas.CORES, api_servers=here, engine_cores=here, dp=settings.dp, gpus=gpus)
    if settings.model.experts is not None and settings.expert_ranks > 1:
        ep, top_k = settings.expert_ranks, settings.model.experts.top_k
        ranks = ledger.work_out(formulas.EXPERT_RANKS, ep=ep, top_k=top_k)
        per_node = min(ep, settings.machine.gpus_per_node)
        ledger.work_out(formulas.EXPERT_RANKS_FAR, expert_ranks=ranks, ep=ep, gpus_per_node=per_node)


def _fields(value: Any) -> dict[str, Any]:
    """A dataclass as JSON. Any: of whichever class."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
