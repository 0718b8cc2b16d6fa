"""`hicache`: the command line for people who operate engines and hicached."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import click

from hicache.errors import ConfigError, HiCacheError


@click.group()
@click.version_option(version("hicache"), prog_name="hicache")
def cli() -> None:
    """Hierarchical KV-cache storage for LLM inference."""


@cli.command()
@click.option("--trace", metavar="FILE", help="A Mooncake-format trace (.jsonl or .jsonl.zst) instead of the built-in.")
@click.option("--requests", default=400, show_default=True, help="How many requests of the trace.")
@click.option("--scale", default=32, show_default=True, help="What the trace's lengths are divided by.")
@click.option("--seed", default=7, show_default=True, help="Of the built-in workload and the fresh prompts.")
@click.option("--json", "json_path", metavar="FILE", help="Write the figures as JSON; - for stdout.")
def demo(trace: str | None, requests: int, scale: int, seed: int, json_path: str | None) -> None:
    """Serve a workload through L1, L2 and a real hicached, kill things, and compare all of it with a recompute."""
    if requests < 1:
        raise ConfigError("requests", requests, "at least 1")
    root = Path(__file__).resolve().parents[1]
    if not (root / "bench" / "demo").is_dir():
        raise ConfigError("demo", str(root), "a checkout of hicache: the demo's model is in bench/, not in the wheel")
    sys.path.insert(0, str(root))
    from bench.demo.command import run_demo  # it needs torch

    sys.exit(run_demo(trace=trace, requests=requests, scale=scale, seed=seed, json_path=json_path))


def main() -> None:
    """The entry point: errors that the user can mend are one line, and exit code 2."""
    try:
        cli()
    except HiCacheError as error:
        click.echo(f"hicache: {error}", err=True)
        sys.exit(2)
