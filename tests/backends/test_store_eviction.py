"""The object store: who is evicted, when, and what room that makes."""

from __future__ import annotations

import pytest

from hicache.backends.base import PutItem
from hicache.backends.faulty import Fault, FaultKind
from hicache.backends.puts import EVICTIONS_IN_VAIN
from hicache.outcome import Outcome
from tests.backends.payloads import TENANT, key
from tests.backends.store_rig import CAPACITY_BYTES, KIB, MIB, Rig, fill, owned


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


def test_a_medium_that_others_have_filled_does_not_cost_the_objects_that_are_there(rig: Rig) -> None:
    fill(rig, 40)
    rig.faulty.arm("put", Fault(FaultKind.ENOSPC))
    for number in range(100, 200):
        assert rig.put(number) == [Outcome.NO_SPACE]
    assert rig.store.stats().evictions == EVICTIONS_IN_VAIN.consecutive_failures_max
    for number in range(200, 205):
        rig.clock.now_s += EVICTIONS_IN_VAIN.open_s_max
        assert rig.put(number) == [Outcome.NO_SPACE]
    evicted = rig.store.stats().evictions
    assert EVICTIONS_IN_VAIN.consecutive_failures_max < evicted, "it is never tried again"
    rig.clock.now_s += EVICTIONS_IN_VAIN.open_s_max
    rig.faulty.arm("put", Fault(FaultKind.ENOSPC, times=1))
    assert rig.put(50) == [Outcome.OK], "it does not evict when that is of use again"
    assert rig.store.stats().evictions == evicted + 1


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
