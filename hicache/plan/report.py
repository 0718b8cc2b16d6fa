"""A plan as people read it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hicache.costs.machine import GIB
from hicache.plan.formula import Figure
from hicache.plan.plan import Plan

_MIB = 2**20
_SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "memory of a GPU",
        ("weights_bytes_per_gpu", "rest_bytes", "kv_pool_bytes", "state_pool_bytes", "draft_state_bytes"),
    ),
    (
        "bytes",
        (
            "kv_bytes_per_token_per_rank",
            "conv_bytes_per_slot_per_rank",
            "ssm_bytes_per_slot_per_rank",
            "state_bytes_per_slot_per_rank",
            "replay_ring_bytes",
            "kv_bytes_per_request",
            "state_bytes_per_request",
            "bytes_per_request",
        ),
    ),
    (
        "what fits",
        (
            "kv_tokens",
            "window_tokens",
            "block_tokens",
            "kv_blocks",
            "blocks_per_request",
            "logged_kv_cache_tokens",
            "state_slots",
            "slots_per_request",
            "states_stored_per_request",
            "requests_by_state",
            "requests_by_engine",
        ),
    ),
    (
        "machine",
        (
            "physical_cores",
            "chunk_tokens_per_rank",
            "expert_ranks_per_token",
            "expert_ranks_on_other_nodes",
            "l2_tokens",
            "l2_bytes_per_node",
            "l3_tokens",
            "write_bytes_per_s",
            "drive_writes_per_day",
        ),
    ),
)


def show(plan: Plan, console: Console, *, explain: bool) -> None:
    """Print the plan; with ``explain`` every figure with its formula, its numbers and its source."""
    settings = plan.settings
    title = (
        f"{settings.model.name} on {settings.gpus} x {settings.machine.name} ({settings.machine.gpu_gb:g} GB):"
        f" tp {settings.tp}, pp {settings.pp}, dp {settings.dp}, ep {settings.expert_ranks}, dcp {settings.dcp};"
        f" KV {settings.kv_dtype}, state {settings.state_dtype}; {settings.engine}"
    )
    verdict = f"{plan.verdict} ({settings.lengths})"
    console.print(Group(Text(title), Text(verdict, style="bold green" if plan.is_feasible else "bold red")))
    console.print(_explained(plan) if explain else _figures(plan))
    for part in (_limits(plan), _variations(plan), _proposals(plan), *_tiers(plan)):
        if part is not None:
            console.print(part)
    for sentence in plan.warnings:
        console.print(Text(f"! {sentence}", style="yellow"))


def figure_text(figure: Figure) -> str:
    """A value as people read it: bytes in MiB or GiB beside the exact count."""
    value = figure.value
    if figure.formula.unit.startswith("bytes") and abs(value) >= _MIB:
        size = f"{value / GIB:.2f} GiB" if abs(value) >= GIB else f"{value / _MIB:.2f} MiB"
        return f"{size} ({value:,.0f})"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
    return table


def _figures(plan: Plan) -> Table:
    table = _table("", "", "unit", "per")
    table.columns[2].justify = table.columns[3].justify = "left"
    for section, names in _SECTIONS:
        found = [plan.ledger[name] for name in names if name in plan.ledger]
        if found:
            table.add_row(Text(section, style="bold"))
        for figure in found:
            table.add_row(f"  {figure.name}", figure_text(figure), figure.formula.unit, figure.formula.scope)
    return table


def _explained(plan: Plan) -> Group:
    """Three lines for each figure: its value, its formula with the numbers in it, and where it comes from."""
    return Group(*(Text(line) for figure in plan.ledger.values() for line in explain_lines(figure)))


def explain_lines(figure: Figure) -> Iterator[str]:
    """``name = value``, ``= formula``, ``= numbers``, source."""
    formula = figure.formula
    yield f"{figure.name} = {figure.value!r} {formula.unit}, per {formula.scope}"
    if formula.names:
        yield f"    = {formula.text}"
        yield f"    = {figure.numbers}"
    yield f"    {formula.source}"


def _limits(plan: Plan) -> Table:
    table = _table("requests by", "per replica")
    for bound, limit in sorted(plan.capacity.limits.items(), key=lambda item: item[1]):
        mark = "  <- binds" if bound == plan.capacity.bound_by else ""
        table.add_row(f"  {bound}{mark}", f"{limit * plan.settings.dp:,}")
    return table


def _variations(plan: Plan) -> Table:
    table = _table("with", "requests", "bound by")
    if plan.solved is not None:
        best = f"  best ratio {plan.solved.ratio:g} (as good: {plan.solved.span})"
        table.add_row(best, f"{plan.solved.requests * plan.settings.dp:,}", "")
    for variation in plan.sensitivity:
        table.add_row(f"  {variation.change}", f"{variation.requests * plan.settings.dp:,}", variation.bound_by)
    return table


def _proposals(plan: Plan) -> Table | None:
    if plan.is_feasible:
        return None
    table = _table("nearest that can be served", "requests")
    for proposal in plan.proposals:
        table.add_row("  " + " ".join(proposal.changes), f"{proposal.requests:,}")
    if not plan.proposals:
        table.add_row("  nothing within reach of one to three changes", "")
    return table


def _tiers(plan: Plan) -> Iterator[Table | None]:
    tiers = plan.tiers
    if tiers.held:
        table = _table("tier", "tokens", "TTL s", "hits", "storage ratio")
        for held in tiers.held:
            point = held.point
            shown = (
                ("", "", "")
                if point is None
                else (f"{point.ttl_s:,.0f}", f"{point.hit_ratio:.1%}", f"{point.storage_ratio:.2f}")
            )
            table.add_row(f"  {held.tier}", f"{held.tokens:,}", *shown)
            for group, slots in (held.slots or {}).items():
                table.add_row(f"    slots of {group} on each rank", f"{slots:,}")
        yield table
    if tiers.points:
        table = _table("TTL s", "hits", "resident tokens", "storage ratio", "written tokens/s")
        for point in tiers.points:
            table.add_row(
                f"  {point.ttl_s:,.0f}",
                f"{point.hit_ratio:.1%}",
                f"{point.resident_tokens:,.0f}",
                f"{point.storage_ratio:.2f}",
                f"{point.written_tokens_per_s:,.0f}",
            )
        yield table
    if tiers.snapshots:
        table = _table("snapshots of the state at", "hits", "of attention", "snapshots", "bytes on all ranks")
        for snapshots in tiers.snapshots:
            taken, size = snapshots.point, f"{snapshots.state_bytes / GIB:,.1f} GiB"
            hits = (f"{taken.hit_ratio:.1%}", f"{taken.attention_ratio:.1%}")
            table.add_row(f"  {taken.policy}", *hits, f"{taken.snapshots:,}", size)
        yield table
    if tiers.breakeven:
        table = _table("loading beats computing from", "tokens")
        for breakeven in tiers.breakeven:
            table.add_row(f"  {breakeven.tier}", "never" if breakeven.tokens is None else f"{breakeven.tokens:,}")
        yield table
