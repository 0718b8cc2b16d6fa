"""`python -m bench.hybrid`: what attention and state kept together cost and save. See docs/benchmarks.md."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench import hybrid_arena, hybrid_ranks, hybrid_snapshots
from bench.machine import machine_facts, write_json


@dataclass(frozen=True, slots=True)
class Part:
    """One table. ``measure(quick=...)`` returns its rows, frozen dataclasses of plain values."""

    title: str
    measure: Callable[..., Sequence[Any]]  # Any: each table has its own row class


PARTS: Mapping[str, Part] = {
    "snapshot_density": Part(
        "Snapshots by policy: memory for tokens that need not be computed", hybrid_snapshots.measure
    ),
    "unified_arena": Part("One L1 for pages and states, beside every fixed split of it", hybrid_arena.measure),
    "ranks": Part("Replicas of several ranks in processes of their own", hybrid_ranks.measure),
}


@click.command()
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="Smaller workloads; ends within 45 s.")
def main(json_path: str | None, quick: bool) -> None:
    """Measure what snapshots, the unified arena and ranks of hybrid models cost and save."""
    start_s, load_before = time.monotonic(), os.getloadavg()[0]
    console = Console(stderr=json_path == "-", width=None if sys.stdout.isatty() else 200)
    results: dict[str, Sequence[Any]] = {}
    for name, part in PARTS.items():
        with console.status(name):
            results[name] = part.measure(quick=quick)
        print_rows(part.title, results[name], console)
    machine = machine_facts(load_before) | {"wall_s": round(time.monotonic() - start_s, 1)}
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    write_json(
        {name: [asdict(row) for row in rows] for name, rows in results.items()} | {"machine": machine}, json_path
    )


def print_rows(title: str, rows: Sequence[Any], console: Console) -> None:
    """A column for each field."""
    table = Table(title=title, title_justify="left")
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*map(_cell, asdict(row).values()))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


if __name__ == "__main__":
    main()
