"""`hicache completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_HICACHE_COMPLETE"  # what click asks itself by


@click.command(
    epilog="\b\nExamples:\n  hicache completion bash > /etc/bash_completion.d/hicache\n"
    '  hicache completion zsh > "${fpath[1]}/_hicache"\n'
    "  hicache completion fish > ~/.config/fish/completions/hicache.fish"
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion of SHELL for hicache: source it, or write it where the shell looks for it."""
    made = get_completion_class(shell)
    assert made is not None, f"click completes {shell}"
    click.echo(made(context.find_root().command, {}, "hicache", VARIABLE).source())
