"""What people look at first: a table for each trace, and in words which policy to run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from bench.admission.figures import gains
from bench.admission.plots import policy_name, saved_share, written_bytes

Document = dict[str, Any]
_LEFT = ("policy",)


def table_of(document: Document, trace: Document) -> Table:
    """All runs of a trace."""
    setup = document["setup"]
    found = trace["ceiling_tokens"] / trace["input_tokens"]
    title = f"{trace['name']}: {trace['requests']:,} requests, at most {found:.1%} usable, on {setup['rig']}"
    if setup["loads"]:
        title += f", {trace['gpu_groups']} of it, {setup['overlap']} loads"
    table = Table(title=title)
    rows = [_cells(document, run) for run in document["runs"] if run["trace"] == trace["name"]]
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in names:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _cells(document: Document, run: Document) -> dict[str, str]:
    """By column; empty where there is no figure."""
    tier = run["tiers"][_studied(document)]
    pair = run["regret"]
    cost = _policy_cost(document, run)
    timed = {each["load"]: each for each in run["queueing"]}
    first = next(iter(timed.values()), None)
    saturated = timed.get("saturated")
    return {
        "capacity": "inf" if run["capacity_tokens"] is None else f"{run['capacity_tokens'] / 1e6:g} M",
        "policy": policy_name(run),
        "usable": f"{run['token_hit_share']:.2%}",
        "GPU time saved": f"{saved_share(run):.2%}",
        "regret": "" if pair is None else f"{pair[0]:.2f} to {pair[1]:.2f}",
        "TTFT mean": "" if first is None else _seconds(first["ttft_s"]["mean"]),
        "p99": "" if first is None else _seconds(first["ttft_s"]["p99"]),
        "saturated": "" if saturated is None else f"{saturated['tokens_per_s'] / 1e3:,.1f} k/s",
        "written": f"{written_bytes(run) / 1e12:.2f} TB",
        "DWPD": f"{tier['drive_writes_per_day']:.3g}" if tier["name"] == "L3" else "",
        "never read": f"{tier['pages_never_read'] / max(tier['pages_written'], 1):.0%}",
        "fairness": f"{run['fairness']:.2f}" if len(run["by_tenant"]) > 1 else "",
        "us/op": "" if cost is None else f"{cost['us_per_call']:.1f}",
        "refs/s": f"{run['references_per_s']:,.0f}",
    }


def _studied(document: Document) -> int:
    return next(place for place, tier in enumerate(document["setup"]["tiers"]) if tier["capacity_tokens"] is None)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _policy_cost(document: Document, run: Document) -> Document | None:
    wanted = (run["trace"], run["eviction"], run["write"])
    costs = document["policy_cost"]
    return next((cost for cost in costs if (cost["trace"], cost["eviction"], cost["write"]) == wanted), None)


def verdicts(document: Document, trace: Document) -> Iterator[str]:
    """At each capacity the policy that saves most GPU time, with what that is worth and what it writes."""
    runs = [run for run in document["runs"] if run["trace"] == trace["name"]]
    for capacity in dict.fromkeys(run["capacity_tokens"] for run in runs):
        best = max(
            (run for run in runs if run["capacity_tokens"] == capacity), key=lambda run: float(run["gpu_s_saved"])
        )
        if best["gpu_s_saved"] > 0:
            yield f"{_size(capacity)}: {policy_name(best)} saves most{', '.join(_worth(document, trace, best))}."
        else:
            yield f"{_size(capacity)}: no policy finds anything."


def _size(capacity: int | None) -> str:
    return "without a limit" if capacity is None else f"{capacity / 1e6:g} M tokens"


def _worth(document: Document, trace: Document, run: Document) -> Iterator[str]:
    yield f": {run['gpu_s_saved']:,.0f} of {run['gpu_s_total']:,.0f} GPU seconds"
    if run["regret"] is not None:
        low, high = sorted(run["regret"])
        yield f"{max(0.0, low):.0%} to {high:.0%} short of what is possible"
    computed = next((each for each in document["computed"] if each["trace"] == trace["name"]), None)
    both = None if computed is None else gains(run, computed, document["setup"]["loads"][0])
    if both is not None:
        yield f"TTFT {both[0] - 1:+.0%} and throughput {both[1] - 1:+.0%} against computing everything"
    yield f"{written_bytes(run) / 1e12:.1f} TB written in {trace['span_s'] / 3600:.1f} h"
