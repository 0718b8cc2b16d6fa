"""The object store: what is evicted and what is not, leases, usage, counters, faults below it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hicache.backends.base import Backend, GetItem, PutItem
from hicache.backends.faulty import Fault, FaultKind, FaultyBackend
from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.recency_writer import TOUCH_INTERVAL_S
from hicache.backends.store import ObjectStore
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import OTHER_TENANT, TENANT, key, payload, scanned

KIB = 1 << 10
MIB = 1 << 20
OBJECT_BYTES = 60 * KIB  # 64 KiB with its header
CAPACITY_BYTES = 100 * 64 * KIB


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """A store over files, its clock, and faults to arm."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = Clock()
        self.files: FileBackend
        self.faulty: FaultyBackend
        self.store: ObjectStore
        self.open()

    def open(
        self, *, free_space_floor_bytes: int = 0, capacity_bytes: int = CAPACITY_BYTES, objects_max: int = 0
    ) -> ObjectStore:
        self.files = FileBackend.open(self.directory, capacity_bytes=capacity_bytes)
        self.faulty = FaultyBackend(self.files)
        self.store = ObjectStore(
            self.faulty,
            object_bytes_max=8 * MIB,
            high_watermark=0.9,
            low_watermark=0.8,
            free_space_floor_bytes=free_space_floor_bytes,
            objects_max=objects_max,
            clock=self.clock,
            wall_clock=self.clock,
        )
        return self.store

    def put(self, *numbers: int, size: int = OBJECT_BYTES) -> list[Outcome]:
        return self.store.put([PutItem(key(number), memoryview(payload(number, size))) for number in numbers])

    def get(self, number: int, size: int = OBJECT_BYTES) -> Outcome:
        target = bytearray(size)
        outcome = self.store.get_into([GetItem(key(number), memoryview(target))])[0]
        assert outcome is not Outcome.OK or bytes(target) == payload(number, size)
        return outcome

    def present(self, *numbers: int) -> list[int]:
        """Which are on the medium, without counting as use."""
        found = self.files.contains([key(number) for number in numbers])
        return [number for number, is_there in zip(numbers, found, strict=True) if is_there]


def owned(store: ObjectStore, tenant: bytes) -> tuple[int, int]:
    """Payload bytes and objects of a tenant."""
    usage = store.tenant_usage(tenant)
    return usage.payload_bytes, usage.objects


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "store")
    yield rig
    rig.store.close()


def fill(rig: Rig, count: int = 90) -> None:
    """Up to the high watermark, one by one so that the order of use is that of the numbers."""
    for number in range(count):
        assert rig.put(number) == [Outcome.OK]


def test_nothing_is_evicted_up_to_the_high_watermark(rig: Rig) -> None:
    fill(rig)
    assert rig.store.stats().evictions == 0
    assert rig.present(*range(90)) == list(range(90))


def test_at_objects_max_the_least_recently_used_go_also_when_there_is_space(rig: Rig) -> None:
    fill(rig, 20)
    rig.store.close()
    rig.clock.now_s = 4_000_000_000.0  # later than the times that the files have
    rig.open(objects_max=10)
    assert rig.present(*range(20)) == list(range(20)), "a lower bound costs nothing until something is stored"
    assert rig.put(20) == [Outcome.OK]
    assert rig.present(*range(21)) == list(range(11, 21))
    assert rig.put(*range(30, 42)) == [Outcome.OK] * 12
    assert rig.present(*range(42)) == list(range(32, 42))
    assert owned(rig.store, TENANT)[1] == 10


def test_at_objects_max_a_put_finds_no_space_while_all_objects_are_leased(rig: Rig) -> None:
    rig.store.close()
    rig.open(objects_max=10)
    fill(rig, 10)
    _, lease = rig.store.lookup([key(number) for number in range(10)], lease_s=10.0)
    assert rig.put(10) == [Outcome.NO_SPACE]
    assert rig.present(*range(11)) == list(range(10))
    rig.store.release(lease)
    assert rig.put(10) == [Outcome.OK]


def test_a_lease_protects_an_object_that_was_dropped_and_stored_again(rig: Rig) -> None:
    rig.store.close()
    rig.open(objects_max=3)
    fill(rig, 3)
    rig.store.lookup([key(0)], lease_s=10.0)
    assert rig.store.delete([key(0)]) == [Outcome.OK]
    assert rig.store.stats().holds.leased_keys == 1
    assert rig.put(0) == [Outcome.OK]
    assert rig.put(*range(3, 8)) == [Outcome.OK] * 5
    assert rig.present(*range(8)) == [0, 6, 7]
    rig.clock.now_s += 10.0
    assert rig.put(*range(8, 11)) == [Outcome.OK] * 3
    assert rig.present(*range(11)) == [8, 9, 10]


def test_above_the_high_watermark_the_least_recently_used_go_down_to_the_low_one(rig: Rig) -> None:
    fill(rig)
    assert rig.put(90) == [Outcome.OK]
    assert rig.store.usage().stored_bytes == CAPACITY_BYTES * 8 // 10
    assert rig.present(*range(91)) == list(range(11, 91))
    assert rig.store.stats().evictions == 11
    assert rig.store.stats().evicted_bytes == 11 * 64 * KIB


@pytest.mark.parametrize("use", ["lookup", "get", "put"])
def test_lookup_get_and_put_count_as_use(rig: Rig, use: str) -> None:
    fill(rig)
    if use == "lookup":
        rig.store.lookup([key(0), key(1)])
    elif use == "get":
        assert [rig.get(0), rig.get(1)] == [Outcome.OK, Outcome.OK]
    else:
        assert rig.put(0, 1) == [Outcome.EXISTS, Outcome.EXISTS]
    rig.put(90)
    assert rig.present(*range(14)) == [0, 1, 13]


def test_within_a_batch_the_first_objects_outlive_the_later_ones(rig: Rig) -> None:
    fill(rig)
    rig.store.lookup([key(number) for number in range(90)])
    rig.put(90)
    assert rig.present(*range(90)) == list(range(79))


def test_leased_objects_are_not_evicted_until_the_lease_ends(rig: Rig) -> None:
    fill(rig)
    outcomes, lease = rig.store.lookup([key(0), key(1), key(500)], lease_s=10.0)
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.ABSENT]
    for number in range(2, 90):
        rig.store.lookup([key(number)])  # now the leased ones are the oldest
    rig.put(*range(100, 140))
    assert rig.present(0, 1) == [0, 1]
    assert rig.store.release(lease)
    assert not rig.store.release(lease)
    rig.put(*range(200, 280))
    assert rig.present(0, 1) == []


def test_an_expired_lease_protects_nothing_and_cannot_be_renewed(rig: Rig) -> None:
    fill(rig)
    _, lease = rig.store.lookup([key(0)], lease_s=10.0)
    rig.clock.now_s += 9.0
    assert rig.store.renew(lease, lease_s=10.0)
    rig.clock.now_s += 9.0
    rig.put(*range(100, 180))
    assert rig.present(0) == [0]
    rig.clock.now_s += 1.0
    assert not rig.store.renew(lease, lease_s=10.0)
    assert rig.store.stats().holds.leases == 0
    rig.put(*range(200, 290))
    assert rig.present(0) == []


def test_an_expired_lease_holds_up_no_eviction(rig: Rig) -> None:
    fill(rig)
    rig.store.lookup([key(number) for number in range(90)], lease_s=10.0)
    rig.clock.now_s += 10.0
    assert rig.put(*range(100, 120)) == [Outcome.OK] * 20


def test_leases_protect_half_of_the_store_and_the_rest_stays_for_puts(rig: Rig) -> None:
    fill(rig)
    outcomes, lease = rig.store.lookup([key(number) for number in range(90)], lease_s=10.0)
    assert outcomes == [Outcome.OK] * 90
    assert rig.store.stats().holds.leased_keys == 50
    assert rig.store.lookup([key(number) for number in range(50, 90)], lease_s=10.0) == ([Outcome.OK] * 40, 0)
    _, other_lease = rig.store.lookup([key(60), key(3)], lease_s=10.0)
    assert other_lease != 0, "what is protected already costs nothing"
    assert rig.put(*range(100, 200)) == [Outcome.OK] * 100
    assert rig.present(*range(90)) == list(range(50)), "the first keys got the lease"
    rig.store.release(lease)
    assert rig.store.stats().holds.leased_keys == 1
    rig.store.lookup([key(number) for number in range(150, 190)], lease_s=10.0)
    assert rig.store.stats().holds.leased_keys > 1, "what ends makes room for others"


def test_an_object_larger_than_what_leases_leave_finds_no_space_and_costs_nothing_leased(rig: Rig) -> None:
    fill(rig)
    _, lease = rig.store.lookup([key(number) for number in range(50)], lease_s=10.0)
    large = 60 * 64 * KIB - 4 * KIB
    assert rig.put(500, size=large) == [Outcome.NO_SPACE]
    assert rig.present(*range(50)) == list(range(50))
    rig.store.release(lease)
    assert rig.put(500, size=large) == [Outcome.OK]


def test_leased_objects_are_examined_once_and_not_by_every_eviction(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(rig)
    rig.store.lookup([key(number) for number in range(50)], lease_s=10.0)
    for number in range(50, 90):
        rig.store.lookup([key(number)])  # now the leased ones are the oldest
    residents = rig.store._catalog.residents
    aside: list[int] = []
    monkeypatch.setattr(residents, "_set_aside", lambda slot: (aside.append(slot), set_aside(slot)))
    set_aside = type(residents)._set_aside.__get__(residents)
    rig.put(*range(100, 120))
    assert len(aside) == 50
    rig.put(*range(120, 140))
    assert len(aside) == 50


def test_an_eviction_looks_at_few_objects_under_the_lock_and_finds_what_is_behind_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.backends.residents.EXAMINED_MAX", 7)
    fill(rig)
    rig.store.lookup([key(number) for number in range(50)], lease_s=10.0)
    for number in range(50, 90):
        rig.store.lookup([key(number)])
    assert rig.put(*range(100, 110)) == [Outcome.OK] * 10
    assert rig.present(*range(50)) == list(range(50))


def test_no_lease_is_given_for_nothing(rig: Rig) -> None:
    rig.put(1)
    assert rig.store.lookup([key(1)])[1] == 0
    assert rig.store.lookup([key(2)], lease_s=5.0)[1] == 0
    assert not rig.store.renew(0, lease_s=1.0)
    assert not rig.store.release(0)


@pytest.mark.parametrize("are_large_old", [True, False])
def test_br_087_mixed_sizes_free_what_is_needed_within_one_object(rig: Rig, are_large_old: bool) -> None:
    large = 512 * KIB - 4 * KIB

    def put_large() -> None:
        for number in range(1000, 1007):
            assert rig.put(number, size=large) == [Outcome.OK]

    def put_small() -> None:
        for number in range(30):
            assert rig.put(number) == [Outcome.OK]

    for step in (put_large, put_small) if are_large_old else (put_small, put_large):
        step()
    rig.put(2000)
    assert rig.store.stats().evictions == 0
    rig.put(2001, size=large)
    stored = rig.store.usage().stored_bytes
    one_object = 512 * KIB if are_large_old else 64 * KIB
    assert CAPACITY_BYTES * 8 // 10 - one_object < stored <= CAPACITY_BYTES * 8 // 10


def test_br_087_an_object_that_cannot_be_deleted_does_not_hold_up_the_others(rig: Rig) -> None:
    fill(rig)
    stuck = frozenset({key(0)})
    rig.faulty.arm("delete", Fault(FaultKind.EIO, keys=stuck))
    assert rig.put(90) == [Outcome.OK]
    assert rig.store.usage().stored_bytes == CAPACITY_BYTES * 8 // 10
    assert rig.present(*range(13)) == [0, 12]
    assert rig.store.stats().eviction_failures == 1
    rig.put(*range(100, 150))
    assert rig.store.stats().eviction_failures <= 2
    assert rig.get(0) is Outcome.OK  # still there, and still known


def test_when_nothing_can_be_deleted_puts_go_on_to_the_capacity_and_then_find_no_space(rig: Rig) -> None:
    fill(rig)
    rig.faulty.arm("delete", Fault(FaultKind.EIO))
    assert rig.put(*range(100, 105)) == [Outcome.OK] * 5
    assert set(rig.put(*range(105, 115))) == {Outcome.OK, Outcome.NO_SPACE}
    assert rig.store.usage().stored_bytes <= CAPACITY_BYTES
    rig.faulty.disarm()
    assert rig.put(200) == [Outcome.OK]


def test_a_full_medium_is_answered_by_eviction_and_one_more_try(rig: Rig) -> None:
    fill(rig, 10)
    rig.faulty.arm("put", Fault(FaultKind.ENOSPC, times=1))
    assert rig.put(50) == [Outcome.OK]
    assert rig.store.stats().evictions == 1
    rig.faulty.arm("put", Fault(FaultKind.ENOSPC))
    assert rig.put(51) == [Outcome.NO_SPACE]
    assert rig.get(51) is Outcome.ABSENT


def test_br_082_endless_unique_objects_stay_below_the_cap(rig: Rig) -> None:
    for number in range(0, 1000, 5):  # ten times the capacity
        assert rig.put(*range(number, number + 5)) == [Outcome.OK] * 5
        assert rig.store.usage().stored_bytes <= CAPACITY_BYTES * 9 // 10
    assert rig.present(999) == [999]


def test_br_082_at_the_free_space_floor_the_store_shrinks_and_then_refuses(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(rig, 10)
    floor = 1 << 40
    free = floor + 64 * KIB  # what the rest of the machine leaves
    used_then = rig.files.usage().stored_bytes
    rig.store._evictor._floor_bytes = floor
    monkeypatch.setattr(rig.faulty, "free_bytes", lambda: free + used_then - rig.files.usage().stored_bytes)
    assert rig.put(50) == [Outcome.OK]
    assert rig.put(51) == [Outcome.OK]
    assert rig.store.stats().evictions == 1  # the second one needed the place of another
    free = floor - 100 * MIB
    assert rig.put(52) == [Outcome.NO_SPACE]
    assert rig.get(52) is Outcome.ABSENT


def test_an_object_above_the_limit_is_too_large_and_evicts_nothing(rig: Rig) -> None:
    fill(rig)
    outcomes = rig.store.put([PutItem(key(500), memoryview(bytes(8 * MIB + 1))), PutItem(key(1), memoryview(b"x"))])
    assert outcomes == [Outcome.TOO_LARGE, Outcome.EXISTS]
    assert rig.store.stats().evictions == 0


def test_an_object_larger_than_the_store_finds_no_space(rig: Rig) -> None:
    rig.put(1)
    assert rig.put(500, size=8 * MIB) == [Outcome.NO_SPACE]


def test_a_batch_larger_than_the_store_is_taken_in_parts(rig: Rig) -> None:
    outcomes = rig.put(*range(300))
    assert set(outcomes) == {Outcome.OK}
    assert rig.store.usage().stored_bytes <= CAPACITY_BYTES * 9 // 10
    assert rig.present(299) == [299]


def test_the_same_key_twice_in_a_batch_exists_the_second_time(rig: Rig) -> None:
    assert rig.put(1, 1) == [Outcome.OK, Outcome.EXISTS]
    assert owned(rig.store, TENANT) == (OBJECT_BYTES, 1)


def test_tenants_are_accounted_apart(rig: Rig) -> None:
    rig.put(1, 2)
    rig.store.put([PutItem(key(1, OTHER_TENANT), memoryview(b"abc"))])
    assert owned(rig.store, TENANT) == (2 * OBJECT_BYTES, 2)
    assert owned(rig.store, OTHER_TENANT) == (3, 1)
    assert rig.store.delete([key(1), key(1, OTHER_TENANT)]) == [Outcome.OK, Outcome.OK]
    assert owned(rig.store, OTHER_TENANT) == (0, 0)
    assert rig.store.tenants() == [TENANT]


def test_br_061_a_restart_keeps_usage_tenants_and_the_order_of_use(rig: Rig) -> None:
    fill(rig)
    rig.clock.now_s = 4_000_000_000.0
    rig.store.lookup([key(3)])
    usage, tenants = rig.store.usage(), rig.store.tenant_usage(TENANT)
    rig.store.close()
    rig.open()
    assert rig.store.usage() == usage
    assert rig.store.tenant_usage(TENANT) == tenants
    assert rig.put(90) == [Outcome.OK]
    assert rig.present(3) == [3]
    assert rig.store.usage().stored_bytes <= CAPACITY_BYTES * 9 // 10


def test_recency_is_written_at_most_once_per_interval(rig: Rig) -> None:
    touched = Fault(FaultKind.DELAY)
    rig.faulty.arm("touch", touched)
    rig.put(1)
    rig.store.lookup([key(1)])
    rig.put(2)
    rig.clock.now_s += TOUCH_INTERVAL_S - 1
    rig.put(3)
    assert rig.store._recency.worker.queued_count == 0
    assert not touched.entered.is_set()
    rig.clock.now_s += 1
    rig.put(4)
    assert touched.entered.wait(timeout=30)


def test_gets_and_puts_do_not_wait_for_times_of_use(rig: Rig) -> None:
    rig.put(1)
    rig.store.lookup([key(1)])
    stuck = rig.faulty.arm("touch", Fault(FaultKind.NEVER))
    rig.clock.now_s += TOUCH_INTERVAL_S
    assert rig.get(1) is Outcome.OK
    assert stuck.entered.wait(timeout=30)
    for number in range(10):
        rig.clock.now_s += TOUCH_INTERVAL_S
        assert rig.get(1) is Outcome.OK
        assert rig.put(100 + number) == [Outcome.OK]
    assert rig.store._recency.worker.queued_count <= 1
    rig.faulty.disarm()


def test_a_close_does_not_wait_for_ever_for_times_of_use(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.backends.recency_writer.TOUCH_CLOSE_S", 0.05)
    rig.put(1)
    rig.store.lookup([key(1)])
    stuck = rig.faulty.arm("touch", Fault(FaultKind.NEVER))
    rig.clock.now_s += TOUCH_INTERVAL_S
    assert rig.get(1) is Outcome.OK
    assert stuck.entered.wait(timeout=30)
    rig.store.close()
    rig.faulty.disarm()


def test_times_of_use_are_written_in_bounded_calls_and_keep_their_order(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.backends.recency_writer.TOUCH_KEYS_MAX", 4)
    fill(rig, 10)
    rig.clock.now_s = 4_000_000_000.0
    rig.store.lookup([key(number) for number in range(10)])
    calls: list[int] = []
    touch = rig.faulty.touch

    def watched(used: Sequence[tuple[bytes, float]]) -> None:
        calls.append(len(used))
        touch(used)

    monkeypatch.setattr(rig.faulty, "touch", watched)
    rig.store.persist_recency()
    assert calls == [4, 4, 2]
    told = sorted(scanned(rig.files), key=lambda stored: -stored.used_at_s)
    assert [stored.key for stored in told] == [key(number) for number in range(10)]


def test_an_object_dropped_while_others_are_put_is_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(1)
    get_into = rig.faulty.get_into

    def overtaken(items: Sequence[GetItem]) -> list[Outcome]:
        assert rig.put(2) == [Outcome.OK]
        return get_into(items)

    rig.faulty.arm("get_into", Fault(FaultKind.WRONG_BYTES, times=1))
    monkeypatch.setattr(rig.faulty, "get_into", overtaken)
    assert rig.get(1) is Outcome.CORRUPT
    assert rig.store.lookup([key(1), key(2)])[0] == [Outcome.ABSENT, Outcome.OK]
    assert rig.put(1) == [Outcome.OK]


def test_an_object_stored_anew_while_its_old_bytes_were_read_stays_known(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.put(1)
    get_into = rig.faulty.get_into

    def overtaken(items: Sequence[GetItem]) -> list[Outcome]:
        outcomes = get_into(items)
        rig.store.delete([key(1)])
        assert rig.put(1) == [Outcome.OK]
        return outcomes

    rig.faulty.arm("get_into", Fault(FaultKind.WRONG_BYTES, times=1))
    monkeypatch.setattr(rig.faulty, "get_into", overtaken)
    assert rig.get(1) is Outcome.CORRUPT
    assert rig.store.lookup([key(1)])[0] == [Outcome.OK]


def test_a_corrupt_object_is_a_miss_forgotten_and_counted(rig: Rig) -> None:
    rig.put(1)
    rig.faulty.arm("get_into", Fault(FaultKind.WRONG_BYTES, times=1))
    assert rig.get(1) is Outcome.CORRUPT
    assert rig.store.lookup([key(1)])[0] == [Outcome.ABSENT]
    assert rig.store.stats().corrupt_dropped == 1
    assert owned(rig.store, TENANT) == (0, 0)
    assert rig.put(1) == [Outcome.OK]


def test_an_io_error_is_an_outcome_and_the_object_stays_known(rig: Rig) -> None:
    rig.put(1)
    rig.faulty.arm("get_into", Fault(FaultKind.EIO, times=1))
    assert rig.get(1) is Outcome.IO_ERROR
    assert rig.get(1) is Outcome.OK


def test_an_object_that_cannot_be_deleted_stays_known_also_when_it_is_named_twice(rig: Rig) -> None:
    rig.put(1)
    rig.faulty.arm("delete", Fault(FaultKind.EIO, times=1))
    assert rig.store.delete([key(1), key(1)]) == [Outcome.IO_ERROR] * 2
    assert rig.get(1) is Outcome.OK


def test_an_object_that_vanished_below_is_forgotten(rig: Rig) -> None:
    rig.put(1)
    rig.files.delete([key(1)])
    assert rig.get(1) is Outcome.ABSENT
    assert rig.store.lookup([key(1)])[0] == [Outcome.ABSENT]


def test_counters_tell_what_happened(rig: Rig) -> None:
    rig.put(1, 2)
    rig.put(1)
    rig.get(1)
    rig.get(9)
    _, lease = rig.store.lookup([key(1), key(2), key(9)], lease_s=5.0)
    stats = rig.store.stats()
    assert stats.puts == {Outcome.OK: 2, Outcome.EXISTS: 1}
    assert stats.gets == {Outcome.OK: 1, Outcome.ABSENT: 1}
    assert (stats.lookup_hits, stats.lookup_misses) == (2, 1)
    assert (stats.bytes_written, stats.bytes_read) == (2 * OBJECT_BYTES, OBJECT_BYTES)
    assert (stats.holds.leases, stats.holds.leased_keys) == (1, 2)
    assert lease != 0


def test_a_lookup_does_not_wait_for_a_backend_that_hangs(rig: Rig) -> None:
    rig.put(1)
    fault = rig.faulty.arm("get_into", Fault(FaultKind.NEVER))
    outcomes: list[Outcome] = []
    reader = threading.Thread(target=lambda: outcomes.append(rig.get(1)))
    reader.start()
    assert fault.entered.wait(timeout=30)
    assert rig.store.lookup([key(1)])[0] == [Outcome.OK]
    assert rig.put(2) == [Outcome.OK]
    rig.faulty.disarm()
    reader.join(timeout=30)
    assert outcomes == [Outcome.IO_ERROR]


def test_an_object_deleted_while_it_is_written_is_gone_afterwards(rig: Rig) -> None:
    fault = rig.faulty.arm("put", Fault(FaultKind.LATE))
    writer = threading.Thread(target=rig.put, args=(1,))
    writer.start()
    assert fault.entered.wait(timeout=30)
    assert rig.store.delete([key(1)]) == [Outcome.ABSENT]
    rig.faulty.disarm()
    writer.join(timeout=30)
    assert rig.get(1) is Outcome.ABSENT
    assert rig.present(1) == []
    assert rig.put(1) == [Outcome.OK]


def test_an_object_put_while_it_is_evicted_is_there_afterwards(rig: Rig) -> None:
    rig.put(1)
    fault = rig.faulty.arm("delete", Fault(FaultKind.LATE, times=1))
    remover = threading.Thread(target=lambda: rig.store.delete([key(1)]))
    remover.start()
    assert fault.entered.wait(timeout=30)
    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(rig.put(1)))
    writer.start()
    fault.release()
    for thread in (remover, writer):
        thread.join(timeout=30)
    assert outcomes in ([Outcome.OK], [Outcome.EXISTS])
    assert rig.get(1) is Outcome.OK
    assert owned(rig.store, TENANT) == (OBJECT_BYTES, 1)


def test_what_two_threads_put_at_once_is_known_to_both(rig: Rig) -> None:
    fault = rig.faulty.arm("put", Fault(FaultKind.LATE, times=1))
    first = threading.Thread(target=rig.put, args=(1,))
    first.start()
    assert fault.entered.wait(timeout=30)
    assert rig.put(1) == [Outcome.OK]
    fault.release()
    first.join(timeout=30)
    assert rig.get(1) is Outcome.OK
    assert owned(rig.store, TENANT) == (OBJECT_BYTES, 1)


def test_closing_twice_is_nothing_and_a_closed_store_says_so(rig: Rig) -> None:
    rig.put(1)
    rig.store.close()
    rig.store.close()
    with pytest.raises(BackendError, match="closed"):
        rig.get(1)


@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        ("high_watermark", {"high_watermark": 1.5}),
        ("high_watermark", {"high_watermark": 0.0}),
        ("low_watermark", {"low_watermark": 0.95}),
        ("low_watermark", {"low_watermark": 0.0}),
        ("object_bytes_max", {"object_bytes_max": 0}),
        ("free_space_floor_bytes", {"free_space_floor_bytes": -1}),
    ],
)
def test_contradicting_settings_are_config_errors_that_name_them(
    tmp_path: Path, setting: str, settings: dict[str, float]
) -> None:
    backend = FileBackend.open(tmp_path, capacity_bytes=CAPACITY_BYTES)
    with pytest.raises(ConfigError) as caught:
        ObjectStore(backend, **{"object_bytes_max": MIB, **settings})  # type: ignore[arg-type]  # the point
    assert caught.value.setting == setting
    backend.close()


@pytest.mark.parametrize("open_backend", [LmdbBackend.open, FileBackend.open])
def test_many_threads_keep_a_store_within_its_bounds(tmp_path: Path, open_backend: Callable[..., Backend]) -> None:
    backend = open_backend(tmp_path / "store", capacity_bytes=4 * MIB)
    store = ObjectStore(backend, object_bytes_max=MIB, free_space_floor_bytes=0)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for step in range(150):
            number = (seed * 7919 + step * 31) % 60
            size = 1000 + number * 3001
            outcome = store.put([PutItem(key(number), memoryview(payload(number, size)))])[0]
            if not outcome.is_ok:
                wrong.append(f"put {number}: {outcome!r}")
            _, lease = store.lookup([key(number)], lease_s=60.0)
            if lease:
                target = bytearray(size)
                outcome = store.get_into([GetItem(key(number), memoryview(target))])[0]
                if outcome is not Outcome.OK or bytes(target) != payload(number, size):
                    wrong.append(f"leased get {number}: {outcome!r}")
                store.release(lease)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []
    usage = store.usage()
    assert usage.stored_bytes <= usage.capacity_bytes
    assert owned(store, TENANT) == (usage.payload_bytes, usage.objects)
    store.close()


def test_a_smaller_capacity_evicts_what_was_used_least_recently_and_the_watermarks_follow(rig: Rig) -> None:
    rig.store.close()
    rig.open(capacity_bytes=256 * 64 * KIB)
    for number in range(200):
        rig.put(number)
    rig.store.lookup([key(0)])
    rig.store.resize(128 * 64 * KIB)
    assert rig.store.usage().capacity_bytes == 128 * 64 * KIB
    assert rig.present(*range(200)) == [0, *range(99, 200)], "down to 0.8"
    rig.put(*range(200, 300))
    assert rig.store.usage().stored_bytes <= 128 * 64 * KIB * 0.9
    rig.store.resize(256 * 64 * KIB)
    rig.put(*range(300, 420))
    assert rig.store.usage().stored_bytes > 128 * 64 * KIB


def test_a_capacity_below_what_is_leased_or_below_the_largest_object_is_refused_and_the_old_one_stays(rig: Rig) -> None:
    rig.store.close()
    rig.open(capacity_bytes=400 * 64 * KIB)
    rig.put(*range(199))
    _, lease = rig.store.lookup([key(number) for number in range(199)], lease_s=10.0)
    with pytest.raises(BackendError, match="more is stored"):
        rig.store.resize(128 * 64 * KIB)
    with pytest.raises(ConfigError, match="the largest object"):
        rig.store.resize(4 * MIB)
    assert rig.store.usage().capacity_bytes == 400 * 64 * KIB
    assert rig.present(*range(199)) == list(range(199))
    assert rig.put(*range(200, 240)) == [Outcome.OK] * 40
    rig.store.release(lease)
    rig.store.resize(128 * 64 * KIB)
    assert rig.store.usage().stored_bytes <= 128 * 64 * KIB * 0.8
