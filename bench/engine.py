"""`python -m bench.engine`: pages through an engine's own cache controller, beside its own store and memcpy.

See docs/benchmarks.md.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import click
from rich.console import Console

from bench.engine_rows import EngineRow, print_engine_rows, rows_to_document
from bench.machine import machine_facts, write_json

ENGINES = ("sglang", "tiny")
REQUIREMENTS = "tests/engines/requirements-sglang.txt"


@click.command()
@click.option("--engine", type=click.Choice(ENGINES), required=True, help="Whose controller moves the pages.")
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="One host layout and fewer rounds; ends within 45 s.")
@click.option("--layout", "wanted", multiple=True, metavar="NAME", help="Only this host layout; may be repeated.")
@click.option("--folder", metavar="DIR", help="Where stores are made; a temporary folder otherwise.")
def main(engine: str, json_path: str | None, quick: bool, wanted: tuple[str, ...], folder: str | None) -> None:
    """Measure backup (L2 to L3) and prefetch (L3 to L2) of an engine as released, on hicached and on its own files.

    With the tiny model: whether what L3 has is ever slower to get than to compute, at any bandwidth of L3.
    """
    if engine == "tiny":
        _run_tiny(json_path, quick=quick, folder=folder)
        return
    if importlib.util.find_spec(engine) is None:
        raise click.ClickException(
            f"{engine} is not in this environment: make engines builds one that has it (.venv-{engine}), or "
            f"pip install -r {REQUIREMENTS}"
        )
    _prepare()
    from bench.engine_sglang import LAYOUTS, full_plan, quick_plan, run  # imports the engine

    unknown = [name for name in wanted if name not in LAYOUTS]
    if unknown:
        raise click.UsageError(f"--layout {unknown[0]}: one of {', '.join(LAYOUTS)}")

    start_s = time.monotonic()
    load_before = os.getloadavg()[0]
    console = Console(stderr=json_path == "-", width=None if sys.stdout.isatty() else 160)
    rows: list[EngineRow] = []
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=folder) as work, console.status("starting") as status:
        for cell in quick_plan() if quick else full_plan(wanted or LAYOUTS):
            status.update(str(cell))
            rows += run(cell, Path(work))
    print_engine_rows(rows, console)
    machine = machine_facts(load_before) | {"wall_s": round(time.monotonic() - start_s, 1)}
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    write_json({**rows_to_document(rows), "machine": machine}, json_path)


def _run_tiny(json_path: str | None, *, quick: bool, folder: str | None) -> None:
    from bench.engine_throttled import run_throttled, throttled_document  # imports torch

    start_s, load_before = time.monotonic(), os.getloadavg()[0]
    console = Console(stderr=json_path == "-", width=None if sys.stdout.isatty() else 160)
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=folder) as work, console.status("starting") as status:
        rows, served = run_throttled(Path(work), quick=quick, show=status.update, console=console)
    machine = machine_facts(load_before) | {"wall_s": round(time.monotonic() - start_s, 1)}
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    write_json({**throttled_document(rows, served), "machine": machine}, json_path)
    if any(row.is_slower for row in rows if row.policy == "latency"):
        raise SystemExit("with the read policy, reading was slower than computing: see above")


def _prepare() -> None:
    """SGLang imports torchvision, which is not needed here and does not come for each torch."""
    warnings.simplefilter("ignore")  # what the engine and its libraries say when they are imported
    if importlib.util.find_spec("torchvision") is None:
        from tests.engines.sglang import stubs

        stubs.install()


if __name__ == "__main__":
    main()
