"""bench.churn, shortly: nothing is refused, nothing is wrong, nothing leaks."""

from __future__ import annotations

import os
from pathlib import Path

from bench.churn import churn
from hicache.backends.lmdb_env import SPARE_READERS

OPERATIONS = int(os.environ.get("HICACHE_TEST_CHURN", "1000"))


def test_a_nearly_full_store_churns_without_refusals_leaks_or_growth(tmp_path: Path) -> None:
    rows = list(churn(tmp_path / "store", operations=OPERATIONS, capacity_bytes=128 << 20, seed=5))
    assert sum(row.operations for row in rows) == OPERATIONS // 10 * 10
    assert sum(row.put_bytes for row in rows) > 10 * (128 << 20) * OPERATIONS // 1000, "space was used again"
    assert [(row.refused, row.wrong) for row in rows] == [(0, 0)] * 10
    assert max(row.reader_slots for row in rows) <= SPARE_READERS
    assert rows[-1].map_used_bytes <= 2 * rows[2].map_used_bytes
