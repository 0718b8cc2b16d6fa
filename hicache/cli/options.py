"""What the verbs share: exit codes, options, and how results are printed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from hicache.admin.client import DEFAULT_ADDRESS
from hicache.errors import ConfigError

EXIT_DONE = 0
EXIT_BAD = 1  # what was asked about is bad, or what was asked for failed
EXIT_USAGE = 2  # wrong usage, or a wrong setting
EXIT_UNREACHABLE = 3  # no hicached answers


DEFAULT_ADMIN = DEFAULT_ADDRESS
ADMIN_VARIABLE = "HICACHE_ADMIN"
TOKEN_FILE_BYTES_MAX = 4096

Command = TypeVar("Command", bound=Callable[..., Any])  # Any: what click decorates


def json_option(command: Command) -> Command:
    """``--json FILE``."""
    return click.option("--json", "json_path", metavar="FILE", help="Write the result as JSON; - for stdout.")(command)


def admin_options(command: Command) -> Command:
    """``--admin PATH`` and ``--token-file FILE``: which daemon is asked, and as whom."""
    command = click.option(
        "--token-file",
        metavar="FILE",
        help="File with the token to ask with; without it, the daemon goes by the user that runs this command.",
    )(command)
    return click.option(
        "--admin",
        metavar="PATH",
        envvar=ADMIN_VARIABLE,
        default=DEFAULT_ADMIN,
        show_default=True,
        show_envvar=True,
        help="Admin socket of the hicached to ask.",
    )(command)


def encryption_keys_option(command: Command) -> Command:
    """``--encryption-keys FILE``: what opens an encrypted store that no daemon has open."""
    return click.option(
        "--encryption-keys",
        default="",
        metavar="FILE",
        help="With --path, where the store is encrypted: hicached's file of master keys.",
    )(command)


def read_token(token_file: str | None) -> str:
    """The token in a file; empty without one. Raises ConfigError, which never shows what is in it."""
    if token_file is None:
        return ""
    try:
        with open(token_file, encoding="utf-8") as source:
            token = source.read(TOKEN_FILE_BYTES_MAX + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("token-file", token_file, f"a readable text file ({error})") from error
    if not token or len(token.split()) != 1 or len(token) > TOKEN_FILE_BYTES_MAX:
        raise ConfigError("token-file", token_file, "a file with one token and nothing else")
    return token


def write_json(json_path: str | None, document: Mapping[str, Any]) -> None:  # Any: what JSON takes
    """Write ``document`` where ``--json`` says, in one step; nothing without it."""
    if json_path is None:
        return
    text = json.dumps(document, indent=1) + "\n"
    if json_path == "-":
        click.echo(text, nl=False)
        return
    temporary = f"{json_path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as target:
            target.write(text)
        os.replace(temporary, json_path)
    except OSError as error:
        raise ConfigError("json", json_path, f"a file that can be written ({error.strerror})") from error


def say(text: str, *, json_path: str | None = None) -> None:
    """A line for people: to stderr where stdout has the JSON."""
    click.echo(text, err=json_path == "-")
