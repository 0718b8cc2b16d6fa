"""`hicache`: the command line for people who operate engines and hicached. One module a verb, imported when needed."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version

import click

from hicache.errors import HiCacheError

COMMANDS = {
    "status": "hicache.cli.status:status",
    "top": "hicache.cli.top:top",
    "tenants": "hicache.cli.tenants:tenants",
    "namespaces": "hicache.cli.namespaces:namespaces",
    "verify": "hicache.cli.verify:verify",
    "export": "hicache.cli.archives:export_command",
    "import": "hicache.cli.archives:import_command",
    "trace": "hicache.cli.trace:trace",
    "doctor": "hicache.cli.doctor:doctor",
    "plan": "hicache.plan.command:plan",
    "calibrate": "hicache.cli.calibrate:calibrate",
    "demo": "hicache.cli.demo:demo",
    "completion": "hicache.cli.completion:completion",
}


class LazyGroup(click.Group):
    """Imports the module of a command when it is run, completed or listed: most take longer than what they do."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """None for a command that there is not."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("hicache"), prog_name="hicache")
def cli() -> None:
    """Hierarchical KV-cache storage for LLM inference."""


def main() -> None:
    """The entry point: errors are one line, and an exit code of `options.py`."""
    try:
        cli(prog_name="hicache")
    except HiCacheError as error:
        from hicache.cli.admin import exit_code

        click.echo(f"hicache: {error}", err=True)
        sys.exit(exit_code(error))
