"""`hicache`: the command line for people who operate engines and hicached. One module a verb."""

from __future__ import annotations

import sys
from importlib.metadata import version

import click

from hicache.cli.admin import exit_code
from hicache.cli.archives import export_command, import_command
from hicache.cli.calibrate import calibrate
from hicache.cli.completion import completion
from hicache.cli.demo import demo
from hicache.cli.doctor import doctor
from hicache.cli.namespaces import namespaces
from hicache.cli.status import status
from hicache.cli.tenants import tenants
from hicache.cli.top import top
from hicache.cli.trace import trace
from hicache.cli.verify import verify
from hicache.errors import HiCacheError
from hicache.plan.command import plan


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("hicache"), prog_name="hicache")
def cli() -> None:
    """Hierarchical KV-cache storage for LLM inference."""


for command in (
    status,
    top,
    tenants,
    namespaces,
    verify,
    export_command,
    import_command,
    trace,
    doctor,
    plan,
    calibrate,
    demo,
    completion,
):
    cli.add_command(command)


def main() -> None:
    """The entry point: errors are one line, and an exit code of `options.py`."""
    try:
        cli(prog_name="hicache")
    except HiCacheError as error:
        click.echo(f"hicache: {error}", err=True)
        sys.exit(exit_code(error))
