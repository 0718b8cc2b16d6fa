"""Two hicached over one real Mooncake store: what an engine of one node stores, one of the other node finds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hicache.outcome import Outcome
from tests.backends.mooncake_cluster import MIB, MooncakeCluster, eventually, require_wheel
from tests.daemon.client import Client
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import DaemonProcess, http_get, scrape

require_wheel()

PAGE = 256 * 1024
COUNT = 16
KEYS = [object_key(number) for number in range(COUNT)]
OFFSETS = [number * PAGE for number in range(COUNT)]
SIZES = [PAGE] * COUNT


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MooncakeCluster]:
    with MooncakeCluster(tmp_path) as running:
        running.start_node(64 * MIB)
        yield running


@pytest.fixture
def daemons(cluster: MooncakeCluster) -> Iterator[list[DaemonProcess]]:
    with ExitStack() as stack:
        running = []
        for _ in range(2):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hd-")))
            daemon = DaemonProcess(
                folder,
                backend="mooncake",
                mooncake_master=cluster.address,
                mooncake_metrics=f"127.0.0.1:{cluster.http_port}",
            )
            stack.callback(daemon.close)
            running.append(daemon)
        yield [daemon.wait_ready() for daemon in running]


def test_what_one_daemon_stores_another_one_finds(daemons: list[DaemonProcess]) -> None:
    first, second = daemons
    with Client(first.target) as client, Memory(COUNT * PAGE) as memory:
        region = client.attach(memory).region_id
        memory.bytes[:] = b"".join(payload_of(number, PAGE) for number in range(COUNT))
        with Client(second.target) as other:
            assert other.welcome.store_id == client.welcome.store_id
            assert other.lookup(KEYS)[0] == [Outcome.ABSENT] * COUNT
        assert client.put(region, KEYS, OFFSETS, SIZES) == [Outcome.OK] * COUNT
        assert client.put(region, KEYS, OFFSETS, SIZES) == [Outcome.EXISTS] * COUNT
    first.terminate()
    with Client(second.target) as client, Memory(COUNT * PAGE) as memory:
        region = client.attach(memory).region_id
        outcomes, lease = client.lookup(KEYS, lease_ms=1000)
        assert outcomes == [Outcome.OK] * COUNT
        assert client.lease(lease, lease_ms=1000)
        assert client.get(region, KEYS, OFFSETS, SIZES) == [Outcome.OK] * COUNT
        assert bytes(memory.bytes) == b"".join(payload_of(number, PAGE) for number in range(COUNT))
        assert client.get_stream(KEYS[:1], [PAGE]) == [payload_of(0, PAGE)]
        assert client.delete(KEYS[:1]) == [Outcome.OK]
        assert client.lookup(KEYS[:2])[0] == [Outcome.ABSENT, Outcome.OK]
    samples = scrape(second.ready["http"])
    assert samples["hicache_store_read_bytes_total"] == (COUNT + 1) * PAGE
    assert samples["hicache_store_capacity_bytes"] == 64 * MIB
    assert samples["hicache_mooncake_breaker_open"] == 0
    assert samples["hicache_ram_objects"] == 0  # deleted, and the others were read once


def test_a_daemon_whose_master_dies_lives_answers_misses_and_ends_in_time(
    cluster: MooncakeCluster, daemons: list[DaemonProcess]
) -> None:
    daemon = daemons[0]
    with Client(daemon.target) as client, Memory(COUNT * PAGE) as memory:
        region = client.attach(memory).region_id
        assert client.put(region, KEYS, OFFSETS, SIZES) == [Outcome.OK] * COUNT
        cluster.kill_master()
        misses = {Outcome.UNAVAILABLE, Outcome.DEADLINE}
        assert set(client.lookup(KEYS)[0]) <= misses
        assert set(client.get(region, KEYS, OFFSETS, SIZES)) <= misses
        assert set(client.put(region, KEYS, OFFSETS, SIZES)) <= misses
        assert http_get(daemon.ready["http"], "/healthz")[0] == 200
        samples = scrape(daemon.ready["http"])
        assert samples["hicache_mooncake_breaker_open"] == 1
        assert samples["hicache_mooncake_breaker_opened_total"] >= 1
        cluster.restart_master()
        eventually(lambda: client.lookup(KEYS[:1])[0] == [Outcome.ABSENT], timeout_s=30)
        eventually(lambda: client.put(region, KEYS[:1], OFFSETS[:1], SIZES[:1])[0].is_ok, timeout_s=30)
    assert daemon.terminate() < 6.0
    assert daemon.process.returncode == 0
