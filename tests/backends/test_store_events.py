"""What those who watch a tenant of the object store are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.events import Event, Removal
from hicache.backends.faulty import Fault, FaultKind
from hicache.backends.tenant_limits import TenantLimits
from tests.backends.limits_rig import Rig
from tests.backends.payloads import OTHER_TENANT, TENANT, key, scanned


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "store")
    yield rig
    rig.store.close()


class TestEvents:
    def test_a_watcher_is_told_what_comes_and_goes_and_why(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(ttl_s=60.0, quota_objects=3))
        wakes: list[None] = []
        told = rig.store.watch(TENANT, wake=lambda: wakes.append(None))
        rig.put_each(range(4))  # one too many
        assert len(wakes) == 1, "woken once until it has taken"
        rig.put(1)  # exists: nothing has happened
        rig.faulty.arm("get_into", Fault(FaultKind.WRONG_BYTES, times=1))
        rig.get(1)
        rig.store.delete([key(2), key(77)])
        rig.now_s += 61.0
        rig.store.sweep()
        assert told.take() == (
            0,
            [
                *(Event(key(number), None) for number in range(3)),
                Event(key(0), Removal.EVICTED),
                Event(key(3), None),
                Event(key(1), Removal.CORRUPT),
                Event(key(2), Removal.DELETED),
                Event(key(3), Removal.EXPIRED),
            ],
        )
        rig.put(8)
        assert len(wakes) == 2
        rig.store.unwatch(told)
        rig.put(9)
        assert told.take() == (0, [Event(key(8), None)])
        assert rig.store.stats().holds.watchers == 0

    def test_nobody_is_told_of_another_tenants_objects(self, rig: Rig) -> None:
        rig.open()
        mine, other = (rig.store.watch(tenant, wake=lambda: None) for tenant in (TENANT, OTHER_TENANT))
        rig.put(1, tenant=OTHER_TENANT)
        rig.store.delete([key(1, OTHER_TENANT)])
        assert mine.take() == (0, [])
        assert other.take()[1] == [Event(key(1, OTHER_TENANT), None), Event(key(1, OTHER_TENANT), Removal.DELETED)]

    def test_a_watcher_that_does_not_take_loses_events_and_is_told_how_many(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.backends.events.QUEUED_EVENTS_MAX", 4)
        rig.open()
        slow = rig.store.watch(TENANT, wake=lambda: None)
        rig.put_each(range(10))
        lost, events = slow.take()
        assert (lost, [event.key for event in events]) == (8, [key(8), key(9)])
        assert (rig.store.stats().events_told, rig.store.stats().events_lost) == (10, 8)
        rig.put(20)
        assert slow.take() == (0, [Event(key(20), None)])

    def test_a_snapshot_and_the_events_after_it_make_a_whole_picture(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.backends.store.SNAPSHOT_KEYS", 3)
        rig.open()
        rig.put_each(range(10))
        rig.put_each(range(5), OTHER_TENANT)
        told = rig.store.watch(TENANT, wake=lambda: None)
        picture: set[bytes] = set()
        for step, part in enumerate(rig.store.snapshot(TENANT)):
            assert len(part) <= 3
            picture |= set(part)
            rig.store.delete([key(step), key(9 - step)])
            rig.put(100 + step)
            for event in told.take()[1]:
                picture.add(event.key) if event.removal is None else picture.discard(event.key)
        there = {stored.key for stored in scanned(rig.files) if stored.key[:16] == TENANT}
        assert picture == there
        assert len(there) > 1
