"""Tells scripts where the daemon is, in a file that is there while it serves."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the daemon can be reached: ``host:port`` or a path; empty where a service is off."""

    pid: int
    socket: str
    listen: str
    bulk_listen: str
    http: str


def write_ready_file(path: str, ready: Ready) -> None:
    """Writes ``path`` as JSON in one step: a reader sees all of it or nothing. Raises OSError.

    What a daemon that was killed here has left is written over by the next one.
    """
    part = f"{path}.part"
    try:
        with open(part, "w", encoding="utf-8") as target:
            json.dump(asdict(ready), target)
            target.write("\n")
        os.replace(part, path)
    except OSError:
        remove_ready_file(part)
        raise


def remove_ready_file(path: str) -> None:
    """Removes the file of this or an earlier daemon, if there is one."""
    with contextlib.suppress(OSError):
        os.unlink(path)
