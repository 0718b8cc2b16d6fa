"""A short soak, and whether its checks would find what they are for."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.soak import MIB, rss_trend, soak


def test_clients_who_come_leave_and_are_killed_leave_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        result = soak(Path(folder), clients=6, seconds=5.0)
    assert result.failures == []
    assert result.kills > 0
    assert result.strangers > 0
    assert result.compared_bytes > 0
    health = result.health
    assert health["hicached"]["count"] > 0
    assert health["control"]["count"] > 0
    assert health["prober woke late"]["count"] == health["hicached"]["count"] + health["control"]["count"]
    assert health["in hicached"]["ms_max"] >= health["in hicached"]["core_wait_ms"] >= 0
    assert result.latency_ms["get"]["p99"] > 0


def test_memory_that_grows_is_seen_through_noise_and_memory_that_does_not_is_not() -> None:
    flat = [(float(at), 100 * MIB + (at * 7919 % 13) * MIB) for at in range(200)]
    leak = [(when, size + int(when) * MIB // 10) for when, size in flat]
    warm = [(when, size + (0 if when > 40 else int(40 - when) * 4 * MIB)) for when, size in flat]
    assert abs(rss_trend(flat)[1]) < MIB
    assert 11 * MIB < rss_trend(leak)[1] < 15 * MIB
    assert abs(rss_trend(warm)[1]) < MIB
