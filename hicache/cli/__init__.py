"""`hicache`: the command line for people who operate engines and hicached. One module a verb."""

from __future__ import annotations

import sys
from importlib.metadata import version

import click

from hicache.cli.calibrate import calibrate
from hicache.cli.demo import demo
from hicache.cli.options import EXIT_USAGE
from hicache.errors import HiCacheError
from hicache.plan.command import plan


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("hicache"), prog_name="hicache")
def cli() -> None:
    """Hierarchical KV-cache storage for LLM inference."""


cli.add_command(calibrate)
cli.add_command(demo)
cli.add_command(plan)


def main() -> None:
    """The entry point: errors that the user can mend are one line, and exit code 2."""
    try:
        cli()
    except HiCacheError as error:
        click.echo(f"hicache: {error}", err=True)
        sys.exit(EXIT_USAGE)
