"""Daemons whose status is looked at: those of the daemon's own tests, with tenants that have quotas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.admin.client import Admin
from tests.daemon.conftest import ThreadedDaemon, client, daemon, folder, start, start_thread

__all__ = ["client", "daemon", "folder", "start", "start_thread"]

TOKENS = {name: f"{name}-token-0123456789" for name in ("alice", "bob", "carol")}
KIB, MIB = 1024, 1024 * 1024


@pytest.fixture
def tenants(folder: Path) -> str:
    """alice has a quota of bytes, bob one of objects, carol none."""
    settings = {"alice": "quota_bytes=4MiB", "bob": "quota_objects=10", "carol": ""}
    file = folder / "tenants"
    file.write_text("".join(f"{name} {TOKENS[name]} {settings[name]}\n" for name in TOKENS))
    return str(file)


@pytest.fixture
def admin(daemon: ThreadedDaemon) -> Admin:
    """Asks ``daemon`` over its admin socket, as the user that runs the tests: an operator."""
    return Admin(daemon.config.admin_socket)


@pytest.fixture
def start_tenants(start_thread: Callable[..., ThreadedDaemon], tenants: str) -> Callable[..., ThreadedDaemon]:
    """Starts a daemon with the tenants alice, bob and carol."""
    return lambda **settings: start_thread(tenants_file=tenants, **settings)
