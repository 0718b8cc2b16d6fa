"""`hicache doctor`: looks at what hicached needs of this machine, and says what to do where it is not so."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from hicache.cli.doctor_checks import CHECKS, Finding, Level
from hicache.cli.doctor_readings import read_machine
from hicache.cli.options import EXIT_BAD, admin_options, json_option, read_token, say, write_json

_MARKS = {Level.GOOD: ("ok", "green"), Level.HINT: ("hint", "yellow"), Level.BAD: ("BAD", "red")}


@click.command(
    epilog="\b\nExamples:\n  hicache doctor\n  hicache doctor --config /etc/hicached.toml --no-disk-speed --json -"
)
@click.option("--config", "config_file", metavar="FILE", help="The configuration of the hicached to look at.")
@click.option("--path", metavar="DIR", help="Directory of the store, where it is not that of the configuration.")
@click.option("--disk-speed/--no-disk-speed", default=True, help="Write and read 64 MiB beside the store.")
@admin_options
@json_option
def doctor(
    config_file: str | None,
    path: str | None,
    disk_speed: bool,
    admin: str,
    token_file: str | None,
    json_path: str | None,
) -> None:
    """Check limits, memory locking, huge pages, shared memory, disk, clock, versions, sockets and certificates.

    Each finding says what to do. Ends with 1 where something is wrong; hints alone end with 0.
    """
    machine = read_machine(
        config_file=config_file, path=path, admin=admin, token=read_token(token_file), measures_disk=disk_speed
    )
    findings = [finding for check in CHECKS for finding in check(machine)]
    for finding in findings:
        say(_line(finding), json_path=json_path)
    bad = sum(finding.level is Level.BAD for finding in findings)
    hints = sum(finding.level is Level.HINT for finding in findings)
    say(f"{len(findings)} checks: {bad} bad, {hints} hints", json_path=json_path)
    rows = [asdict(finding) | {"level": finding.level.value} for finding in findings]
    write_json(json_path, {"format": 1, "is_good": not bad, "findings": rows})
    if bad:
        sys.exit(EXIT_BAD)


def _line(finding: Finding) -> str:
    mark, colour = _MARKS[finding.level]
    advice = f"\n       {finding.advice}" if finding.advice else ""
    return f"{click.style(f'{mark:>4}', fg=colour)}  {finding.check}: {finding.found}{advice}"
