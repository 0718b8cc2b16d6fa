"""`python -m bench.store`: how fast hicached moves objects, beside what limits it. See docs/benchmarks.md."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.machine import machine_facts, write_json
from bench.peers import run_peers
from bench.store_grid import MOONCAKE, full_plan, quick_plan
from bench.store_rows import print_rows, rows_to_json
from bench.store_run import StoreBench
from hicache.backends.mooncake_client import load_wheel
from hicache.backends.open import BACKEND_SCHEMES
from hicache.errors import ConfigError


def backends_here() -> tuple[tuple[str, ...], list[str]]:
    """The backends that can run here, and why the others cannot."""
    try:
        load_wheel()
    except ConfigError as error:
        return BACKEND_SCHEMES, [f"mooncake: {error.expected}"]
    return (*BACKEND_SCHEMES, *MOONCAKE), []


@click.command()
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="The rows that have targets only; ends within 45 s.")
@click.option("--peers", is_flag=True, help="Measure other systems in the same run, those that are installed.")
@click.option("--peers-python", default=sys.executable, metavar="FILE", help="The Python that has them installed.")
@click.option("--backend", "wanted", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@click.option("--mooncake-master", metavar="HOST:PORT", help="A Mooncake store to use; otherwise one is started.")
@click.option("--mooncake-metrics", metavar="HOST:PORT", help="The HTTP of that master; its port 9003 otherwise.")
@click.option("--folder", metavar="DIR", help="Where stores are made; a temporary folder otherwise.")
def main(
    json_path: str | None,
    quick: bool,
    peers: bool,
    peers_python: str,
    wanted: tuple[str, ...],
    mooncake_master: str | None,
    mooncake_metrics: str | None,
    folder: str | None,
) -> None:
    """Measure get and put through a real hicached: registered memory, Unix-socket streams and TCP streams."""
    start_s = time.monotonic()
    console = Console(stderr=json_path == "-", width=None if sys.stdout.isatty() else 160)
    backends, skipped = backends_here()
    unknown = [name for name in wanted if name not in backends]
    if unknown:
        raise click.UsageError(f"--backend {unknown[0]}: here there are {', '.join(backends)}")
    backends = tuple(name for name in backends if name in wanted or not wanted)
    plan = quick_plan(backends, with_peers=peers) if quick else full_plan(backends)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=folder) as work, console.status("starting") as status:
        bench = StoreBench(plan, Path(work), show=status.update, mooncake=(mooncake_master, mooncake_metrics))
        bench.results.skipped += skipped
        try:
            bench.run()
            if peers:
                run_peers(bench, python=peers_python, show=status.update)
        finally:
            bench.close()
    machine = machine_facts(load_before) | {"wall_s": round(time.monotonic() - start_s, 1)}
    report(bench, machine, console, json_path)


def report(bench: StoreBench, machine: dict[str, object], console: Console, json_path: str | None) -> None:
    """Table, first passes, what was left out; and the JSON."""
    results = bench.results
    print_rows(results.rows, console)
    for first in results.first_pass:
        console.print(f"filling an empty or foreign store (pages are made, files grow): {_text(first)}")
    for line in results.skipped:
        console.print(f"skipped: {line}", markup=False)
    console.print(_text(machine))
    document = {
        **rows_to_json(results.rows),
        "first_pass": results.first_pass,
        "skipped": results.skipped,
        "machine": machine,
    }
    write_json(document, json_path)


def _text(facts: dict[str, Any]) -> str:  # Any: a JSON object
    return ", ".join(f"{name} {value}" for name, value in facts.items())


if __name__ == "__main__":
    main()
