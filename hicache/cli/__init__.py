"""`hicache`: the command line for people who operate engines and hicached. One module a verb."""

from __future__ import annotations

import sys
from importlib.metadata import version

import click

from hicache.cli.archives import export_command, import_command
from hicache.cli.calibrate import calibrate
from hicache.cli.demo import demo
from hicache.cli.namespaces import namespaces
from hicache.cli.options import EXIT_BAD, EXIT_UNREACHABLE, EXIT_USAGE
from hicache.cli.status import status
from hicache.cli.top import top
from hicache.cli.verify import verify
from hicache.errors import AdminRefused, DaemonUnreachable, HiCacheError
from hicache.plan.command import plan


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("hicache"), prog_name="hicache")
def cli() -> None:
    """Hierarchical KV-cache storage for LLM inference."""


cli.add_command(calibrate)
cli.add_command(demo)
cli.add_command(plan)
cli.add_command(verify)
cli.add_command(namespaces)
cli.add_command(export_command)
cli.add_command(import_command)
cli.add_command(status)
cli.add_command(top)


def main() -> None:
    """The entry point: errors are one line, and an exit code of `options.py`."""
    try:
        cli()
    except DaemonUnreachable as error:
        click.echo(f"hicache: {error}", err=True)
        sys.exit(EXIT_UNREACHABLE)
    except AdminRefused as error:
        click.echo(f"hicache: {error}", err=True)
        sys.exit(EXIT_USAGE if error.status == 400 else EXIT_BAD)
    except HiCacheError as error:
        click.echo(f"hicache: {error}", err=True)
        sys.exit(EXIT_USAGE)
