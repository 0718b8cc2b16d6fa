"""hicached as a process of a benchmark: started in a folder of its own, measured, stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from hicache.errors import HiCacheError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
TOKEN = "token-of-the-benchmarks"
OTHER, OTHER_TOKEN = "other", "token-of-another-tenant"
DAEMON_MODULE = "hicache.daemon"
_POLL_S = 0.005


class BenchError(HiCacheError):
    """A process that a benchmark needs did not do what it should."""


class DaemonProcess:
    """A real hicached with two tenants, on a Unix socket and a TCP port of the loopback interface."""

    def __init__(
        self,
        folder: Path,
        *,
        backend: str,
        capacity_bytes: int,
        module: str = DAEMON_MODULE,
        settings: dict[str, str] | None = None,
        nice: int = 0,
    ) -> None:
        """``module`` is run in place of hicached by benchmarks that change something in it; ``settings`` are flags.

        ``nice``, where this process may give it that: it is as systemd/hicached.service has it, -10.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._command = ["nice", f"--adjustment={nice}", sys.executable, "-m", module]
        self._process: subprocess.Popen[bytes] | None = None
        self._addresses = {"memory": f"unix://{folder}/d.sock", "unix": f"unix://{folder}/d.sock"}
        flags = {
            "socket": f"{folder}/d.sock",
            "path": f"{folder}/store",
            "backend": backend,
            "capacity-bytes": str(capacity_bytes),
            "free-space-floor-bytes": "0",
            "ready-file": f"{folder}/ready.json",
            "tenants-file": f"{folder}/tenants",
            "listen": "127.0.0.1:0",
            "http": "",
            "log-level": "warning",
        } | (settings or {})
        self._flags = [f"--{name}={value}" for name, value in flags.items()]
        tenants = folder / "tenants"
        tenants.write_text(f"bench {TOKEN}\n{OTHER} {OTHER_TOKEN}\n")
        tenants.chmod(0o600)

    def start(self) -> float:
        """Start it; returns the seconds until it served clients. Raises BenchError."""
        start_s = time.monotonic()
        self.spawn()
        assert self._process is not None
        ready = self._folder / "ready.json"
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() - start_s > START_TIMEOUT_S:
                self.kill()
                raise BenchError(f"hicached did not start: {(self._folder / 'log').read_text()[-1000:].strip()}")
            time.sleep(_POLL_S)
        ready_s = time.monotonic() - start_s
        told = json.loads(ready.read_text())
        self._addresses |= {"tcp": f"tcp://{told['listen']}", "http": told["http"]}
        return ready_s

    def spawn(self) -> None:
        """Start it and do not wait."""
        (self._folder / "ready.json").unlink(missing_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *self._flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def address(self, path: str) -> str:
        """What a client of this path (``memory``, ``unix``, ``tcp``) connects to; ``http`` where that is on."""
        return self._addresses[path]

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def heap_bytes(self) -> int:
        """Resident memory of its own: without mapped files and without memory of clients. 0 once it has ended."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(lines.get("RssAnon", "0").split()[0]) * 1024

    def terminate(self) -> None:
        """SIGTERM, and do not wait."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGTERM; SIGKILL when that takes too long."""
        if self._process is None:
            return
        self.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
