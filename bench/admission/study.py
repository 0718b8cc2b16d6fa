"""`python -m bench.admission.study`: how far policies are from what is possible, and why. See docs/policies.md."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from bench.admission.bounds import belady, ceiling, upper_bound
from bench.admission.generator import agent_sessions
from bench.admission.replay import TierSpec, replay
from bench.admission.study_limit import limits
from bench.admission.study_residency import residency
from bench.admission.traces import Trace, load_trace

_FILES = Path(__file__).parent.parent / "trace_files"
_PAGE_TOKENS = 512
CAPACITIES = {"0.5 M": 1000, "3 M": 5859, "10 M": 20_000, "25 M": 50_000}  # pages, as in golden/policies.json
OURS = "continuation+continuation"
POLICIES = (
    "lru", "lru+write_through_selective", "lru+tiny_lfu", "fifo", "lfu", "lfu_da", "slru", "s3_fifo", "sieve", "arc",
    "gdsf", "marconi", "ttl", "tail_trim", "marconi+write_through_selective", "marconi+tiny_lfu", OURS,
)  # fmt: skip
_RUN_PAGES = 2_000_000  # references; above, policies that look at each page take minutes for each capacity
POLICIES_LONG = (
    "lru", "lru+write_through_selective", "lru+tiny_lfu", "fifo", "lfu", "ttl", "arc", "gdsf", "marconi", OURS,
)  # fmt: skip


def conversation() -> Trace:
    """Mooncake's conversations."""
    return load_trace(_FILES / "mooncake_conversation_trace.jsonl.zst")


def synthetic() -> Trace:
    """Mooncake's synthetic requests."""
    return load_trace(_FILES / "mooncake_synthetic_trace.jsonl.zst")


def claude_code() -> Trace:
    """All 519 sessions of Claude Code, in pages of 512 tokens."""
    return in_pages(load_trace(_FILES / "claude_code_sessions_519.jsonl.zst"), _PAGE_TOKENS)


def agents(seed: int) -> Callable[[], Trace]:
    """Generated sessions of agents."""
    return lambda: agent_sessions(120, seed=seed)


TRACES: dict[str, Callable[[], Trace]] = {
    "conversation": conversation,
    "synthetic": synthetic,
    "claude_code": claude_code,
    "agents_1": agents(1),
    "agents_2": agents(2),
}


def in_pages(trace: Trace, page_tokens: int) -> Trace:
    """The same requests, of a cache with longer pages; ids name prefixes, so the last id of a page names it."""
    factor, rest = divmod(page_tokens, trace.block_tokens)
    assert factor > 0, (page_tokens, trace.block_tokens)
    assert not rest, (page_tokens, trace.block_tokens)
    requests = []
    for request in trace.requests:
        blocks = list(request.blocks[factor - 1 :: factor])
        if len(request.blocks) % factor:
            blocks.append(request.blocks[-1])
        requests.append(replace(request, blocks=blocks))
    return Trace(trace.name, page_tokens, requests, trace.block_count)


@dataclass(frozen=True, slots=True)
class Task:
    """A policy at a capacity on a trace, or with ``bound`` what none can beat."""

    trace: str
    capacity: str
    policy: str
    warm_share: float = 0.0

    def run(self, trace: Trace) -> dict[str, Any]:
        """A row."""
        row: dict[str, Any] = {"trace": self.trace, "capacity": self.capacity, "policy": self.policy}
        pages = CAPACITIES[self.capacity]
        if self.policy == "belady":
            best = belady(trace, pages, warm_share=self.warm_share)
            return row | {"saved_share": best.saved_share, "written_pages": best.written_blocks}
        if self.policy == "program":
            if pages >= 20_000:
                return row | {"saved_share": ceiling(trace).saved_share}
            return row | {"saved_share": upper_bound(trace, pages).saved_share}
        eviction, _, write = self.policy.partition("+")
        result = replay(
            trace, [TierSpec("cache", pages, eviction, write or "write_through")], warm_share=self.warm_share
        )
        return row | {
            "saved_share": result.gpu_s_saved / result.gpu_s_total,
            "token_share": result.token_hit_share,
            "written_pages": result.tiers[0].pages_written,
            "us_per_reference": result.wall_s * 1e6 / max(1, trace.references),
            "us_per_request": result.wall_s * 1e6 / max(1, len(trace.requests)),
        }


_traces: dict[str, Trace] = {}  # of a worker


def _run(task: Task) -> dict[str, Any]:
    gc.disable()
    if task.trace not in _traces:
        _traces[task.trace] = TRACES[task.trace]()
    row = task.run(_traces[task.trace])
    click.echo(f"{task.trace} {task.capacity} {task.policy}: {row['saved_share']:.4f}", err=True)
    return row


def run_all(tasks: Sequence[Task], processes: int) -> list[dict[str, Any]]:
    """The row of each task, in order."""
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        return list(pool.map(_run, tasks))


def tasks_of(traces: Sequence[str], capacities: Sequence[str], *, bounds: bool, warm_share: float = 0.0) -> list[Task]:
    """All policies that a trace's length allows, and with ``bounds`` Belady's rule and the program for Mooncake's."""
    tasks = []
    for trace in traces:
        policies: Sequence[str] = POLICIES_LONG if trace == "claude_code" else POLICIES
        extra = ("belady", *(("program",) if bounds and trace in ("conversation", "synthetic") else ()))
        tasks += [Task(trace, capacity, name, warm_share) for capacity in capacities for name in (*policies, *extra)]
    return tasks


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each trace and capacity: ours, the best other one, the bounds, and what is written."""
    lines = [
        "| trace, capacity | continuation | best other | LRU | second touch | Belady | bound | of Belady | regret "
        "| written |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for trace, capacity in dict.fromkeys((row["trace"], row["capacity"]) for row in rows):
        here = {row["policy"]: row for row in rows if (row["trace"], row["capacity"]) == (trace, capacity)}
        saved = {name: row["saved_share"] for name, row in here.items()}
        ours, best, lru = saved[OURS], saved["belady"], here["lru"]
        others = {name: share for name, share in saved.items() if name not in (OURS, "belady", "program")}
        other = max(others, key=lambda name: others[name])
        bound = max(best, saved.get("program", best))
        written = here[OURS]["written_pages"] / max(1, lru["written_pages"])
        has_program = "program" in saved
        regret = f"{1 - ours / best:.0%} to {1 - ours / bound:.0%}" if has_program else f"{1 - ours / best:.0%}"
        lines.append(
            f"| {trace}, {capacity} | {ours:.4f} | {others[other]:.4f} ({other}) | {saved['lru']:.4f} | "
            f"{saved['lru+write_through_selective']:.4f} | {best:.4f} | {f'{bound:.4f}' if has_program else ''} | "
            f"{ours / best:.2f} | {regret} | {written:.0%} |"
        )
    return "\n".join(lines)


def _write(document: Any, path: str | None) -> None:
    text = json.dumps(document, indent=1)
    if path is None or path == "-":
        click.echo(text)
    else:
        Path(path).write_text(text + "\n")


_json = click.option("--json", "json_path", metavar="FILE", help="Where the rows go; - for stdout.")
_names = click.option("--traces", default="conversation,synthetic,claude_code", show_default=True, metavar="LIST")
_processes = click.option("--processes", type=click.IntRange(1, 256), default=os.cpu_count() or 1, metavar="N")
_capacities = click.option("--capacities", default=",".join(CAPACITIES), show_default=True, metavar="LIST")


def _chosen(text: str, known: Sequence[str] | dict[str, Any], name: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",")]
    for part in chosen:
        if part not in known:
            raise click.BadParameter(f"{name}={part!r}: one of {', '.join(known)}")
    return chosen


@click.group()
def main() -> None:
    """How far policies are from what is possible, and why."""


@main.command()
@_json
@_names
@_capacities
@_processes
@click.option("--bounds", is_flag=True, help="Also the linear program for Mooncake's traces: minutes.")
def table(json_path: str | None, traces: str, capacities: str, processes: int, *, bounds: bool) -> None:
    """Policies x capacities x traces, with regret."""
    names, sizes = _chosen(traces, TRACES, "traces"), _chosen(capacities, CAPACITIES, "capacities")
    rows = run_all(tasks_of(names, sizes, bounds=bounds), processes)
    if json_path is not None:
        _write({"rows": rows}, json_path)
    click.echo(markdown(rows))


@main.command()
@_json
@click.option("--traces", default="conversation,synthetic,agents_1,agents_2", show_default=True, metavar="LIST")
@_capacities
@_processes
def blind(json_path: str | None, traces: str, capacities: str, processes: int) -> None:
    """The same, scored on the second half of each trace alone, and on traces that no constant was chosen on."""
    names, sizes = _chosen(traces, TRACES, "traces"), _chosen(capacities, CAPACITIES, "capacities")
    rows = run_all(tasks_of(names, sizes, bounds=False, warm_share=0.5), processes)
    if json_path is not None:
        _write({"rows": rows, "warm_share": 0.5}, json_path)
    click.echo(markdown(rows))


@main.command()
@_json
@click.option("--trace", "name", type=click.Choice(list(TRACES)), default="conversation", show_default=True)
@click.option("--capacity", type=click.Choice(list(CAPACITIES)), default="3 M", show_default=True)
def limit(json_path: str | None, name: str, capacity: str) -> None:
    """How much of the distance to Belady's rule is knowledge, and how much machinery."""
    found = limits(TRACES[name](), CAPACITIES[capacity])
    if json_path is not None:
        _write({"trace": name, "capacity": capacity, **found}, json_path)
    for key, value in found.items():
        click.echo(f"{key:48} {value:.4f}")


@main.command()
@_json
@_names
def ttl(json_path: str | None, traces: str) -> None:
    """R(tau): hits, room and idle time by time to live."""
    rows: list[dict[str, Any]] = [
        {"trace": name, **row} for name in _chosen(traces, TRACES, "traces") for row in residency(TRACES[name]())
    ]
    if json_path is not None:
        _write({"rows": rows}, json_path)
    for row in rows:
        click.echo(
            f"{row['trace']:14} {row['ttl_s']:6.0f} s  hits {row['token_hit_share']:.4f}  "
            f"held {row['resident_tokens_mean'] / 1e6:.1f} M  R {row['R']:.2f}  A {row['A']:.2f}"
        )


if __name__ == "__main__":
    main()
