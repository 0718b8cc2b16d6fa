"""What hicached tells the service manager that started it, by the protocol of sd_notify(3)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping

SEND_TIMEOUT_S = 1.0  # for a manager that is busy, of what is said once; what is said again and again waits for nobody


class ServiceManager:
    """systemd, or nobody: then nothing is said. Thread-safe."""

    def __init__(self, environment: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID."""
        self._address = _address_of(environment.get("NOTIFY_SOCKET", ""))
        self._clock = clock
        self.watchdog_s = _watchdog_s(environment)  # without a sign of life for so long it kills us; 0: it does not

    @property
    def is_there(self) -> bool:
        """Whether anybody listens."""
        return self._address is not None

    def ready(self, status: str) -> None:
        """The start, or a reload, is done."""
        self._tell("READY=1", _status(status))

    def reloading(self) -> None:
        """A reload begins; ``ready`` ends it. The time tells which request is answered."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={round(self._clock() * 1e6)}", _status("reloading"))

    def stopping(self, status: str, *, within_s: float) -> None:
        """The stop begins, and may take so long."""
        self._tell("STOPPING=1", _extension(within_s), _status(status))

    def status(self, text: str) -> None:
        """One line for people."""
        self._tell(_status(text))

    def busy(self, status: str, *, within_s: float) -> None:
        """A start or stop goes on: it is not late if it is done, or says this again, within the time."""
        self._tell(_extension(within_s), _status(status), timeout_s=0)

    def alive(self) -> None:
        """Feeds the watchdog."""
        self._tell("WATCHDOG=1", timeout_s=0)

    def _tell(self, *lines: str, timeout_s: float = SEND_TIMEOUT_S) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(timeout_s)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            pass  # nobody is there any more, and nobody but the manager could do anything about it


def _address_of(path: str) -> str | None:
    if path.startswith("@"):
        return "\0" + path[1:]
    return path if path.startswith("/") else None


def _watchdog_s(environment: Mapping[str, str]) -> float:
    wanted_us, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not wanted_us.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(wanted_us) / 1e6


def _status(text: str) -> str:
    """One line, whatever the text has: what follows a line break would be taken for something that is told, too."""
    return f"STATUS={' '.join(text.split())}"


def _extension(within_s: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(within_s * 1e6)}"
