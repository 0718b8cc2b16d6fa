"""The tiers below GPU memory: what they hold and for how long, what is written to them, and when loading pays."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hicache.costs.machine import Tier
from hicache.costs.model import ModelCosts, Prefill
from hicache.plan import formulas
from hicache.plan.capacity import Capacity
from hicache.plan.formula import Ledger
from hicache.plan.model import pipeline_stages
from hicache.plan.reuse import ReuseCurve, TtlPoint
from hicache.plan.settings import Settings
from hicache.plan.sizes import kv_sizes, state_sizes
from hicache.plan.snapshot_reuse import SnapshotPoint, snapshot_points
from hicache.plan.workload import Workload
from hicache.sizing import l2_slot_counts
from hicache.spec import CacheSpec

TTLS_S = (60.0, 300.0, 600.0, 1800.0, 3600.0)
L2_STATE_SHARE = 0.25  # the default of HiCache.open


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRequest:
    """What is asked about tiers. ``l2_bytes`` are of one rank; ``l3_bytes`` and ``drive_bytes`` of all drives.

    ``rate`` multiplies the trace's requests a second.
    """

    l2_bytes: int = 0
    l2_state_share: float = L2_STATE_SHARE
    l3_bytes: int = 0
    drive_bytes: int = 0
    write_amplification: float = 1.0
    curve: ReuseCurve | None = None
    workload: Workload | None = None  # the curve's, where it tells what was reused
    ttls_s: tuple[float, ...] = TTLS_S
    rate: float = 1.0
    active_parameters: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What a tier holds: tokens, and with a trace the TTL that this comes to, its hits and its storage ratio."""

    tier: str
    tokens: int
    point: TtlPoint | None
    slots: dict[str, int] | None = None  # of each group, of an L2 as HiCache makes it


@dataclass(frozen=True, slots=True)
class Breakeven:
    """Tokens from which on a load from a tier is faster than their prefill; None: never within the model's context."""

    tier: str
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Snapshotting:
    """A way to take snapshots, and the bytes of states that it takes on all ranks, where none is dropped."""

    point: SnapshotPoint
    state_bytes: int


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What the plan says about tiers."""

    held: list[Held]
    points: list[TtlPoint]
    breakeven: list[Breakeven]
    drive_writes_per_day: float | None = None
    snapshots: list[Snapshotting] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """As JSON, by tier and by TTL."""
        return {
            "held": {h.tier: {"tokens": h.tokens, "slots": h.slots, "ttl": _json(h.point)} for h in self.held},
            "ttl": [_json(point) for point in self.points],
            "breakeven_tokens": {b.tier: b.tokens for b in self.breakeven},
            "drive_writes_per_day": self.drive_writes_per_day,
            "snapshots": [{**asdict(s.point), "state_bytes": s.state_bytes} for s in self.snapshots],
        }


def plan_tiers(settings: Settings, capacity: Capacity, request: TierRequest, ledger: Ledger) -> TierPlan:
    """What L2 and L3 of the request hold, what a drive takes, and the break-even of each of the machine's tiers."""
    per_token = stored_bytes_per_token(settings)
    curve = request.curve
    held = []
    if request.l2_bytes:
        slots = _l2_slots(settings, request)
        tokens = _l2_tokens(settings, slots, ledger)
        gpus = min(settings.gpus, settings.machine.gpus_per_node)
        ledger.work_out(formulas.L2_NODE, l2_bytes=request.l2_bytes, gpus=gpus)
        held.append(Held("l2", tokens, _point(curve, tokens, request.rate), slots))
    if request.l3_bytes:
        tokens = ledger.work_out_as(
            "l3_tokens", formulas.TIER_TOKENS, tier_bytes=request.l3_bytes, bytes_per_token=per_token
        )
        held.append(Held("l3", tokens, _point(curve, tokens, request.rate)))
    points = [] if curve is None else [curve.at(ttl_s) for ttl_s in request.ttls_s if ttl_s <= curve.duration_s]
    return TierPlan(
        held,
        points,
        _breakevens(settings, capacity, request),
        _wear(request, held, per_token, ledger),
        _snapshots(settings, request),
    )


def _snapshots(settings: Settings, request: TierRequest) -> list[Snapshotting]:
    """What ways to take snapshots find and take, for a model with states and a trace that tells what was reused."""
    if request.workload is None or not settings.model.recurrence:
        return []
    state = state_sizes(_on_one_rank(settings), Ledger()).all_stages_bytes
    chunk = max(1, settings.chunk_tokens // settings.dp)
    points = snapshot_points(request.workload, chunk_tokens=chunk)
    return [Snapshotting(point, point.snapshots * state) for point in points]


def _on_one_rank(settings: Settings) -> Settings:
    return replace(settings, tp=1, pp=1, dp=1, dcp=1, ep=1)


def stored_bytes_per_token(settings: Settings) -> int:
    """Bytes of a token in a store that keeps each byte once, with its share of the snapshot at each chunk's end."""
    whole = _on_one_rank(settings)
    scratch = Ledger()
    kv, state = kv_sizes(whole, scratch).bytes_per_token, state_sizes(whole, scratch)
    return kv + -(-state.all_stages_bytes // max(1, settings.chunk_tokens // settings.dp))


def cache_spec(settings: Settings) -> CacheSpec:
    """The spec that HiCache would be opened with for one DP rank. Raises ConfigError where there is none."""
    stages = pipeline_stages(settings.model.layer_count, settings.pp)
    groups = settings.model.groups(
        kv_dtype=settings.kv_dtype,
        state_dtype=settings.state_dtype or settings.model.state_dtype,
        conv_dtype=settings.conv_dtype,
    )
    return CacheSpec(
        model=settings.model.name,
        revision="plan",
        groups=groups,
        page_tokens=settings.page_tokens,
        tp_size=settings.tp,
        pp_layers=None if settings.pp == 1 else tuple(len(stage) for stage in stages),
    )


def _breakevens(settings: Settings, capacity: Capacity, request: TierRequest) -> list[Breakeven]:
    """Of each tier of the machine; none where it is not known how much a token computes."""
    if _active_parameters(settings, request) <= 0:
        return []
    tiers = settings.machine.tiers.items()
    return [Breakeven(name, breakeven_tokens(settings, capacity, tier, request)) for name, tier in tiers]


def breakeven_tokens(settings: Settings, capacity: Capacity, tier: Tier, request: TierRequest) -> int | None:
    """The fewest reused tokens that are loaded faster than computed; None where there are none.

    What is saved less what it costs is convex in the tokens, and starts below 0: it changes sign once.
    """
    longest = settings.context
    if not _pays(settings, capacity, tier, request, longest):
        return None
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        if _pays(settings, capacity, tier, request, middle):
            high = middle
        else:
            low = middle
    return high


def _pays(settings: Settings, capacity: Capacity, tier: Tier, request: TierRequest, tokens: int) -> bool:
    ranks = settings.tp * settings.pp if tier.shared else 1
    prefill = Prefill.roofline(
        parameters=_active_parameters(settings, request),
        pair_flops=pair_flops(settings),
        flops_per_s=settings.machine.prefill_tflops * 1e12 * settings.tp * settings.pp,
    )
    costs = ModelCosts(
        prefill,
        {"tier": tier},
        token_bytes=capacity.kv.bytes_per_token * ranks,
        state_bytes=capacity.state.slot_bytes * ranks,
    )
    return costs.load_s("tier", tokens) < costs.prefill_s(0, tokens)


def pair_flops(settings: Settings) -> int:
    """Floating-point operations of attention for each of tokens squared: queries with keys, and weights with values."""
    return sum(
        len(group.layers) * group.query_heads * (group.head_dim + group.v_head_dim)
        for group in settings.model.full_attention
    )


def _active_parameters(settings: Settings, request: TierRequest) -> float:
    given = request.active_parameters
    return settings.model.weights.active_parameters if given is None else given


def _point(curve: ReuseCurve | None, tokens: int, rate: float) -> TtlPoint | None:
    return None if curve is None else curve.holding(tokens / rate)


def _l2_slots(settings: Settings, request: TierRequest) -> dict[str, int]:
    """Slots of each group in the L2 that HiCache makes of so many bytes. Raises ConfigError where it makes none."""
    spec = cache_spec(settings)
    share = request.l2_state_share if spec.has_state else 0.0
    counts = l2_slot_counts(spec, request.l2_bytes, share)
    return {group.name: count for group, count in zip(spec.groups, counts, strict=True)}


def _l2_tokens(settings: Settings, slots: dict[str, int], ledger: Ledger) -> int:
    states = [count for name, count in slots.items() if name.startswith("state")]
    pages = [count for name, count in slots.items() if not name.startswith("state")]
    snapshot_tokens = (
        max(settings.page_tokens, settings.chunk_tokens // settings.dp) if states else settings.page_tokens
    )
    tokens: int = ledger.work_out(
        formulas.L2_TOKENS,
        page_slots=min(pages or states),
        page_tokens=settings.page_tokens if pages else snapshot_tokens,
        state_slots=min(states or pages),
        snapshot_tokens=snapshot_tokens,
        dp=settings.dp,
    )
    return tokens


def _wear(request: TierRequest, held: list[Held], per_token: int, ledger: Ledger) -> float | None:
    """Drive writes a day at the hits of the tier that the drives are; the write rate goes into the ledger."""
    points = [tier.point for tier in held if tier.tier == "l3" and tier.point is not None]
    if not points:
        return None
    rate = ledger.work_out(
        formulas.WRITE_RATE,
        new_tokens_per_s=points[0].written_tokens_per_s * request.rate,
        bytes_per_token=per_token,
        write_amplification=request.write_amplification,
    )
    drive_bytes = request.drive_bytes or request.l3_bytes
    writes: float = ledger.work_out(formulas.DWPD, write_bytes_per_s=rate, drive_bytes=drive_bytes)
    return writes


def _json(point: TtlPoint | None) -> dict[str, float] | None:
    return None if point is None else {name: getattr(point, name) for name in point.__dataclass_fields__}
