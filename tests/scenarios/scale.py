"""How much a scenario does: little in the tests, and with HICACHE_FULL_SCALE=1 as much as its text says."""

from __future__ import annotations

import os

IS_FULL = os.environ.get("HICACHE_FULL_SCALE", "") not in ("", "0")
TIMEOUT_S = 7200 if IS_FULL else 120  # of a test at this scale


def at_scale(short: int, full: int) -> int:
    """One or the other."""
    return full if IS_FULL else short
