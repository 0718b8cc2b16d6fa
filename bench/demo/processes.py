"""The processes of the demo: hicached and the engines, started, killed and stopped for real."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.demo.signals import deaf_children
from bench.demo.worker import Tenant, WorkerSettings, run_worker
from hicache.errors import HiCacheError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 120.0
LOG_TAIL_CHARS = 2000


class DemoError(HiCacheError):
    """A process of the demo did not do what it should."""


@dataclass(eq=False)
class Daemon:
    """hicached on the LMDB default in ``folder``, for the given tenants."""

    folder: Path
    tenants: tuple[Tenant, ...]
    capacity_bytes: int
    listen: str = ""  # TCP address besides the Unix socket
    _process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """What engines connect to."""
        return f"unix://{self.folder / 'hicached.sock'}"

    @property
    def data_folder(self) -> Path:
        """Where the objects are."""
        return self.folder / "objects"

    def start(self) -> dict[str, Any]:  # Any: the ready file is JSON
        """Start it and wait until it is ready; returns what its ready file says. Raises DemoError."""
        tenants_file = self.folder / "tenants"
        tenants_file.write_text("".join(f"{tenant.name} {tenant.token}\n" for tenant in self.tenants))
        tenants_file.chmod(0o600)
        ready_file = self.folder / "ready.json"
        ready_file.unlink(missing_ok=True)
        settings = {
            "socket": self.folder / "hicached.sock",
            "path": self.data_folder,
            "capacity_bytes": self.capacity_bytes,
            "free_space_floor_bytes": 0,
            "tenants_file": tenants_file,
            "http": "127.0.0.1:0",
            "listen": self.listen,
            "ready_file": ready_file,
            "log_level": "warning",
        }
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        with open(self.folder / "hicached.log", "ab") as log:
            self._process = subprocess.Popen([sys.executable, "-m", "hicache.daemon", *flags], stderr=log)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            if self._process.poll() is not None or time.monotonic() >= deadline_s:
                self.kill()
                raise DemoError(f"hicached did not become ready: {self.log_tail()}")
            time.sleep(0.02)
        ready: dict[str, Any] = json.loads(ready_file.read_text())  # Any: see above
        return ready

    def log_tail(self) -> str:
        """The end of its log."""
        return (self.folder / "hicached.log").read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it is doing."""
        self._end(signal.SIGKILL)

    def suspend(self) -> None:
        """SIGSTOP: alive, and silent."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> int | None:
        """SIGTERM; returns the exit code, None when it was not running."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(number)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class Engine:
    """An engine process and the pipe to it. Answers come in the order of the commands."""

    def __init__(self, number: int, settings: WorkerSettings) -> None:
        self.number = number
        self._settings = settings
        self._process: Any = None  # Any: a spawned process; its class depends on the start method
        self._connection: Connection | None = None
        self._stores: Connection | None = None

    @property
    def stores(self) -> Connection:
        """The pipe that tells of stores. Raises DemoError when the engine is not running."""
        if self._stores is None:
            raise DemoError(f"engine {self.number} is not running")
        return self._stores

    @property
    def connection(self) -> Connection:
        """The pipe, to wait on. Raises DemoError when the engine is not running."""
        if self._connection is None:
            raise DemoError(f"engine {self.number} is not running")
        return self._connection

    def launch(self) -> None:
        """Start the process; ``await_ready`` follows."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._stores, told = context.Pipe(duplex=False)
        self._process = context.Process(
            target=run_worker, args=(theirs, told, self._settings), name=f"engine-{self.number}", daemon=True
        )
        with deaf_children():
            self._process.start()
        theirs.close()
        told.close()

    def await_ready(self) -> None:
        """Wait until it serves. Raises DemoError."""
        assert self.receive() == "ready"

    def send(self, command: object) -> None:
        """Ask for something; ``receive`` gets the answer."""
        self.connection.send(command)

    def receive(self) -> Any:  # Any: each command names its own answer type
        """The next answer. Raises DemoError when the process has ended or does not answer."""
        try:
            if self.connection.poll(ANSWER_TIMEOUT_S):
                return self.connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(STOP_TIMEOUT_S)
            raise DemoError(f"engine {self.number} has died (exit code {self._process.exitcode})") from error
        raise DemoError(f"engine {self.number} did not answer within {ANSWER_TIMEOUT_S:.0f} s")

    def ask(self, command: object) -> Any:  # Any: see receive
        """``send`` and ``receive``."""
        self.send(command)
        return self.receive()

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            if self._process.pid is not None:  # else it was never started
                self._process.kill()
                self._process.join()
            self._forget()

    def stop(self) -> None:
        """Let it end by itself, then make sure."""
        if self._process is not None:
            self.connection.close()
            self._process.join(STOP_TIMEOUT_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._forget()

    def _forget(self) -> None:
        self.connection.close()
        self.stores.close()
        self._process = self._connection = self._stores = None


def log_tails(folder: Path) -> str:
    """The end of each log in ``folder``, under its name."""
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-LOG_TAIL_CHARS:].strip()}" for log in logs)
