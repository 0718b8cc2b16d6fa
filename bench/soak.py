"""`python -m bench.soak`: many clients who come, leave and are killed, for minutes; and what of them is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.daemon_process import BenchError, DaemonProcess
from bench.machine import machine_facts, write_json
from bench.soak_client import WAYS, SoakReport, SoakRole, run_client
from bench.soak_probes import HEALTH_BOUND_S, HEALTH_TIMEOUT_S, Probes, http_get

MIB = 1 << 20
TENANTS = {f"tenant-{number}": f"token-of-tenant-{number}-0123456789" for number in range(4)}
LIMITS = ("weight=2", "quota_objects=400", "ttl_s=20", "")  # of the tenants, in order
CALLS_PER_S = 400.0  # of all clients together: a daemon in Python has cores to spare then, and clients have, too
KILL_EVERY_S, STRANGER_EVERY_S, STRANGERS_MAX = 0.7, 0.2, 24
NICE = -10  # of hicached, as in systemd/hicached.service
SETTLE_S = 40.0  # longer than a keepalive and its answer
WARM_SHARE = 0.35  # of the run: caches, staging buffers and the heap of every thread fill
GROWTH_SHARE_MAX, GROWTH_BYTES_MAX = 0.05, 6 * MIB  # of the resident memory, over the rest of the run
HELD = (
    "hicache_sessions",
    "hicache_regions",
    "hicache_store_leases",
    "hicache_inflight_bytes",
    "hicache_inflight_waiting",
)


@dataclass(slots=True)
class SoakResult:
    """What a run showed. ``failures`` are what must not be."""

    clients: int
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    latency_ms: dict[str, dict[str, float]] = field(default_factory=dict)  # by operation: p50, p99, max
    compared_bytes: int = 0
    sessions: int = 0
    aborts: int = 0
    kills: int = 0
    strangers: int = 0
    health: dict[str, dict[str, float]] = field(default_factory=dict)  # answers and delays; see _delays
    rss_mib: float = 0.0  # anonymous memory, median after the warm-up
    rss_growth_mib: float = 0.0  # slope times the time after the warm-up
    nice: int = 0  # of hicached: 0 where this process may not make it NICE
    descriptors_before: int = 0
    descriptors_after: int = 0
    left: dict[str, float] = field(default_factory=dict)  # of what clients held, when all had gone


class Crowd:
    """All clients. Those that are killed are replaced; their last half second goes untold."""

    def __init__(self, daemon: DaemonProcess, *, count: int, seed: int) -> None:
        self._context: Any = multiprocessing.get_context("forkserver")  # Any: typeshed hides its Process
        self._daemon = daemon
        self._random = Random(seed)
        self._pause_s = count / CALLS_PER_S
        self._clients: list[tuple[Any, Connection, SoakRole]] = [self._start(number, 0) for number in range(count)]
        self.reports = SoakReport()
        self.kills = 0

    def _start(self, number: int, life: int) -> tuple[Any, Connection, SoakRole]:
        token = list(TENANTS.values())[number % len(TENANTS)]
        way = WAYS[number // len(TENANTS) % len(WAYS)]
        address = self._daemon.address("tcp" if way == "stream" and number % 2 else "unix")
        role = SoakRole(number, life, address, token, way, self._pause_s)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=run_client, args=(role, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours, role

    def kill_one(self) -> None:
        """SIGKILL, and another one in its place."""
        place = self._random.randrange(len(self._clients))
        process, pipe, role = self._clients[place]
        self._listen(pipe)
        process.kill()
        process.join()
        pipe.close()
        self._clients[place] = self._start(role.number, role.life + 1)
        self.kills += 1

    def listen(self) -> None:
        """Takes what clients have told."""
        for process, pipe, role in self._clients:
            self._listen(pipe)
            if not process.is_alive():
                self.reports.wrong.append(f"client {role.number} ended by itself with {process.exitcode}")

    def _listen(self, pipe: Connection) -> None:
        try:
            while pipe.poll():
                self._add(pipe.recv())
        except (EOFError, OSError):
            pass  # it has ended; its process says why

    def _add(self, report: SoakReport) -> None:
        total = self.reports
        total.outcomes += report.outcomes
        for name, seconds in report.seconds.items():
            total.seconds.setdefault(name, []).extend(seconds)
        total.wrong += report.wrong
        total.compared_bytes += report.compared_bytes
        total.sessions += report.sessions
        total.aborts += report.aborts

    def end(self) -> None:
        """Half of them leave as they should, the others are killed."""
        for number, (process, pipe, _) in enumerate(self._clients):
            if number % 2:
                process.kill()
            else:
                pipe.send("stop")
        for process, pipe, role in self._clients:
            process.join(SETTLE_S)
            if process.is_alive():
                self.reports.wrong.append(f"client {role.number} did not end")
                process.kill()
                process.join()
            self._listen(pipe)
            pipe.close()


class Strangers:
    """Connections that say half of a hello, or nothing, and are forgotten."""

    def __init__(self, daemon: DaemonProcess) -> None:
        path = daemon.address("unix").removeprefix("unix://")
        host, port = daemon.address("tcp").removeprefix("tcp://").rsplit(":", 1)
        self._targets: tuple[Any, ...] = (path, f"{path}.memory", f"{path}.bulk", (host, int(port)))  # Any: addresses
        self._open: deque[socket.socket] = deque()
        self.count = 0

    def come(self) -> None:
        """One more; the oldest is closed when there are too many."""
        target = self._targets[self.count % len(self._targets)]
        self.count += 1
        stranger = socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET)
        stranger.settimeout(HEALTH_TIMEOUT_S)
        try:
            stranger.connect(target)
            stranger.sendall(b"PRI * HTTP/2.0"[: self.count % 8])
        except OSError:
            stranger.close()
            return
        self._open.append(stranger)
        if len(self._open) > STRANGERS_MAX:
            self._open.popleft().close()

    def leave(self) -> None:
        """All of them."""
        while self._open:
            self._open.popleft().close()


def soak(folder: Path, *, clients: int, seconds: float, backend: str = "lmdb", seed: int = 1) -> SoakResult:
    """One run in ``folder``. Raises BenchError when the daemon does not start."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["bench.soak_client", "bench.soak_probes"])
    result = SoakResult(clients)
    settings = {"http": "127.0.0.1:0", "sessions-max": str(3 * clients), "tenant-sessions-max": str(3 * clients)}
    settings |= {
        "session-keepalive-s": "5",
        "object-bytes-max": "1MiB",
        "inflight-bytes-max": "64MiB",
        "io-threads": "2",
    }
    daemon = DaemonProcess(folder, backend=backend, capacity_bytes=64 * MIB, settings=settings, nice=NICE)
    lines = [f"{name} {token} {limit}\n" for (name, token), limit in zip(TENANTS.items(), LIMITS, strict=True)]
    (folder / "tenants").write_text("".join(lines))
    with ExitStack() as stack:
        stack.callback(daemon.stop)
        daemon.start()
        http_get(daemon.address("http"), "/metrics")
        result.nice = os.getpriority(os.PRIO_PROCESS, daemon.pid)
        result.descriptors_before = _descriptors(daemon.pid)
        probes, strangers = Probes(daemon), Strangers(daemon)
        crowd = Crowd(daemon, count=clients, seed=seed)
        stack.callback(probes.end)
        probes.start()
        start_s = time.monotonic()
        _drive(crowd, strangers, until_s=start_s + seconds)
        result.seconds = time.monotonic() - start_s
        probes.end()
        result.health = _health(probes, json.loads(http_get(daemon.address("http"), "/v1/status")[1])["loop_delay"])
        crowd.end()
        strangers.leave()
        _settle(daemon, result)
        _judge(result, crowd, probes, strangers)
    return result


def _drive(crowd: Crowd, strangers: Strangers, *, until_s: float) -> None:
    kill_at_s = stranger_at_s = time.monotonic()
    give_up_s = until_s + SETTLE_S  # where clients take long to start
    while (now_s := time.monotonic()) < until_s or (not crowd.reports.compared_bytes and now_s < give_up_s):
        if now_s >= kill_at_s:
            kill_at_s = now_s + KILL_EVERY_S
            crowd.kill_one()
        if now_s >= stranger_at_s:
            stranger_at_s = now_s + STRANGER_EVERY_S
            strangers.come()
        crowd.listen()
        time.sleep(0.05)


def _settle(daemon: DaemonProcess, result: SoakResult) -> None:
    """Waits until nothing is held, and notes what is when that takes too long."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        text = http_get(daemon.address("http"), "/metrics")[1]
        values = {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in text.splitlines())
            if name in HELD
        }
        result.left = {name: value for name, value in values.items() if value}
        result.descriptors_after = _descriptors(daemon.pid)
        is_settled = not result.left and result.descriptors_after <= result.descriptors_before
        if len(values) != len(HELD):
            raise BenchError(f"/metrics has not all of {', '.join(HELD)}")
        if is_settled or time.monotonic() > deadline_s:
            return
        time.sleep(0.1)


def _judge(result: SoakResult, crowd: Crowd, probes: Probes, strangers: Strangers) -> None:
    reports = crowd.reports
    result.outcomes, result.compared_bytes = dict(sorted(reports.outcomes.items())), reports.compared_bytes
    result.sessions, result.aborts, result.kills = reports.sessions, reports.aborts, crowd.kills
    result.strangers = strangers.count
    for name, seconds in sorted(reports.seconds.items()):
        p50, p99 = np.percentile(seconds, (50, 99)) * 1000
        result.latency_ms[name] = {"calls": len(seconds), "p50": p50, "p99": p99, "max": max(seconds) * 1000}
    result.rss_mib, result.rss_growth_mib = (value / MIB for value in rss_trend(probes.rss))
    unhealthy = [] if probes.control.unhealthy else probes.daemon.unhealthy  # both: the machine stood still
    growth_max_mib = max(GROWTH_BYTES_MAX / MIB, GROWTH_SHARE_MAX * result.rss_mib)
    checks: tuple[tuple[bool, str], ...] = (
        (not reports.wrong, "; ".join(reports.wrong[:5])),
        (not unhealthy, "; ".join(unhealthy[:5])),
        (result.compared_bytes > 0, "no byte was compared"),
        (not result.left, f"left when all clients had gone: {result.left}"),
        (
            result.descriptors_after <= result.descriptors_before,
            f"{result.descriptors_after} descriptors, {result.descriptors_before} before the clients came",
        ),
        (
            result.rss_growth_mib <= growth_max_mib,
            f"memory grew by {result.rss_growth_mib:.1f} MiB after the warm-up; at most {growth_max_mib:.1f}",
        ),
    )
    result.failures = [text for holds, text in checks if not holds]


def _health(probes: Probes, loop_delay: dict[str, float]) -> dict[str, dict[str, float]]:
    """What the prober saw of hicached, and of a server beside it that does nothing else; how late the prober itself
    was; and how late the event loop of hicached says that it was at most, and for how much of that it had no core.
    """
    longest_ms, core_wait_ms = loop_delay["longest_s"] * 1000, loop_delay["core_wait_s"] * 1000
    return {
        "hicached": _delays(probes.daemon.answers_s),
        "control": _delays(probes.control.answers_s),
        "prober woke late": _delays(probes.daemon.late_s + probes.control.late_s),
        "in hicached": {"ms_max": longest_ms, "core_wait_ms": core_wait_ms},
    }


def _delays(seconds: list[float]) -> dict[str, float]:
    times_ms = np.array(seconds) * 1000
    p50, p99 = (float(value) for value in np.percentile(times_ms, (50, 99)))
    is_over = times_ms > HEALTH_BOUND_S * 1000
    return {
        "count": len(seconds),
        "ms_p50": p50,
        "ms_p99": p99,
        "ms_max": float(times_ms.max()),
        "over": int(is_over.sum()),
    }


def rss_trend(samples: list[tuple[float, int]]) -> tuple[float, float]:
    """Median, and growth over the time after the warm-up by the median of all slopes, which no single sample moves."""
    kept = samples[int(len(samples) * WARM_SHARE) :]
    if len(kept) < 2:
        return 0.0, 0.0
    kept = kept[:: max(1, len(kept) // 300)]
    times, sizes = np.array([when for when, _ in kept]), np.array([float(size) for _, size in kept])
    first, second = np.triu_indices(len(kept), 1)
    slopes = (sizes[second] - sizes[first]) / (times[second] - times[first])
    return float(np.median(sizes)), float(np.median(slopes)) * float(times[-1] - times[0])


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _show(result: SoakResult, console: Console) -> None:
    calls = Table("operation", "calls", "p50 ms", "p99 ms", "max ms")
    for name, row in result.latency_ms.items():
        calls.add_row(name, f"{row['calls']:.0f}", *(f"{row[column]:.1f}" for column in ("p50", "p99", "max")))
    console.print(calls)
    bound = f"over {HEALTH_BOUND_S * 1000:.0f} ms"
    delays = Table("health and delays", "count", "p50 ms", "p99 ms", "max ms", bound, "without a core ms")
    for name, row in result.health.items():
        cells = (row.get(key) for key in ("count", "ms_p50", "ms_p99", "ms_max", "over", "core_wait_ms"))
        delays.add_row(name, *("" if cell is None else f"{cell:.1f}".removesuffix(".0") for cell in cells))
    console.print(delays)
    facts: dict[str, Callable[[], str]] = {
        "clients, seconds, nice of hicached": lambda: f"{result.clients}, {result.seconds:.0f}, {result.nice}",
        "sessions, aborts, kills, strangers": lambda: (
            f"{result.sessions}, {result.aborts}, {result.kills}, {result.strangers}"
        ),
        "bytes compared": lambda: f"{result.compared_bytes / MIB:.0f} MiB",
        "memory, growth": lambda: f"{result.rss_mib:.1f} MiB, {result.rss_growth_mib:+.2f} MiB",
        "descriptors before, after": lambda: f"{result.descriptors_before}, {result.descriptors_after}",
        "held at the end": lambda: str(result.left or "nothing"),
    }
    table = Table("", "")
    for name, show in facts.items():
        table.add_row(name, show())
    console.print(table)
    for failure in result.failures:
        console.print(f"FAILED: {failure}")


@click.command()
@click.option("--clients", default=64, show_default=True, type=click.IntRange(2, 512))
@click.option("--seconds", default=600.0, show_default=True, type=click.FloatRange(1.0))
@click.option("--ci", "is_ci", is_flag=True, help="two minutes")
@click.option("--quick", is_flag=True, help="ends within 45 s")
@click.option("--backend", default="lmdb", show_default=True, type=click.Choice(["lmdb", "file"]))
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "json_path", metavar="FILE", help="write the result as JSON; - for stdout")
def main(
    *, clients: int, seconds: float, is_ci: bool, quick: bool, backend: str, seed: int, json_path: str | None
) -> None:
    """64 clients of four tenants for ten minutes, who leave in the middle of things, are killed and come back.

    Exits with 1 when a byte was wrong, anything is left of a client, memory grew, or /healthz was not answered.
    """
    load_before = os.getloadavg()[0]
    seconds = 20.0 if quick else 120.0 if is_ci else seconds
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        result = soak(Path(folder), clients=clients, seconds=seconds, backend=backend, seed=seed)
    _show(result, Console(stderr=json_path == "-"))
    write_json({"machine": machine_facts(load_before), "soak": asdict(result)}, json_path)
    if result.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
