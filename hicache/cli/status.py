"""`hicache status`: how a hicached is, on one screen."""

from __future__ import annotations

import sys

import click
import msgspec
from rich.console import Console

from hicache.admin.client import Admin
from hicache.admin.screen import screen
from hicache.admin.verbs import STATUS
from hicache.cli.options import EXIT_BAD, EXIT_DONE, admin_options, json_option, read_token, write_json

STORE_SILENT_S = 5.0  # a store that has not said how full it is for so long is in trouble


@click.command()
@admin_options
@json_option
def status(admin: str, token_file: str | None, json_path: str | None) -> None:
    """Show how a hicached is: tiers, hit rate, traffic and latency of the last hour, tenants, slowest objects, errors.

    --admin also takes the HOST:PORT of hicached's http, which anybody may ask.

    \b
    Exit codes:
      0  it is ready
      1  it is not: it starts, recovers, drains or stops, or its store does not answer
      2  an option is wrong
      3  no hicached answers
    """
    found = Admin(admin, token=read_token(token_file)).ask(STATUS)
    write_json(json_path, msgspec.to_builtins(found))
    if json_path != "-":
        console = Console(highlight=False)
        console.print(screen(found, columns=console.width))
    is_well = found.state == "ready" and found.store_age_s is not None and found.store_age_s < STORE_SILENT_S
    sys.exit(EXIT_DONE if is_well else EXIT_BAD)
