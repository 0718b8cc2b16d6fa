"""`hicache calibrate`: what loads take on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from hicache.costs.machine import machine as base_machine
from hicache.errors import ConfigError


@click.command()
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
