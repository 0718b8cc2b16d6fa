"""What routers and engines ask of hicached beside bytes: watches, pins, and leases that end in time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.client import DaemonL3, WatchEvent, WatchKind
from hicache.embedded import EmbeddedL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as wire
from tests.client.conftest import ClientFactory
from tests.client.hicached import HicachedProcess, token_of
from tests.client.memory import SmallMemory
from tests.client.small_daemon import SmallDaemon
from tests.client.support import QUICK, get, key, payload, put, wait_until
from tests.client.test_contract import DictStore

SIZE = 5000
PATIENT = dataclasses.replace(QUICK, ping_timeout_s=2.0, connect_timeout_s=5.0)


@pytest.fixture
def hicached(folder: Path) -> Iterator[HicachedProcess]:
    """A daemon whose tenants may have two objects each, and pin one."""
    process = HicachedProcess(folder, backend="file", has_tenants=True, quota_objects=2, pinned_objects_max=1)
    process.start()
    yield process
    process.end()


@pytest.fixture
def router(hicached: HicachedProcess, new_client: ClientFactory) -> DaemonL3:
    client = new_client(hicached.address, token=token_of(0), settings=PATIENT)
    assert client.wait_ready(timeout_s=10)
    return client


def store(client: DaemonL3, memory: SmallMemory, *numbers: int) -> None:
    for number in numbers:
        memory.buffer[:SIZE] = payload(number, SIZE)
        assert put(client, [L3Item(key(number), 0, SIZE)]) == [Outcome.OK]


def until_synced(events: Iterator[WatchEvent]) -> set[bytes]:
    """The snapshot that comes next; fails when it does not begin with a reset."""
    assert next(events).kind is WatchKind.RESET
    present: set[bytes] = set()
    for event in events:
        if event.kind is WatchKind.SYNCED:
            return present
        assert event.kind is WatchKind.PRESENT
        present.update(event.keys)
    raise AssertionError("the watch ended within its snapshot")


def test_a_watch_follows_what_is_stored_and_removed_and_lives_on_when_hicached_restarts(
    hicached: HicachedProcess, router: DaemonL3, new_client: ClientFactory, memory: SmallMemory
) -> None:
    store(router, memory, 1)
    watch = router.watch()
    events = iter(watch)
    assert until_synced(events) == {key(1)}
    store(router, memory, 2, 3)
    assert [next(events) for _ in range(3)] == [
        WatchEvent(WatchKind.STORED, (key(2),)),
        WatchEvent(WatchKind.REMOVED, (key(1),), removal="evicted"),
        WatchEvent(WatchKind.STORED, (key(3),)),
    ]
    other = new_client(hicached.address, token=token_of(1), settings=PATIENT)
    assert other.wait_ready(timeout_s=10)
    store(other, memory, 77)
    hicached.end()
    hicached.start()
    assert until_synced(events) == {key(2), key(3)}, "and nothing of the other tenant before it"
    watch.close()
    assert list(events) == []


def test_a_watch_that_waits_ends_with_its_close_or_with_its_client(router: DaemonL3) -> None:
    for end in (lambda watch: watch.close(), lambda watch: router.close()):
        watch = router.watch()
        events = iter(watch)
        until_synced(events)
        rest: list[WatchEvent] = []
        reader = threading.Thread(target=lambda events=events, rest=rest: rest.extend(events))
        reader.start()
        end(watch)
        reader.join(10)
        assert not reader.is_alive()
        assert rest == []


def test_events_that_came_too_fast_start_the_picture_over(daemon: SmallDaemon, client: DaemonL3) -> None:
    answers = [
        [wire.WatchEvents(kind=wire.WatchEvents.SYNCED), wire.WatchEvents(kind=wire.WatchEvents.LOST, lost=7)],
        [wire.WatchEvents(kind=wire.WatchEvents.SYNCED)],
    ]
    daemon.faults.watch = lambda: iter(answers.pop(0))
    events = iter(client.watch())
    seen = [next(events) for _ in range(4)]
    assert [event.kind for event in seen] == [WatchKind.RESET, WatchKind.SYNCED, WatchKind.RESET, WatchKind.SYNCED]
    assert [event.lost for event in seen] == [0, 0, 7, 0]


def test_a_daemon_that_has_no_watches_ends_the_iteration_and_says_so(daemon: SmallDaemon, client: DaemonL3) -> None:
    watch = client.watch()
    assert [event.kind for event in watch] == [WatchKind.RESET]
    assert watch.fault is not None
    assert watch.fault.is_lasting


def test_pins_are_asked_for_by_the_batch_and_answered_by_the_key(router: DaemonL3, memory: SmallMemory) -> None:
    store(router, memory, 1, 2)
    asked = [key(1), key(2), key(9)]
    assert router.pin(asked, pin_s=60.0, timeout_s=10) == [Outcome.OK, Outcome.REFUSED, Outcome.ABSENT]
    store(router, memory, 3, 4)
    assert router.lookup([key(1), key(4)], timeout_s=10) == [Outcome.OK, Outcome.OK], "2 and 3 went instead"
    assert router.unpin(asked, timeout_s=10) == [Outcome.OK, Outcome.ABSENT, Outcome.ABSENT]
    assert set(router.status().operations) >= {"pin", "unpin"}
    router.close()
    assert router.pin(asked, pin_s=60.0, timeout_s=10) == [Outcome.CANCELLED] * 3


class TestLeases:
    def leases(self, daemon: SmallDaemon) -> list[tuple[int, int]]:
        """Lease calls that the daemon got: lease and milliseconds."""
        requests = list(daemon.requests.get("lease", []))
        return [(request.lease_id, request.lease_ms) for request in requests]  # type: ignore[attr-defined]

    def fill(self, daemon: SmallDaemon, count: int) -> list[L3Item]:
        daemon.objects.update({key(number): payload(number, SIZE) for number in range(count)})
        return [L3Item(key(number), number * SIZE, SIZE) for number in range(count)]

    def test_a_lease_is_released_when_all_under_it_has_been_fetched(
        self, daemon: SmallDaemon, client: DaemonL3
    ) -> None:
        items = self.fill(daemon, 3)
        client.lookup([item.key for item in items] + [key(99)], timeout_s=5)
        assert get(client, items[:2]) == [Outcome.OK] * 2
        assert self.leases(daemon) == []
        assert get(client, items[2:]) == [Outcome.OK]
        wait_until(lambda: self.leases(daemon) == [(1, 0)], what="the release")

    def test_a_lease_that_is_running_out_is_renewed_when_a_fetch_begins(
        self, daemon: SmallDaemon, client: DaemonL3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.client.leases.RENEWED_SHARE", 1.0)
        items = self.fill(daemon, 2)
        client.lookup([item.key for item in items], timeout_s=5)
        assert get(client, items[:1]) == [Outcome.OK]
        wait_until(lambda: self.leases(daemon) == [(1, 5000)], what="the renewal")

    def test_a_release_that_is_never_answered_holds_up_nobody(self, daemon: SmallDaemon, client: DaemonL3) -> None:
        items = self.fill(daemon, 1)
        release = threading.Event()
        daemon.faults.before_reply = lambda operation: release.wait(20) if operation == "lease" else None
        client.lookup([items[0].key], timeout_s=5)
        assert get(client, items, timeout_s=5) == [Outcome.OK]
        assert not release.is_set()
        release.set()

    def test_the_embedded_l3_releases_its_leases_too(self, memory: SmallMemory) -> None:
        objects = DictStore({})
        l3 = EmbeddedL3(objects, memory=memory)
        items = [L3Item(key(number), number * SIZE, SIZE) for number in range(2)]
        assert put(l3, items) == [Outcome.OK] * 2
        l3.lookup([item.key for item in items], timeout_s=5)
        assert get(l3, items[:1]) == [Outcome.OK]
        assert len(objects.leases) == 1
        assert get(l3, items[1:]) == [Outcome.OK]
        assert objects.leases == {}
        l3.close()
