"""Faults of the store as a client meets them: rotten bytes, racing writers, eviction under its feet."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.outcome import Outcome
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import scrape, wait_until

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


def test_br_101_what_a_lease_covers_is_there_at_get_however_much_is_written(tight: ThreadedDaemon) -> None:
    with Client(tight.target) as client, Client(tight.target) as writer, Memory(8 * PAGE) as memory:
        region = client.attach(memory).region_id
        flood = Flood(writer)
        client.put_stream(KEYS, [payload_of(number, PAGE) for number in range(4)])
        flood.put_pages(5)
        outcomes, lease = client.lookup(KEYS, lease_ms=60_000)
        assert outcomes == [Outcome.OK] * 4
        flood.put_pages(150)

        assert client.get(region, KEYS, [n * PAGE for n in range(4)], [PAGE] * 4) == [Outcome.OK] * 4
        assert client.lease(lease, lease_ms=0)
        flood.put_pages(300)
        assert client.present(KEYS) == [False] * 4, "without the lease they are evicted like anything else"


def test_br_101_without_a_lease_a_page_that_went_is_a_miss_and_no_error(tight: ThreadedDaemon) -> None:
    chance = random.Random(7)
    with Client(tight.target) as client, Client(tight.target) as writer, Memory(PAGE) as memory:
        region = client.attach(memory).region_id
        flood = Flood(writer)
        seen = set()
        for _ in range(30):
            number = chance.randrange(20)
            key = object_key(number)
            if client.present([key]) == [False]:
                client.put_stream([key], [payload_of(number, PAGE)])
            flood.put_pages(chance.choice([0, 1, 150]))
            (outcome,) = client.get(region, [key], [0], [PAGE])
            seen.add(outcome)
            if outcome is Outcome.OK:
                assert memory.bytes[:] == payload_of(number, PAGE)
        assert seen == {Outcome.OK, Outcome.ABSENT}


def test_br_104_a_read_that_outlives_its_lease_gets_the_right_bytes_or_a_miss(tight: ThreadedDaemon) -> None:
    with Client(tight.target) as client, Client(tight.target) as writer, Memory(2 * PAGE) as memory:
        attachment = client.attach(memory)
        client.put_stream(KEYS[:2], [payload_of(number, PAGE) for number in range(2)])
        assert client.lookup(KEYS[:2], lease_ms=1)[1] > 0
        late = tight.backend.arm("get_into", Fault(FaultKind.LATE, times=1))
        reading = client.begin(client.get, attachment.region_id, KEYS[:2], [0, PAGE], [PAGE] * 2)
        wait_until(late.entered.is_set, what="the read is in the backend")
        Flood(writer).put_pages(300)
        late.release()

        for number, outcome in enumerate(reading.result()):
            assert outcome in (Outcome.OK, Outcome.ABSENT, Outcome.CORRUPT)
            if outcome == Outcome.OK:
                assert memory.bytes[number * PAGE : (number + 1) * PAGE] == payload_of(number, PAGE)
        wait_until(lambda: client.present(KEYS[:2]) == [False] * 2, what="both are gone")
        assert client.get(attachment.region_id, KEYS[:2], [0, PAGE], [PAGE] * 2) == [Outcome.ABSENT] * 2


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
