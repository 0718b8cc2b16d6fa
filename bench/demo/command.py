"""`hicache demo`, once its flags have been read: workload, progress bar, report."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.demo.processes import DemoError, log_tails
from bench.demo.report import checks, print_report, to_json
from bench.demo.run import PROBES, REPLAYS, Demo, Outcome, Sizes
from bench.demo.signals import Stopped, stop_signals_raised
from bench.demo.workload import TraceScale, Turn, built_in_workload, trace_workload
from bench.tiny_config import TinyConfig
from hicache.errors import ConfigError

# Served besides the workload: repeats, pressure, other engine, restart, kill, probes with their controls.
_EXTRA_REQUESTS = 5 * REPLAYS + 10 + 5 * PROBES


def run_demo(*, trace: str | None, requests: int, scale: int, seed: int, json_path: str | None) -> int:
    """Run the demo; returns 0 when every check held, else 1. ``json_path`` "-" means stdout.

    SIGINT, SIGTERM and SIGHUP end it with 128 and their number. Whatever ends it: no process and no file of it remains.
    Raises ConfigError, before anything was started, for a trace that cannot be read or is too small, for a scale that
    does not fit, and for a ``json_path`` that cannot be written.
    """
    vocab = TinyConfig().vocab
    if trace is None:
        turns = built_in_workload(conversations=16, turns=5, vocab=vocab, seed=seed)
    else:
        turns = trace_workload(trace, limit=requests, scale=TraceScale(divisor=scale), vocab=vocab)
    if json_path not in (None, "-"):
        _check_writable(Path(str(json_path)))
    console = Console(stderr=json_path == "-")
    try:
        with stop_signals_raised():
            return _run_and_report(turns, seed=seed, json_path=json_path, console=console)
    except Stopped as stopped:
        print(f"hicache: the demo was stopped by {stopped.number.name}", file=sys.stderr)
        return int(stopped.code or 0)


def _check_writable(path: Path) -> None:
    target = path if path.exists() else path.absolute().parent
    is_writable = not path.is_dir() and path.absolute().parent.is_dir() and os.access(target, os.W_OK)
    if not is_writable:
        raise ConfigError("json", str(path), "a file that can be written, in a folder that exists, or - for stdout")


def _run_and_report(turns: list[Turn], *, seed: int, json_path: str | None, console: Console) -> int:
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as folder:
        try:
            outcome = _run(turns, Path(folder), seed=seed, console=console)
        except DemoError as error:
            print(f"{log_tails(Path(folder))}\nhicache: {error}", file=sys.stderr)
            return 1
        has_passed = all(holds for _, holds, _ in checks(outcome))
        if not has_passed:
            print(log_tails(Path(folder)), file=sys.stderr)
    print_report(outcome, console, wall_s=time.monotonic() - start_s)
    if json_path is not None:
        _write_json(json.dumps(to_json(outcome), indent=2) + "\n", json_path)
    return 0 if has_passed else 1


def _write_json(text: str, json_path: str) -> None:
    if json_path == "-":
        sys.stdout.write(text)
    else:
        Path(json_path).write_text(text)


def _run(turns: list[Turn], folder: Path, *, seed: int, console: Console) -> Outcome:
    columns = (TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting hicached and two engines", total=len(turns) + _EXTRA_REQUESTS)

        def advance(title: str, left: int) -> None:
            progress.update(task, advance=1, description=title)

        outcome = Demo(turns, folder, sizes=Sizes(), seed=seed, advance=advance).run()
        progress.update(task, completed=len(outcome.served), total=len(outcome.served), description="done")
    return outcome
