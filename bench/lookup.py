"""`python -m bench.lookup`: what finding things costs, by how many there are. See docs/benchmarks.md."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.lookup_daemon import CountBench, CountRow, RestartRow, counts_up_to, growth, why_not
from bench.lookup_directory import MatchRow, measure_match
from bench.lookup_eviction import EvictionRow, measure_evictions
from bench.lookup_index import IndexRow, measure_index
from bench.lookup_keys import HashRow, measure_hashing
from bench.lookup_whole import WholeRow, measure_whole
from bench.machine import machine_facts, write_json
from bench.small_objects_daemon import STORED_BYTES

OBJECTS_MAX_QUICK = 10**5
OBJECTS_MAX_FULL = 10**6  # 10^7 takes a flag, and half an hour
PARTS = ("hashing", "hicached", "index", "directory", "eviction")
PAGES_QUICK, PAGES_FULL = 1024, 8192  # of eviction policies
INDEXED_QUICK = (10**4, 10**5, 10**6)  # in this process: the index of the daemon alone
INDEXED_FULL = (10**4, 10**5, 10**6, 10**7)
RESIDENT_PAGES_QUICK = (10_000, 40_000)
RESIDENT_PAGES_FULL = (10_000, 100_000, 1_000_000)


@dataclass(slots=True)
class Results:
    """What came out."""

    hashing: list[HashRow] = field(default_factory=list)
    objects: list[CountRow] = field(default_factory=list)
    index: list[IndexRow] = field(default_factory=list)
    whole: list[WholeRow] = field(default_factory=list)
    restart: list[RestartRow] = field(default_factory=list)
    directory: list[MatchRow] = field(default_factory=list)
    eviction: list[EvictionRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@click.command()
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="Up to 10^5 objects; ends within 45 s.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Measure this part alone; may be repeated.")
@click.option("--objects-max", type=click.IntRange(10**3, 10**8), help="The most resident objects, such as 10000000.")
@click.option("--backend", type=click.Choice(tuple(STORED_BYTES)), default="lmdb", help="Of hicached.")
@click.option("--folder", metavar="DIR", help="Where the store is made; a temporary folder otherwise.")
def main(
    json_path: str | None,
    quick: bool,
    only: tuple[str, ...],
    objects_max: int | None,
    backend: str,
    folder: str | None,
) -> None:
    """Measure hashing, hicached by how many objects it holds, its index, the directory's match, and evictions."""
    start_s, load_before = time.monotonic(), os.getloadavg()[0]
    console = Console(stderr=json_path == "-", width=None if sys.stdout.isatty() else 160)
    results = Results()

    def measure_hicached() -> None:
        counts = counts_up_to(objects_max or (OBJECTS_MAX_QUICK if quick else OBJECTS_MAX_FULL))
        with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=folder) as work:
            measure_daemon(results, Path(work), backend=backend, counts=counts, repetitions=15 if quick else 101)

    measures: dict[str, Callable[[], None]] = {
        "hashing": lambda: results.hashing.extend(measure_hashing()),
        "hicached": measure_hicached,
        "index": lambda: results.index.extend(
            measure_index(objects, repetitions=15 if quick else 101)
            for objects in (INDEXED_QUICK if quick else INDEXED_FULL)
        ),
        "directory": lambda: results.directory.extend(
            row for pages in (RESIDENT_PAGES_QUICK if quick else RESIDENT_PAGES_FULL) for row in measure_match(pages)
        ),
        "eviction": lambda: results.eviction.extend(
            measure_evictions(PAGES_QUICK if quick else PAGES_FULL, rounds=3 if quick else 7)
        ),
    }
    with console.status("") as status:
        for part in only or PARTS:
            status.update(part)
            measures[part]()
    machine = machine_facts(load_before) | {"wall_s": round(time.monotonic() - start_s, 1)}
    print_results(results, machine, console)
    write_json(to_json(results, machine), json_path)


def measure_daemon(results: Results, folder: Path, *, backend: str, counts: list[int], repetitions: int) -> None:
    """As many objects as the machine has room for; what it has not is named in ``results.skipped``."""
    while counts and (lack := why_not(counts[-1], folder, backend=backend)) is not None:
        results.skipped.append(lack)
        counts.pop()
    if not counts:
        return
    bench = CountBench(folder / "daemon", backend=backend, counts=counts, repetitions=repetitions)
    try:
        for count in counts:
            results.objects.append(bench.measure(count))
        results.whole += measure_whole(bench)
        results.restart += [bench.restart("SIGTERM"), bench.restart("SIGKILL")]
    finally:
        bench.close()


def to_json(results: Results, machine: dict[str, object]) -> dict[str, object]:
    """The fields that scripts rely on."""
    return {
        **asdict(results),
        "growth": growth(results.objects),
        "index_growth": growth(results.index),
        "machine": machine,
    }


def print_results(results: Results, machine: dict[str, object], console: Console) -> None:
    """The tables for people."""
    _print("Block keys of one prompt; the limit is one hash over the same bytes", results.hashing, console)
    _print("hicached by resident objects; microseconds a key", results.objects, console)
    _print("The index of hicached alone, in this process; microseconds a key", results.index, console)
    for rows in (results.objects, results.index):
        if rows:
            grown = ", ".join(f"{name} x{factor}" for name, factor in growth(rows).items())
            console.print(f"from {rows[0].objects:,} to {rows[-1].objects:,} objects: {grown}")
    _print("The whole store, and what a client beside it waits", results.whole, console)
    _print("Restart", results.restart, console)
    _print("Directory.open beside five look-ups a page in the same dict", results.directory, console)
    _print("Eviction policies in the directory; microseconds a page", results.eviction, console)
    for line in results.skipped:
        console.print(f"skipped: {line}")
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))


def _print(title: str, rows: Sequence[Any], console: Console) -> None:  # Any: each table has its own row class
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" if not isinstance(value, str) else value for value in asdict(row).values()))
    console.print(table)


if __name__ == "__main__":
    main()
