"""Tells others how far the daemon is: systemd through NOTIFY_SOCKET, and scripts through a ready file."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass

NOTIFY_SOCKET = "NOTIFY_SOCKET"


def notify_systemd(state: str, environment: Mapping[str, str]) -> bool:
    """Sends ``state`` (READY=1, STOPPING=1) to the service manager; False where there is none that listens."""
    address = environment.get(NOTIFY_SOCKET, "")
    if not address.startswith(("/", "@")):
        return False
    name = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(1.0)
            sender.sendto(state.encode(), name)
    except OSError:
        return False
    return True


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
