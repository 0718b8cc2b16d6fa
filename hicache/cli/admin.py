"""How verbs talk to a running daemon: one line on stderr and an exit code for whatever goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

import click
import msgspec

from hicache.admin.client import Admin
from hicache.cli.options import EXIT_BAD, EXIT_UNREACHABLE, EXIT_USAGE, read_token
from hicache.errors import AdminRefused, BackendError, DaemonUnreachable

SILENCE_S = 120.0  # between two lines of a daemon that works
WORK_S = 3600.0  # for an answer that needs a walk through the store
BAD_REQUEST = 400

P = ParamSpec("P")
T = TypeVar("T")


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr, and the end."""
    click.echo(f"hicache: {message}", err=True)
    sys.exit(code)


def exits(command: Callable[P, T]) -> Callable[P, T]:
    """Has a verb end with the documented exit codes, whatever it raises. ConfigError is left to ``main``."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except DaemonUnreachable as error:
            fail(str(error), EXIT_UNREACHABLE)
        except AdminRefused as error:
            fail(str(error), EXIT_USAGE if error.status == BAD_REQUEST else EXIT_BAD)
        except BackendError as error:
            fail(str(error), EXIT_BAD)

    return run


def admin_of(address: str, token_file: str | None) -> Admin:
    """The daemon behind ``--admin`` and ``--token-file``."""
    return Admin(address, token=read_token(token_file))


def lines(parts: Iterator[bytes], of: type[T]) -> Iterator[T]:
    """The JSON lines of a stream. Raises AdminRefused with the daemon's words where one says that it failed."""
    rest = b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for raw in whole:
            yield _decoded(raw, of)
    if rest:
        raise AdminRefused(200, "the answer of hicached ended in the middle of a line")


def _decoded(raw: bytes, of: type[T]) -> T:
    try:
        failure = msgspec.json.decode(raw, type=_Failure)
        if failure.error:
            raise AdminRefused(500, failure.error)
        return msgspec.json.decode(raw, type=of)
    except msgspec.MsgspecError as error:
        raise AdminRefused(200, f"hicached answers what this hicache cannot read ({error})") from error


class _Failure(msgspec.Struct):
    error: str = ""


def tenant_names(tenant: str | None) -> Mapping[str, object]:
    """What names a tenant in a request; nothing for all of them."""
    return {} if tenant is None else {"tenant": tenant}
