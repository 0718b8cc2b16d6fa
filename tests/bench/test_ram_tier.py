"""bench.ram_tier on a small hot set."""

from __future__ import annotations

from functools import partial

import pytest

from bench import ram_tier
from bench.limits import MemoryCopy
from hicache.backends.open import open_backend
from hicache.backends.ram_tier import RamTier
from hicache.errors import BackendError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(ram_tier, "HOT_BYTES", 8 * MIB)
    monkeypatch.setattr(ram_tier, "MemoryCopy", partial(MemoryCopy, working_set_bytes=8 * MIB))


def test_every_way_is_a_row_beside_memcpy_and_the_tier_serves_what_is_hot(tmp_path):
    tier = RamTier(open_backend(f"file://{tmp_path}/store", capacity_bytes=64 * MIB), capacity_bytes=64 * MIB)
    rows, asked = ram_tier.measure({"file + RAM": tier}, repetitions=2, burst_bytes=8 * MIB)
    names = [row["way"] for row in rows]
    assert names[: len(names) // 2] == names[len(names) // 2 :]
    assert {"memcpy", "file + RAM", "mapped -> L1, again"} < set(names)
    assert all(row["least"] <= row["gbps"] <= row["most"] and row["gbps"] > 0 for row in rows)
    assert asked == [], "there is no Mooncake to ask"
    stats = tier.ram_stats()
    assert stats.hits > stats.misses > 0
    tier.close()


def test_an_object_that_is_not_there_stops_the_run(tmp_path):
    backend = open_backend(f"file://{tmp_path}/store", capacity_bytes=64 * MIB)
    with pytest.raises(BackendError, match="not read"):
        ram_tier.Readers(MIB, threads=1).read(backend, 0, MIB)
    backend.close()
