"""Faults of the store as a client meets them: rotten bytes, racing writers, eviction under its feet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache.outcome import Outcome
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key, payload_of
from tests.daemon.rig import scrape

StartThread = Callable[..., ThreadedDaemon]

PAGE = 64 * 1024
KEYS = [object_key(number) for number in range(4)]


@pytest.fixture
def tight(start_thread: StartThread) -> ThreadedDaemon:
    """A daemon whose store holds about 100 pages."""
    return start_thread(capacity_bytes="8MiB", object_bytes_max=PAGE)


class Flood:
    """Another client that fills the store with new pages, so that old ones have to go."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._next = 1000

    def put_pages(self, count: int) -> None:
        for _ in range(count):
            outcomes = self._client.put_stream([object_key(self._next)], [payload_of(self._next, PAGE)])
            assert outcomes[0] in (Outcome.OK, Outcome.NO_SPACE)
            self._next += 1


def test_the_store_never_grows_beyond_its_capacity(tight: ThreadedDaemon) -> None:
    with Client(tight.target) as client:
        flood = Flood(client)
        for _ in range(10):
            flood.put_pages(40)
            stats = client.stats()
            assert 0 < stats.used_bytes <= stats.capacity_bytes == 8 << 20
    samples = scrape(tight.ready.http)
    assert samples['hicache_store_removed_objects_total{reason="evicted"}'] > 200
    assert samples["hicache_store_eviction_failures_total"] == 0
