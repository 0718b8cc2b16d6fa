"""hicached as a process, for tests of its clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.client.support import wait_until

TENANT_COUNT = 200


def token_of(number: int) -> str:
    """The token of the tenant ``t<number>``."""
    return f"token-of-tenant-{number:06d}"


class HicachedProcess:
    """Started as often as a test wants, on the same socket and data. ``tcp`` adds a port of the loopback interface.

    ``settings`` are hicached's, and win over what is set here.
    """

    def __init__(
        self, folder: Path, *, backend: str = "lmdb", has_tenants: bool = False, tcp: bool = False, **settings: object
    ) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"unix://{folder}/hicached.sock"
        self.tcp_address = ""
        self.http_address = ""
        self._flags = [
            f"--socket={folder}/hicached.sock",
            f"--path={folder}/store",
            f"--backend={backend}",
            f"--ready-file={folder}/ready.json",
            "--http=",
            "--capacity-bytes=512MiB",
            "--free-space-floor-bytes=0",
        ]
        if has_tenants:
            lines = [f"t{number} {token_of(number)}" for number in range(TENANT_COUNT)]
            (folder / "tenants").write_text("\n".join(lines))
            (folder / "tenants").chmod(0o600)
            self._flags.append(f"--tenants-file={folder}/tenants")
        if tcp:
            self._flags.append("--listen=127.0.0.1:0")
        self._flags += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]

    def start(self) -> None:
        """Returns when it is ready."""
        ready_file = self._folder / "ready.json"
        ready_file.unlink(missing_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hicache.daemon", *self._flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        wait_until(self._is_ready_or_ended, timeout_s=60, what="the start of hicached")
        assert ready_file.exists(), (self._folder / "log").read_text()
        ready = json.loads(ready_file.read_text())
        self.http_address, listen = ready["http"], ready["listen"]
        self.tcp_address = f"tcp://{listen}" if listen else ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; returns when the process is dead after SIGKILL, stopped after SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.wait()
        if number is signal.SIGSTOP:
            os.waitpid(self._process.pid, os.WUNTRACED)

    def end(self) -> None:
        """Leaves no process behind."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _is_ready_or_ended(self) -> bool:
        assert self._process is not None
        return (self._folder / "ready.json").exists() or self._process.poll() is not None
