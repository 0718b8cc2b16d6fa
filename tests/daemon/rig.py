"""Runs hicached for tests: as a process, as users do, or in a thread of the test, over a store that can fail."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.config import DaemonConfig, load_config
from hicache.daemon.notify import Ready
from hicache.daemon.recovery import OpenedStore
from hicache.daemon.server import Daemon

START_S = 30.0
STOP_S_SLACK = 20.0
TOKEN = "token-of-alice-1234"
ALICE, BOB = "alice-token-0123456789", "bob-token-0123456789ab"


def settings_in(folder: Path, **overrides: object) -> dict[str, object]:
    """Small settings, all in ``folder``."""
    return {
        "socket": str(folder / "s.sock"),
        "path": str(folder / "store"),
        "http": "127.0.0.1:0",
        "capacity_bytes": "64MiB",
        "free_space_floor_bytes": 0,
        "io_threads": 2,
        "ready_file": str(folder / "ready.json"),
    } | overrides


def flags_of(settings: dict[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not None]


def wait_until(condition: Callable[[], bool], *, what: str, within_s: float = START_S) -> None:
    """Returns when ``condition`` holds; fails the test after ``within_s``."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.005)


class DaemonProcess:
    """A hicached process. Its stderr is in ``log``."""

    def __init__(self, folder: Path, *, environment: dict[str, str] | None = None, **overrides: object) -> None:
        self.settings = settings_in(folder, **overrides)
        self._ready_file = Path(str(self.settings["ready_file"]))
        self._log = folder / f"log.{time.monotonic_ns()}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hicache.daemon", *flags_of(self.settings)],
                stdout=log,
                stderr=log,
                env=os.environ | (environment or {}),
            )
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> DaemonProcess:
        wait_until(self._is_ready, what=f"the daemon is ready; its log:\n{self.log}")
        self.ready = json.loads(self._ready_file.read_text())
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}:\n{self.log}"
        try:
            return bool(json.loads(self._ready_file.read_text())["pid"] == self.process.pid)
        except FileNotFoundError:
            return False

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def target(self) -> str:
        return f"unix:{self.settings['socket']}"

    def terminate(self) -> float:
        """SIGTERM, and how long the process took to end."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_S_SLACK)
        return time.monotonic() - started

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait_end(self) -> int:
        return self.process.wait(START_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S_SLACK)
            except subprocess.TimeoutExpired:
                self.kill()


class DaemonThread:
    """A hicached in a thread of this process, over the store that ``opener`` gives."""

    def __init__(
        self,
        folder: Path,
        opener: Callable[[DaemonConfig, StoreLimits], OpenedStore],
        *,
        environment: dict[str, str] | None = None,
        **overrides: object,
    ) -> None:
        self.config = load_config(None, settings_in(folder, **overrides))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-daemon")
        self._thread.start()
        self.daemon = Daemon(self.config, environment=environment or {}, opener=opener, reread=lambda: self.next_config)
        self.next_config = self.config  # what a reload finds
        self.stopped_clean: bool | None = None
        try:
            self.ready: Ready = self._run(self.daemon.start())
        except BaseException:
            self.stop()
            raise

    @property
    def target(self) -> str:
        return f"unix:{self.config.socket}"

    def metric(self, name: str, **labels: str) -> float:
        """The current value of a metric; 0 where it has not moved yet."""
        return self.daemon.metrics.registry.get_sample_value(name, labels) or 0.0

    def call(self, step: Callable[[], None]) -> None:
        """Has the event loop of the daemon take a step."""

        async def take() -> None:
            step()

        self._run(take())

    def begin_drain(self) -> None:
        async def begin() -> None:
            self.daemon.drain.begin(within_s=START_S)

        self._run(begin())

    def reload(self) -> Any:  # Any: hicache.admin.lifecycle.ReloadAnswer
        return self._run(self.daemon.reloader.reload())

    def stop(self) -> None:
        if self.stopped_clean is None:
            self.stopped_clean = self._run(self.daemon.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, steps: Any) -> Any:  # Any: a coroutine of any result
        return asyncio.run_coroutine_threadsafe(steps, self._loop).result(START_S)


def http_get(
    address: str, path: str, *, method: str = "GET", host: str | None = None, timeout_s: float = 10.0
) -> tuple[int, str]:
    """Status and body of one HTTP request to ``host:port``."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def wait_health(address: str, status: int) -> str:
    """What /healthz says once it answers with ``status``; of the storage it tells what that said a moment ago."""
    said = ""

    def is_it() -> bool:
        nonlocal said
        found, said = http_get(address, "/healthz")
        return found == status

    wait_until(is_it, what=f"/healthz says {status}")
    return said


def scrape(address: str) -> dict[str, float]:
    """All samples of /metrics, by name with labels as they are written."""
    status, body = http_get(address, "/metrics")
    assert status == 200
    lines = [line.rsplit(" ", 1) for line in body.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def tenants_file(folder: Path) -> str:
    """A file with the tenant alice, whose token is TOKEN."""
    path = folder / "tenants"
    path.write_text(f"alice {TOKEN}\n")
    return str(path)


def refused_start(daemon: DaemonProcess) -> tuple[int, str]:
    """Exit code and the one line that explains it."""
    code = daemon.wait_end()
    lines = daemon.log.splitlines()
    assert len(lines) == 1, daemon.log
    return code, lines[0]
