"""`hicache demo`, once its flags have been read: workload, progress bar, report."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.demo.report import checks, print_report, to_json
from bench.demo.run import PROBES, REPLAYS, Demo, Outcome, Sizes
from bench.demo.workload import TraceScale, Turn, built_in_workload, trace_workload
from bench.tiny_config import TinyConfig
from hicache.errors import ConfigError

# Served besides the workload: repeats, pressure, other engine, restart, kill, probes with their controls.
_EXTRA_REQUESTS = 5 * REPLAYS + 8 + 5 * PROBES


def run_demo(*, trace: str | None, requests: int, scale: int, seed: int, json_path: str | None) -> int:
    """Run the demo; returns 0 when every check held, else 1. ``json_path`` "-" means stdout.

    Raises ConfigError for a trace that cannot be read and for a scale that does not fit.
    """
    vocab = TinyConfig().vocab
    if trace is None:
        turns = built_in_workload(conversations=16, turns=5, vocab=vocab, seed=seed)
    else:
        turns = trace_workload(trace, limit=requests, scale=TraceScale(divisor=scale), vocab=vocab)
    if json_path not in (None, "-") and not Path(str(json_path)).absolute().parent.is_dir():
        raise ConfigError("json", json_path, "a file in a folder that exists, or - for stdout")
    console = Console(stderr=json_path == "-")
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as folder:
        outcome = _run(turns, Path(folder), seed=seed, console=console)
    print_report(outcome, console, wall_s=time.monotonic() - start_s)
    if json_path is not None:
        text = json.dumps(to_json(outcome), indent=2) + "\n"
        if json_path == "-":
            sys.stdout.write(text)
        else:
            Path(json_path).write_text(text)
    return 0 if all(holds for _, holds, _ in checks(outcome)) else 1


def _run(turns: list[Turn], folder: Path, *, seed: int, console: Console) -> Outcome:
    columns = (TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting hicached and two engines", total=len(turns) + _EXTRA_REQUESTS)

        def advance(title: str, left: int) -> None:
            progress.update(task, advance=1, description=title)

        outcome = Demo(turns, folder, sizes=Sizes(), seed=seed, advance=advance).run()
        progress.update(task, completed=len(outcome.served), total=len(outcome.served), description="done")
    return outcome
