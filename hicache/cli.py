"""`hicache`: the command line for people who operate engines and hicached."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import click

from hicache.costs.machine import machine as base_machine
from hicache.errors import ConfigError, HiCacheError
from hicache.plan.command import plan

TRACE_REQUESTS = 400
TRACE_SCALE = 32


@click.group()
@click.version_option(version("hicache"), prog_name="hicache")
def cli() -> None:
    """Hierarchical KV-cache storage for LLM inference."""


@cli.command()
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
    root = Path(__file__).resolve().parents[1]
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


@cli.command()
@click.option("--l3", required=True, metavar="ADDRESS", help="hicached, or a backend: what HiCache.open(l3=) takes.")
@click.option("--token", default="", help="What hicached knows the tenant by.")
@click.option("--device", default="cpu", show_default=True, help="Where L1 is: cpu, cuda, cuda:N.")
@click.option("--machine", "base", default="h100", show_default=True, help="Preset whose GPU and compute are kept.")
@click.option("--out", metavar="FILE", help="Write the machine here, for hicache plan --machine FILE (.json).")
@click.option("--json", "json_path", metavar="FILE", help="Write all times as JSON; - for stdout.")
def calibrate(l3: str, token: str, device: str, base: str, out: str | None, json_path: str | None) -> None:
    """Measure what loads from host memory and from L3 take on this machine, and write them as a machine's preset."""
    from hicache import calibrate as calibration  # it needs torch

    if out is not None and not out.endswith(".json"):
        raise ConfigError("out", out, "a name that ends in .json, which hicache plan --machine asks for")
    machine, measured = calibration.calibrate(base_machine(base), l3=l3, token=token, device=device)
    for name, found in measured.items():
        tier = found.tier
        click.echo(
            f"{name}: {tier.latency_s * 1e3:.2f} ms + {tier.bytes_per_s / 1e9:.2f} GB/s"
            f" (worst point {found.error_share:.0%} off)",
            err=json_path == "-",
        )
    if out is not None:
        calibration.write_machine(machine, out)
    if json_path is not None:
        document = {"machine": asdict(machine), "measured": {name: m.to_dict() for name, m in measured.items()}}
        text = json.dumps(document, indent=1)
        click.echo(text) if json_path == "-" else Path(json_path).write_text(text + "\n")


cli.add_command(plan)


def main() -> None:
    """The entry point: errors that the user can mend are one line, and exit code 2."""
    try:
        cli()
    except HiCacheError as error:
        click.echo(f"hicache: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
