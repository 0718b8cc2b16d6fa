"""Plays systemd for one hicached: binds its sockets, passes them, hears what it says, and applies its unit's limits."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.daemon.rig import START_S, flags_of, settings_in

ROOT = Path(__file__).parents[2]


class Manager:
    """Its sockets stay open when the service goes, as those of a socket unit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._notify = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._notify.bind(str(folder / "notify"))
        self._notify.settimeout(START_S)
        self._passed: list[tuple[str, socket.socket]] = []
        self._log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.heard: list[dict[str, str]] = []

    def listen(self, address: str, *, name: str = "") -> str:
        """Has a socket at a path, or at host:port, to be passed; returns where it is."""
        if address.startswith("/"):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(address)
        else:
            host, port = address.rsplit(":", 1)
            listener = socket.create_server((host, int(port)))
            address = f"{host}:{listener.getsockname()[1]}"
        listener.listen(64)
        self._passed.append((name, self._stack.enter_context(listener)))
        return address

    def listen_unix(self) -> None:
        """The four Unix sockets of hicached.socket."""
        for suffix in ("", ".memory", ".bulk", ".admin"):
            self.listen(str(self.folder / f"s.sock{suffix}"))

    def start(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        allowed_calls: Sequence[str] = (),
        families: Sequence[str] = (),
        refuses_writable_code: bool = False,
        **settings: object,
    ) -> None:
        """Starts the service with what was bound."""
        fds = [listener.fileno() for _, listener in self._passed]
        told = {
            "fds": fds,
            "names": ":".join(name for name, _ in self._passed),
            "filter": list(allowed_calls),
            "families": list(families),
            "mdwe": refuses_writable_code,
        }
        command = [sys.executable, "-m", "hicache.daemon", *flags_of(settings_in(self.folder, **settings))]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.systemd.launcher", json.dumps(told), *command],
                stdout=log,
                stderr=log,
                env=os.environ | {"NOTIFY_SOCKET": str(self.folder / "notify")} | dict(environment or {}),
                pass_fds=fds,
                cwd=ROOT,
            )

    def hear(self) -> dict[str, str]:
        """The next message of sd_notify(3). Fails the test when the service has ended instead."""
        deadline = time.monotonic() + START_S
        self._notify.settimeout(0.1)
        while True:
            try:
                message = self._notify.recv(4096).decode()
            except TimeoutError:
                assert self.process is None or self.process.poll() is None, f"it has ended:\n{self.log}"
                assert time.monotonic() < deadline, f"nothing was said:\n{self.log}"
                continue
            self.heard.append(dict(line.split("=", 1) for line in message.splitlines()))
            return self.heard[-1]

    def hear_until(self, is_it: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """The first message that is it; those before are in ``heard``."""
        while not is_it(message := self.hear()):
            pass
        return message

    def wait_ready(self) -> None:
        """READY=1."""
        self.hear_until(lambda message: message.get("READY") == "1")

    def is_silent(self, *, for_s: float) -> bool:
        """Whether nothing is said for that long."""
        self._notify.settimeout(for_s)
        try:
            self._notify.recv(4096)
        except TimeoutError:
            return True
        return False

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait_end(self) -> int:
        assert self.process is not None
        return self.process.wait(START_S)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._stack.close()


def unit_directives(unit: Path, name: str) -> list[str]:
    """All values of a setting in a unit file, in order."""
    lines = unit.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    return [line.split("=", 1)[1] for line in lines if line.startswith(f"{name}=")]


def allowed_calls(unit: Path) -> list[str]:
    """The system calls that SystemCallFilter= of a unit leaves, as systemd-analyze expands the groups."""
    allowed: set[str] = set()
    for value in unit_directives(unit, "SystemCallFilter"):
        names = {call for word in value.removeprefix("~").split() for call in _expand(word)}
        allowed = allowed - names if value.startswith("~") else allowed | names
    return sorted(allowed | set(_expand("@default")))


def _expand(word: str) -> list[str]:
    if not word.startswith("@"):
        return [word]
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", word], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1:]
    words = [line.strip() for line in listed if line.strip() and not line.strip().startswith("#")]
    return [call for each in words for call in _expand(each)]


HAS_ANALYZE = shutil.which("systemd-analyze") is not None
