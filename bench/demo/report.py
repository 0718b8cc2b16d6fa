"""What the demo says at its end: a JSON object with fixed fields, and a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.demo.run import Outcome
from bench.demo.worker import Served

SOURCES = ("l1", "l2", "l3", "computed")
SOURCE_NOTE = (
    "A request's time counts for the farthest tier that it used when at least half of its prompt was restored,"
    " else as computed."
)


def to_json(outcome: Outcome) -> dict[str, Any]:  # Any: a JSON object
    """The fields that scripts rely on. Times in milliseconds; None where no request was served from a source."""
    served = outcome.served
    return {
        "requests": len(served),
        "requests_compared": sum(one.is_compared for one in served),
        "outputs_identical": not any(one.differences for one in served),
        "prompt_tokens": sum(one.prompt_tokens for one in served),
        "tokens_by_source": {source: sum(one.by_source[source] for one in served) for source in SOURCES},
        "ttft_ms": {
            source: _percentiles([one.ttft_s for one in served if one.source == source])
            for source in ("computed", "l1", "l2", "l3")
        },
        "cross_tenant_hits": outcome.cross_tenant_hits,
        "cross_tenant_control_hits": outcome.cross_tenant_control_hits,
        "transient_bytes_persisted": transient_bytes(outcome),
        "survived": {
            "engine_restart": outcome.survived_engine_restart,
            "daemon_kill": outcome.survived_daemon_kill and outcome.stores_cut_off > 0 and outcome.came_back_by_itself,
        },
    }


def transient_bytes(outcome: Outcome) -> int:
    """Bytes of poisoned rings found in L2 or L3."""
    in_l2 = sum(inspection.poison_in_l2 for inspection in outcome.inspections)
    return (in_l2 + outcome.poison_in_l3) * 16


def checks(outcome: Outcome) -> list[tuple[str, bool, str]]:
    """What must hold for the demo to count as passed: name, whether it does, and what was seen."""
    fields = to_json(outcome)
    poison_in_l1 = sum(inspection.poison_in_l1 for inspection in outcome.inspections)
    different = [difference for one in outcome.served for difference in one.differences]
    return [
        (
            "every output and every restored byte equals a full recompute",
            fields["outputs_identical"] and fields["requests_compared"] == fields["requests"] > 0,
            different[0] if different else f"{fields['requests_compared']} of {fields['requests']} requests compared",
        ),
        ("each tier served", all(fields["tokens_by_source"].values()), f"{fields['tokens_by_source']}"),
        (
            "no tenant hit another's data",
            outcome.cross_tenant_hits == 0 and outcome.cross_tenant_control_hits > 0,
            f"{outcome.cross_tenant_hits} hits; its owner had {outcome.cross_tenant_control_hits}",
        ),
        (
            "no transient byte below L1",
            transient_bytes(outcome) == 0 and poison_in_l1 > 0 and outcome.samples_in_l3 > 0,
            f"poison found {poison_in_l1} times in L1, never below; "
            f"{outcome.samples_in_l3} of {outcome.samples_looked_for} known states found in L3",
        ),
        ("survived the SIGKILL of an engine", outcome.survived_engine_restart, "served from L3 afterwards"),
        (
            "survived the SIGKILL of hicached in mid-store",
            outcome.survived_daemon_kill and outcome.stores_cut_off > 0,
            f"it had {outcome.stores_cut_off} objects to store and had not answered; what was acknowledged came back",
        ),
        (
            "came back to the restarted hicached by itself",
            outcome.came_back_by_itself,
            "engines that lived through the outage stored and found again",
        ),
        ("hicached stopped cleanly", outcome.daemon_exit_code == 0, f"exit code {outcome.daemon_exit_code}"),
    ]


def print_report(outcome: Outcome, console: Console, *, wall_s: float) -> None:
    """The table for people."""
    fields = to_json(outcome)
    console.print(_sources_table(outcome.served, fields))
    console.print(SOURCE_NOTE, style="dim")
    console.print(_bytes_line(outcome))
    for name, holds, seen in checks(outcome):
        console.print(f"  {'[green]ok  [/]' if holds else '[red]FAIL[/]'} {name} [dim]({seen})[/]")
    console.print(f"{fields['requests']} requests, {fields['prompt_tokens']:,} prompt tokens, {wall_s:.0f} s")


def _sources_table(served: Sequence[Served], fields: dict[str, Any]) -> Table:
    table = Table(
        title="Tokens by source; TTFT in ms, and that of a recompute of the same requests", title_justify="left"
    )
    for name in ("source", "tokens", "share", "requests", "p50", "p95", "recomputed p50", "p95"):
        table.add_column(name, justify="left" if name == "source" else "right")
    total = fields["prompt_tokens"]
    for source in SOURCES:
        tokens = fields["tokens_by_source"][source]
        recomputed = _percentiles([one.recompute_ttft_s for one in served if one.source == source])
        measured = fields["ttft_ms"][source]
        table.add_row(
            source,
            f"{tokens:,}",
            f"{tokens / total:.1%}",
            str(sum(one.source == source for one in served)),
            *(_number(times[name]) for times in (measured, recomputed) for name in ("p50", "p95")),
        )
    return table


def _bytes_line(outcome: Outcome) -> str:
    moved: dict[str, int] = {}
    for inspection in outcome.inspections:
        for leg, count in inspection.bytes_moved.items():
            moved[leg] = moved.get(leg, 0) + count
    legs = {"backup": "L1→L2", "load": "L2→L1", "store": "L2→L3", "fetch": "L3→L2", "snapshot": "snapshots"}
    parts = [f"{name} {moved.get(leg, 0) / 2**20:.1f}" for leg, name in legs.items()]
    return "MiB moved since the engines' last start: " + ", ".join(parts)


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        return {"p50": None, "p95": None}
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50": round(statistics.median(ordered) * 1000, 3), "p95": round(p95 * 1000, 3)}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
