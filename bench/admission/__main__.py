"""`python -m bench.admission`: what eviction and admission policies make of request traces. See docs/policies.md."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.admission.replay import TierSpec, replay
from bench.admission.traces import SESSION_GAP_S, Trace, load_trace
from bench.machine import machine_facts, write_json
from hicache.errors import ConfigError
from hicache.policies.eviction_choice import eviction_policy_of
from hicache.policies.write import write_policy_of

TRACES = Path(__file__).parent.parent / "trace_files"
TRACES_DEFAULT = ("mooncake_conversation_trace.jsonl.zst", "mooncake_synthetic_trace.jsonl.zst")
POLICIES_DEFAULT = "lru,lru+write_through_selective,lru+tiny_lfu,fifo,lfu,slru,s3_fifo,sieve,arc,gdsf,marconi,ttl"
POLICIES_QUICK = "lru,lru+write_through_selective"
CAPACITIES_DEFAULT = "0.5M,3M,10M,25M"
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True)
class Task:
    """One replay: a policy at a capacity on a trace."""

    trace_number: int
    eviction: str
    write: str
    capacity_tokens: int | None
    warm_share: float

    def run(self, trace: Trace) -> dict[str, Any]:
        """The row of the JSON."""
        pages = None if self.capacity_tokens is None else max(1, self.capacity_tokens // trace.block_tokens)
        tier = TierSpec("cache", pages, self.eviction, self.write)
        result = replay(trace, [tier], warm_share=self.warm_share)
        return {
            "trace": trace.name,
            "eviction": self.eviction,
            "write": self.write,
            "read": "always",
            "capacity_tokens": self.capacity_tokens,
            "capacity_pages": pages,
            **result.to_dict(),
        }


@click.command()
@click.option(
    "--trace", "paths", metavar="FILE", multiple=True, help="Mooncake, Claude Code or Azure; may be repeated."
)
@click.option("--policies", metavar="LIST", help="EVICTION or EVICTION+WRITE, with commas between.")
@click.option("--capacities", metavar="LIST", help="In tokens, such as 512k,3M; inf for no limit.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N requests, or sessions.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the starts of sessions.")
@click.option("--session-gap", "session_gap_s", type=float, default=SESSION_GAP_S, show_default=True, metavar="SECONDS")
@click.option("--warm", "warm_share", type=click.FloatRange(0, 0.99), default=0.0, help="Requests that do not count.")
@click.option("--processes", type=click.IntRange(1, 256), metavar="N", help="As many as there are cores otherwise.")
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="Two policies, Mooncake's conversations; ends within 45 s.")
def main(
    paths: tuple[str, ...],
    policies: str | None,
    capacities: str | None,
    limit: int | None,
    seed: int,
    session_gap_s: float,
    warm_share: float,
    processes: int | None,
    json_path: str | None,
    quick: bool,
) -> None:
    """Replay request traces: each policy at each capacity, in parallel processes."""
    load_before = os.getloadavg()[0]
    console = Console(stderr=json_path == "-", width=None if sys.stdout.isatty() else 140)
    try:
        pairs = list(parse_policies(policies or (POLICIES_QUICK if quick else POLICIES_DEFAULT)))
        tokens = [parse_tokens(text) for text in (capacities or ("3M" if quick else CAPACITIES_DEFAULT)).split(",")]
        files = paths or tuple(str(TRACES / name) for name in TRACES_DEFAULT[: 1 if quick else None])
        traces = [load_trace(path, limit=limit, seed=seed, session_gap_s=session_gap_s) for path in files]
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    tasks = [
        Task(number, eviction, write, capacity, warm_share)
        for number in range(len(traces))
        for capacity in tokens
        for eviction, write in pairs
    ]
    ceilings = [Task(number, "lru", "write_through", None, warm_share) for number in range(len(traces))]
    rows = run_all(traces, [*ceilings, *tasks], console, processes or os.cpu_count() or 1)
    ceiling_rows, runs = rows[: len(traces)], rows[len(traces) :]
    for trace, row in zip(traces, ceiling_rows, strict=True):
        console.print(table_of(trace, row, [run for run in runs if run["trace"] == trace.name]))
    report: dict[str, object] = {
        "machine": machine_facts(load_before),
        "traces": [described(trace, row) for trace, row in zip(traces, ceiling_rows, strict=True)],
        "runs": runs,
    }
    write_json(report, json_path)


def parse_policies(text: str) -> Iterator[tuple[str, str]]:
    """``(eviction, write)`` of each part. Raises ConfigError for a name that there is not."""
    for part in text.split(","):
        eviction, _, write = part.strip().partition("+")
        eviction_policy_of(eviction)
        write = write or "write_through"
        if write_policy_of(write).ahead_share:
            raise ConfigError("policies", part, "a write policy that admits what comes: there is no tier above")
        yield eviction, write


def parse_tokens(text: str) -> int | None:
    """``3M`` is 3,000,000; None for ``inf``. Raises ConfigError."""
    text = text.strip()
    if text == "inf":
        return None
    try:
        tokens = float(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else float(text)
    except ValueError:
        tokens = 0.0
    if not 1 <= tokens < 1e15:
        raise ConfigError("capacities", text, "tokens: a number of at least 1, with k, M or G behind it, or inf")
    return int(tokens)


_traces: Sequence[Trace] = ()  # of a worker, which got them when it was forked


def _run(task: Task) -> dict[str, Any]:
    gc.disable()  # a replay drops what it does not need by itself, and looking for more takes a fifth of its time
    return task.run(_traces[task.trace_number])


def run_all(traces: Sequence[Trace], tasks: Sequence[Task], console: Console, processes: int) -> list[dict[str, Any]]:
    """The row of each task, in order."""
    global _traces  # noqa: PLW0603 - forked workers share the traces so, without a copy
    _traces = traces
    gc.freeze()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with (
            Progress(*columns, console=console, transient=True) as progress,
            ProcessPoolExecutor(min(processes, len(tasks)), mp_context=get_context("fork")) as pool,
        ):
            bar = progress.add_task("replays", total=len(tasks))
            numbers = {pool.submit(_run, task): number for number, task in enumerate(tasks)}
            rows: dict[int, dict[str, Any]] = {}
            for future in as_completed(numbers):
                rows[numbers[future]] = future.result()
                progress.advance(bar)
    finally:
        _traces = ()
        gc.unfreeze()
    return [rows[number] for number in range(len(tasks))]


def described(trace: Trace, ceiling: dict[str, Any]) -> dict[str, Any]:
    """A trace, with what a cache without bounds would find."""
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "references": trace.references,
        "blocks": trace.block_count,
        "block_tokens": trace.block_tokens,
        "input_tokens": ceiling["input_tokens"],
        "ceiling_tokens": ceiling["usable_tokens"],
        "ceiling_gpu_s": ceiling["gpu_s_saved"],
    }


def table_of(trace: Trace, ceiling: dict[str, Any], runs: Sequence[dict[str, Any]]) -> Table:
    """What people look at first."""
    title = f"{trace.name}: {len(trace.requests):,} requests, at most {ceiling['token_hit_share']:.1%} usable"
    table = Table(title=title)
    for name in ("capacity", "eviction", "write", "usable", "GPU time saved", "written", "never read", "refs/s"):
        table.add_column(name, justify="left" if name in ("eviction", "write") else "right")
    for run in runs:
        (tier,) = run["tiers"]
        table.add_row(
            "inf" if run["capacity_tokens"] is None else f"{run['capacity_tokens'] / 1e6:g} M",
            run["eviction"],
            run["write"],
            f"{run['token_hit_share']:.2%}",
            f"{run['gpu_s_saved'] / max(run['gpu_s_total'], 1e-9):.2%}",
            f"{tier['bytes_written'] / 1e12:.2f} TB",
            f"{tier['pages_never_read'] / max(tier['pages_written'], 1):.0%}",
            f"{run['references_per_s']:,.0f}",
        )
    return table


if __name__ == "__main__":
    main()
