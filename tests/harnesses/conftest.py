"""Daemons for the harnesses."""

from __future__ import annotations

from tests.daemon.conftest import folder, start_thread, two_tenants

__all__ = ["folder", "start_thread", "two_tenants"]  # fixtures
