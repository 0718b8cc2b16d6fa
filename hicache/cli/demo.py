"""`hicache demo`: the main job on embedded defaults."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from hicache.errors import ConfigError

TRACE_REQUESTS = 400
TRACE_SCALE = 32


@click.command()
@click.option(
    "--trace",
    metavar="FILE",
    help="A Mooncake-format trace (.jsonl or .jsonl.zst) instead of the built-in workload. After scaling, prompts are"
    " cut to 768 tokens and outputs to 8, which is what the demo's small model takes.",
)
@click.option(
    "--requests",
    type=int,
    default=None,
    show_default=str(TRACE_REQUESTS),
    help="How many requests of the trace; needs --trace.",
)
@click.option(
    "--scale",
    type=int,
    default=None,
    show_default=str(TRACE_SCALE),
    help="What the trace's lengths are divided by, a divisor of 512; needs --trace.",
)
@click.option("--seed", default=7, show_default=True, help="Of the built-in workload and the fresh prompts.")
@click.option("--json", "json_path", metavar="FILE", help="Write the figures as JSON; - for stdout.")
def demo(trace: str | None, requests: int | None, scale: int | None, seed: int, json_path: str | None) -> None:
    """Serve a workload through L1, L2 and a real hicached, kill things, and compare all of it with a recompute."""
    if requests is not None and requests < 1:
        raise ConfigError("requests", requests, "at least 1")
    for name, value in (("requests", requests), ("scale", scale)):
        if value is not None and trace is None:
            raise ConfigError(name, value, "--trace beside it: the built-in workload has its own length")
    root = Path(__file__).resolve().parents[2]
    if not (root / "bench" / "demo").is_dir():
        raise ConfigError("demo", str(root), "a checkout of hicache: the demo's model is in bench/, not in the wheel")
    sys.path.insert(0, str(root))
    try:
        from bench.demo.command import run_demo  # it needs torch

        requests, scale = requests or TRACE_REQUESTS, TRACE_SCALE if scale is None else scale
        sys.exit(run_demo(trace=trace, requests=requests, scale=scale, seed=seed, json_path=json_path))
    except KeyboardInterrupt:  # while torch was being loaded; later ones are run_demo's
        click.echo("hicache: the demo was stopped by SIGINT", err=True)
        sys.exit(128 + signal.SIGINT)
