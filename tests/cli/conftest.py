"""A daemon as a process or a thread, and `hicache` as users run it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from hicache.cli import cli
from hicache.cli.admin import exit_code
from hicache.errors import HiCacheError
from hicache.outcome import Outcome
from tests.backends.payloads import payload
from tests.daemon.client import DESCRIPTOR, Client
from tests.daemon.conftest import ThreadedDaemon, folder, start, start_thread, two_tenants
from tests.daemon.raw_links import object_key

__all__ = ["folder", "start", "start_thread", "two_tenants"]


class Ran(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:  # Any: what JSON is
        return json.loads(self.out[self.out.index("{\n") :])  # behind what a daemon in this process has logged


def run(*arguments: object, given: str = "") -> Ran:
    """`hicache ARGUMENTS` in this process, with its exit code as ``main`` makes it."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], input=given)
    if isinstance(result.exception, HiCacheError):
        return Ran(exit_code(result.exception), result.stdout, f"{result.stderr}hicache: {result.exception}")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def model(name: str) -> dict[str, Any]:  # Any: values of a descriptor
    """The descriptor of another model."""
    return DESCRIPTOR | {"model": name}


def store(client: Client, numbers: range, size_bytes: int = 5000) -> list[bytes]:
    """Objects that belong to their numbers; returns their keys."""
    keys = [object_key(number) for number in numbers]
    payloads = [payload(number, size_bytes) for number in numbers]
    assert set(client.put_stream(keys, payloads)) == {Outcome.OK}
    return keys


@pytest.fixture
def admin(folder: Path) -> str:
    """The admin socket of daemons in ``folder``."""
    return str(folder / "s.sock.admin")


@pytest.fixture
def daemon(start_thread: Callable[..., ThreadedDaemon]) -> ThreadedDaemon:
    """One daemon in this process with small settings."""
    return start_thread()
