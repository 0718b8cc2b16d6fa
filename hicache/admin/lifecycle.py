"""What is sent and answered about draining and reloading a daemon."""

from __future__ import annotations

import msgspec


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Refuse new work, and stop when nothing runs and nothing is leased, or after ``within_s``; None: its setting."""

    within_s: float | None = None


class DrainAnswer(msgspec.Struct, frozen=True):
    """It has begun; this is what is waited for."""

    calls: int
    leases: int
    sessions: int
    within_s: float


class ReloadAnswer(msgspec.Struct, frozen=True):
    """It is done: ``changed`` are the settings that have other values now, ``needs_restart`` those that wait for it."""

    changed: list[str]
    needs_restart: list[str]
