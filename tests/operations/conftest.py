"""The same daemons as for the command."""

from __future__ import annotations

from tests.cli.conftest import admin, daemon
from tests.daemon.conftest import folder, start, start_thread, two_tenants

__all__ = ["admin", "daemon", "folder", "start", "start_thread", "two_tenants"]
