"""Core dumps of hicached have no memory: it holds tokens, keys, and what clients store."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

_FILTER = Path("/proc/self/coredump_filter")


def keep_memory_out_of_dumps() -> None:
    """For the whole process. Registers and the names of mapped files are all that a dump has then."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file; a program that the kernel pipes dumps to may not care
    with contextlib.suppress(OSError):
        _FILTER.write_text("0")
