"""`python -m bench.crash`: kills hicached under load, again and again, and checks every promise. See docs/faults.md."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import SystemRandom

import click
from rich.console import Console
from rich.table import Table

from bench.crash_run import CrashPart, Part, Tally
from bench.machine import machine_facts, write_json
from hicache.backends.open import BACKEND_SCHEMES

KILLS_FULL = 200  # for each backend
KILLS_QUICK = 20
ROOMY_SHARE_OF_KILLS = 0.4


def plan(backends: tuple[str, ...], *, kills: int, is_quick: bool) -> list[Part]:
    """Two stores for each backend: one that nothing may be missing from, one that is full."""
    parts = []
    for backend in backends:
        roomy_kills = round(kills * ROOMY_SHARE_OF_KILLS)
        for part in (Part(backend, False, roomy_kills), Part(backend, True, kills - roomy_kills)):
            small = replace(part, clients=2, capacity_bytes=64 << 20, load_s_max=0.2)
            parts.append(small if is_quick else part)
    return parts


@click.command()
@click.option("--kills", type=click.IntRange(1), help=f"For each backend; {KILLS_FULL} otherwise.")
@click.option("--quick", is_flag=True, help=f"{KILLS_QUICK} kills for each backend, on small stores.")
@click.option("--backend", "wanted", multiple=True, type=click.Choice(BACKEND_SCHEMES), help="Only this one.")
@click.option("--seed", type=int, help="Makes the choices of the run that printed it.")
@click.option("--json", "json_path", metavar="FILE", help="Write the counts as JSON; - for stdout.")
@click.option("--folder", metavar="DIR", help="Where stores are made; a temporary folder otherwise.")
def main(
    kills: int | None, quick: bool, wanted: tuple[str, ...], seed: int | None, json_path: str | None, folder: str | None
) -> None:
    """Kill a real hicached with SIGKILL under load, in start and in stop. Exit code 1 when a promise was broken."""
    start_s, load_before = time.monotonic(), os.getloadavg()[0]
    console = Console(stderr=json_path == "-", width=None if sys.stdout.isatty() else 140)
    seed = SystemRandom().randrange(2**32) if seed is None else seed
    console.print(f"seed {seed}")
    parts = plan(wanted or BACKEND_SCHEMES, kills=kills or (KILLS_QUICK if quick else KILLS_FULL), is_quick=quick)
    work = Path(tempfile.mkdtemp(prefix="hicache-crash-", dir=folder))
    tallies = []
    with console.status("starting") as status:
        for part in parts:
            harness = CrashPart(part, work / part.name.replace(" ", "-"), seed=seed)
            tallies.append(harness.run(show=status.update))
    machine = machine_facts(load_before) | {"wall_s": round(time.monotonic() - start_s, 1)}
    print_tallies(tallies, console)
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    write_json({"seed": seed, "parts": [tally.to_json() for tally in tallies], "machine": machine}, json_path)
    if any(tally.failures for tally in tallies):
        console.print(f"the stores that failed are in {work}")
        sys.exit(1)
    work.rmdir()


def print_tallies(tallies: list[Tally], console: Console) -> None:
    """The table for people, and every failure."""
    names = [name for name in tallies[0].to_json() if name not in ("part", "calls", "failures")]
    table = Table("", *(tally.part for tally in tallies), title="Kills and what they left")
    for name in names:
        table.add_row(name.replace("_", " "), *(_cell(tally.to_json()[name]) for tally in tallies))
    table.add_row("failures", *(str(len(tally.failures)) for tally in tallies))
    console.print(table)
    for tally in tallies:
        for failure in tally.failures:
            console.print(f"{tally.part}: {failure}", markup=False)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in sorted(value.items()))
    return f"{value:,}"


if __name__ == "__main__":
    main()
