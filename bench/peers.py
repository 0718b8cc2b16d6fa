"""Other systems in the same run: those that are installed, each in a process of its own; the others are named."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.daemon_process import BenchError
from bench.peers_child import PEERS
from bench.store_client import Burst, rate_gbps
from bench.store_grid import MIB, size_text
from bench.store_rows import measured
from bench.store_run import MEMCPY, OPS, StoreBench

OBJECT_BYTES = (MIB, 8 * MIB)
BATCH = 32
# How each moves bytes, where it is not TCP; memcpy is the limit of these.
PATHS = {"lmcache-fs": "in_process", "sglang-file": "in_process", "lmcache-server": "memory"}
SLOW_TO_START = ("lmcache-server", "lmcache-tcp-server")
NOT_DRIVEN = {
    "valkey": "speaks Redis's protocol; the rows of redis-server stand for it",
    "lmcache-server, driven by the server": "wants the engine's tensors by handle; only its other mode is driven",
    "lmcache fs adapter in Python": "its native client does the same in C++ and is measured",
    "vllm fs tier": "this benchmark has no client for it",
}
REPOSITORY = Path(__file__).resolve().parents[1]


class PeerProcess:
    """One system with one size of objects. Raises BenchError when it cannot be had or does something wrong."""

    def __init__(self, name: str, folder: Path, *, python: str, object_bytes: int) -> None:
        folder.mkdir()
        self._log = folder / "log"
        command = [python, "-m", "bench.peers_child", name, str(folder), str(object_bytes), str(BATCH)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            self._answer()
        except BenchError:
            self.close()
            raise

    def burst(self, op: str) -> Burst:
        """One round of puts or gets."""
        assert self._process.stdin is not None
        print(op, file=self._process.stdin, flush=True)
        answer = self._answer()
        return Burst(answer["moved_bytes"], answer["elapsed_s"], tuple(answer["call_s"]))

    def close(self) -> None:
        """Let it stop what it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:  # Any: a JSON object
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"it died: {self._log.read_text(errors='replace')[-300:].strip()}")
        answer: dict[str, Any] = json.loads(line)  # Any: as above
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer


def run_peers(bench: StoreBench, *, python: str, show: Callable[[str], None]) -> None:
    """Add a row for each peer, size and op; what cannot run is named with its reason in ``bench.results.skipped``."""
    bench.results.skipped += [f"peer {name}: {reason}" for name, reason in NOT_DRIVEN.items()]
    bench.extend(bench.plan.peers_budget_s)
    missing: set[str] = set()
    for object_bytes, name in itertools.product(OBJECT_BYTES, PEERS):
        if name in missing:
            continue
        if name in SLOW_TO_START and not bench.plan.has_time_for_slow_peers:
            bench.results.skipped.append(f"peer {name}: takes longer to start than --quick has")
            missing.add(name)
            continue
        show(f"peer {name}")
        if bench.is_late:
            bench.results.skipped.append(f"peer {name}, {size_text(object_bytes)}: no time left")
            continue
        try:
            _measure(bench, name, python=python, object_bytes=object_bytes)
        except (BenchError, OSError) as error:
            bench.results.skipped.append(f"peer {name}: {error}")
            missing.add(name)


def _measure(bench: StoreBench, name: str, *, python: str, object_bytes: int) -> None:
    peer = PeerProcess(name, bench.folder / f"peer-{name}-{object_bytes}", python=python, object_bytes=object_bytes)
    speeds: dict[str, list[float]] = {op: [] for op in OPS}
    limits: dict[str, list[float]] = {op: [] for op in OPS}
    call_s: dict[str, list[float]] = {op: [] for op in OPS}
    path = PATHS.get(name, "tcp")
    limited_by = "tcp" if path == "tcp" else "memory"
    try:
        for _ in range(2):  # twice, so that its space has been used before
            peer.burst("put")
            peer.burst("get")
        for _ in range(bench.plan.repetitions):
            for op in OPS:
                limits[op].append(bench.limit(limited_by, op, clients=1))
                burst = peer.burst(op)
                speeds[op].append(rate_gbps([burst]))
                call_s[op] += burst.call_s
    finally:
        peer.close()
    for op in OPS:
        bench.results.rows.append(
            measured(
                path,
                f"{name}, unchecked",  # none of them verifies what it reads, as it comes
                op,
                object_bytes=object_bytes,
                batch=BATCH,
                clients=1,
                gbps=speeds[op],
                limit="raw_tcp_socket" if path == "tcp" else MEMCPY,
                limit_gbps=limits[op],
                call_s=call_s[op],
            )
        )
