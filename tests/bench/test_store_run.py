"""bench.store on a real hicached, with one small cell."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from bench.daemon_process import BenchError
from bench.store import backends_here
from bench.store_client import Setup, StoreClient
from bench.store_grid import UNCHECKED, Cell, Plan
from bench.store_run import StoreBench

MIB = 1 << 20
PLAN = Plan(
    (Cell("memory", "file", MIB, 4, 1), Cell("tcp", "file", MIB, 4, 1), Cell(UNCHECKED, "file", MIB, 4, 1)),
    repetitions=2,
    burst_s=0.02,
    limit_bytes=8 * MIB,
    budget_s=60.0,
    peers_budget_s=1.0,
)


def run(plan: Plan, folder) -> StoreBench:
    bench = StoreBench(plan, folder, show=lambda _: None)
    try:
        bench.run()
    finally:
        bench.close()
    return bench


def test_every_cell_gives_a_put_and_a_get_beside_the_limit_of_its_path(tmp_path):
    results = run(PLAN, tmp_path).results
    assert results.skipped == []
    shown = [(one.row.path, one.row.backend, one.row.op, one.row.limit) for one in results.rows]
    assert shown == [
        ("limit", "pread", "get", "memcpy"),
        ("limit", "pwrite", "put", "memcpy"),
        ("memory", "file", "put", "memcpy"),
        ("memory", "file", "get", "memcpy"),
        ("tcp", "file", "put", "raw_tcp_socket"),
        ("tcp", "file", "get", "raw_tcp_socket"),
        (UNCHECKED, "file", "put", "memcpy"),
        (UNCHECKED, "file", "get", "memcpy"),
    ]
    for one in results.rows:
        assert one.row.gbps > 0
        assert 0 < one.row.p50_ms <= one.row.p99_ms
        assert len(one.spread.gbps) == len(one.spread.limit_gbps) == PLAN.repetitions
    assert [first["path"] for first in results.first_pass] == ["memory", UNCHECKED]


def test_what_there_is_no_time_for_is_named(tmp_path):
    results = run(replace(PLAN, budget_s=0.0), tmp_path).results
    assert [line.partition(":")[0] for line in results.skipped] == [str(cell) for cell in PLAN.cells]
    assert {one.row.path for one in results.rows} == {"limit"}


def test_a_client_whose_daemon_is_not_there_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.store_client.CONNECT_TIMEOUT_S", 0.05)
    client = StoreClient(0, tmp_path)
    with pytest.raises(BenchError, match="no session"):
        client.connect(Setup(f"unix://{tmp_path}/none.sock", True, MIB, 64))
    client.disconnect()


def test_a_backend_that_is_missing_is_named():
    backends, skipped = backends_here()
    assert {"lmdb", "file"} <= set(backends)
    assert "mooncake" in backends or any(line.startswith("mooncake: pip install") for line in skipped)


def checksum_in_a_process(*, first: str) -> str:
    code = f"{first}\nfrom hicache.backends import file_objects, lmdb_slab\n"
    code += "print(*[module.payload_hasher(b'key').intdigest() for module in (file_objects, lmdb_slab)])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_only_the_unchecked_daemon_verifies_nothing():
    unchecked = "from bench.unchecked_daemon import remove_checksums; remove_checksums()"
    assert checksum_in_a_process(first=unchecked) == "0 0"
    assert "0" not in checksum_in_a_process(first="import bench.unchecked_daemon").split()
