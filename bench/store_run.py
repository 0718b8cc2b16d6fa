"""Runs the cells of bench.store: daemons, clients, and each limit right before what it limits."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from bench.daemon_process import DAEMON_MODULE, BenchError, DaemonProcess
from bench.limits import (
    FileCalls,
    MemoryCopy,
    daemon_copy_threads,
    raw_socket_addresses,
    serve_raw_sockets,
)
from bench.mooncake_servers import MooncakeServers
from bench.store_client import Burst, Clients, Setup, rate_gbps
from bench.store_grid import MOONCAKE, MOONCAKE_RAM, UNCHECKED, Cell, Plan
from bench.store_rows import Measured, measured
from hicache.daemon.config import DaemonConfig

MEMCPY = "memcpy"
CAPACITY_BYTES_MIN = 512 << 20
IO_THREADS = DaemonConfig().io_threads
OPS = ("put", "get")
MOONCAKE_ROOM = 2  # a store evicts behind the puts: without room beyond what is filled they would meet NO_SPACE


@dataclass(slots=True)
class Results:
    """What came out so far."""

    rows: list[Measured] = field(default_factory=list)
    first_pass: list[dict[str, object]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class StoreBench:
    """Everything that a run needs, in ``folder``: on the file system whose speed is measured. Close it."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        show: Callable[[str], None],
        mooncake: tuple[str | None, str | None] = (None, None),
    ) -> None:
        """``mooncake``: addresses of a master and of its HTTP; without them a store is started where one is needed."""
        self.plan = plan
        self._mooncake = mooncake
        self.results = Results()
        self.folder = folder
        self._show = show
        self._end_s = time.monotonic() + plan.budget_s
        self._stack = ExitStack()
        context = multiprocessing.get_context("spawn")
        raw_server = context.Process(target=serve_raw_sockets, args=(folder,), daemon=True)
        raw_server.start()
        self._stack.callback(raw_server.kill)
        self._clients = Clients(plan.clients_max, folder)
        self._stack.callback(self._clients.close)
        self.copies = MemoryCopy(threads=daemon_copy_threads(IO_THREADS))
        while not Path(raw_socket_addresses(folder)["tcp"]).exists():
            time.sleep(0.005)

    def close(self) -> None:
        """End every process."""
        self._stack.close()

    def extend(self, seconds: float) -> None:
        """The budget ends so long from now."""
        self._end_s = time.monotonic() + seconds

    @property
    def is_late(self) -> bool:
        """Whether the plan's budget is used up."""
        return time.monotonic() >= self._end_s

    def run(self) -> None:
        """Measure every cell while there is time; what is left out is named in ``results.skipped``."""
        self.measure_file_calls()
        for (backend, is_unchecked), cells in groupby(
            self.plan.cells, lambda cell: (cell.backend, cell.path == UNCHECKED)
        ):
            self._run_daemon(backend, list(cells), is_unchecked=is_unchecked)

    def measure_file_calls(self) -> None:
        """Rows of their own for plain pread and pwrite, beside memcpy."""
        calls = FileCalls(self.folder, threads=self.copies.threads)
        self._stack.callback(calls.close)
        for op, name in (("get", "pread"), ("put", "pwrite")):
            most, speeds = [], []
            for _ in range(self.plan.repetitions):
                most.append(self.copies.measure(self.plan.limit_bytes))
                speeds.append(calls.measure(op, self.plan.limit_bytes))
            self.results.rows.append(
                measured(
                    "limit",
                    name,
                    op,
                    object_bytes=1 << 20,
                    batch=1,
                    clients=calls.threads,
                    gbps=speeds,
                    limit=MEMCPY,
                    limit_gbps=most,
                    call_s=[(1 << 20) * calls.threads / speed / 1e9 for speed in speeds],
                )
            )
        calls.close()

    def _run_daemon(self, backend: str, cells: Sequence[Cell], *, is_unchecked: bool) -> None:
        if self.is_late:
            self.results.skipped += [f"{cell}: no time left" for cell in cells]
            return
        name = f"{backend}{'-unchecked' if is_unchecked else ''}"
        capacity_bytes = capacity_for(cells)
        self._show(f"{name}: starting hicached")
        with ExitStack() as stack:
            try:
                settings = self._settings_of(backend, name, capacity_bytes, stack)
            except (OSError, TimeoutError) as error:
                self.results.skipped += [f"{cell}: {error}" for cell in cells]
                return
            daemon = DaemonProcess(
                self.folder / name,
                backend="mooncake" if backend in MOONCAKE else backend,
                capacity_bytes=capacity_bytes,
                module="bench.unchecked_daemon" if is_unchecked else DAEMON_MODULE,
                settings=settings,
            )
            daemon.start()
            stack.callback(daemon.stop)
            stack.callback(self._clients.call, self.plan.clients_max, "disconnect")
            for _, of_size in groupby(cells, lambda cell: cell.object_bytes):
                self._run_size(daemon, list(of_size), capacity_bytes=capacity_bytes)

    def _settings_of(self, backend: str, name: str, capacity_bytes: int, stack: ExitStack) -> dict[str, str]:
        """Flags for the daemon. Starts a Mooncake store where one is needed and none was named."""
        settings = {"io-threads": str(IO_THREADS)}
        if backend not in MOONCAKE:
            return settings
        master, metrics = self._mooncake
        if master is None:
            folder = self.folder / f"{name}-servers"
            folder.mkdir()
            servers = MooncakeServers(folder, segment_bytes=capacity_bytes * MOONCAKE_ROOM)
            stack.callback(servers.close)
            master, metrics = servers.address, servers.metrics
        settings |= {"mooncake-master": master, "mooncake-metrics": metrics or ""}
        return settings if backend == MOONCAKE_RAM else settings | {"mooncake-ram-bytes": "0"}

    def _run_size(self, daemon: DaemonProcess, cells: Sequence[Cell], *, capacity_bytes: int) -> None:
        """Fill the store with objects of this size once over, so that every put of the cells recycles space."""
        is_filled = False
        for cell in cells:
            if self.is_late:
                self.results.skipped.append(f"{cell}: no time left")
                continue
            self._show(str(cell))
            try:
                if not is_filled:
                    self._fill(daemon, cell, capacity_bytes)
                    is_filled = True
                self._run_cell(daemon, cell)
            except BenchError as error:
                self.results.skipped.append(f"{cell}: {error}")

    def _fill(self, daemon: DaemonProcess, cell: Cell, capacity_bytes: int) -> None:
        setup = Setup(daemon.address("memory"), True, cell.object_bytes, 32)
        self._clients.call(1, "connect", setup)
        memcpy_gbps = self.copies.measure(self.plan.limit_bytes)
        [filled] = self._clients.call(1, "fill", capacity_bytes)
        self.results.first_pass.append(
            {
                "path": cell.path,
                "backend": cell.backend,
                "object_bytes": cell.object_bytes,
                "gbps": round(rate_gbps([filled]), 3),
                "memcpy_gbps": round(memcpy_gbps, 3),
            }
        )

    def _run_cell(self, daemon: DaemonProcess, cell: Cell) -> None:
        path = "memory" if cell.path == UNCHECKED else cell.path
        setup = Setup(daemon.address(path), path == "memory", cell.object_bytes, cell.batch)
        self._clients.call(cell.clients, "connect", setup)
        self._clients.call(cell.clients, "verify")
        speeds: dict[str, list[float]] = {op: [] for op in OPS}
        limits: dict[str, list[float]] = {op: [] for op in OPS}
        call_s: dict[str, list[float]] = {op: [] for op in OPS}
        for op in self._repetitions():
            if op == "get":
                self._clients.call(cell.clients, "ensure")
                if cell.backend == MOONCAKE_RAM:  # it keeps what is read again
                    self._clients.call(cell.clients, "warm")
            limits[op].append(self.limit(path, op, clients=cell.clients))
            bursts: list[Burst] = self._clients.call(cell.clients, op, self.plan.burst_s)
            speeds[op].append(rate_gbps(bursts))
            call_s[op] += [seconds for burst in bursts for seconds in burst.call_s]
        limit = MEMCPY if path == "memory" else f"raw_{path}_socket"
        for op in OPS:
            self.results.rows.append(
                measured(
                    cell.path,
                    cell.backend,
                    op,
                    object_bytes=cell.object_bytes,
                    batch=cell.batch,
                    clients=cell.clients,
                    gbps=speeds[op],
                    limit=limit,
                    limit_gbps=limits[op],
                    call_s=call_s[op],
                )
            )

    def _repetitions(self) -> Iterator[str]:
        for _ in range(self.plan.repetitions):
            yield from OPS

    def limit(self, path: str, op: str, *, clients: int) -> float:
        """GB/s of what this path cannot exceed, measured now: memcpy, or raw sockets with as many connections."""
        if path == "memory":
            return self.copies.measure(self.plan.limit_bytes)
        return rate_gbps(self._clients.call(clients, "raw", path, op, self.plan.limit_bytes // clients))


def capacity_for(cells: Sequence[Cell]) -> int:
    """Room for what all clients of the largest cell take turns with, and for as much again to recycle."""
    largest = max(
        cell.clients * cell.object_bytes * Setup("", True, cell.object_bytes, cell.batch).object_count for cell in cells
    )
    return max(CAPACITY_BYTES_MIN, largest * 2)
