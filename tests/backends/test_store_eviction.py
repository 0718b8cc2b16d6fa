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
    rig.files.touch([(key(number), 1000.0 + number) for number in range(20)])  # a file's own time moves in ticks
    rig.store.close()
    rig.clock.now_s = 2000.0
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


def test_one_put_evicts_a_bounded_part_and_the_next_ones_and_sweeps_go_on_to_the_low_watermark(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.backends.eviction.AHEAD_OBJECTS", 2)
    fill(rig)
    assert rig.put(90) == [Outcome.OK]
    assert rig.store.stats().evictions == 3, "its own need and two more, whatever lies between the watermarks"
    assert rig.put(91) == [Outcome.OK]
    assert rig.store.stats().evictions == 5, "below the high watermark, too"
    assert [rig.store.sweep() > 0 for _ in range(5)] == [True, True, True, True, False]
    assert rig.store.usage().stored_bytes == CAPACITY_BYTES * 8 // 10
    assert rig.put(92) == [Outcome.OK]
    assert rig.store.stats().evictions == 12, "nothing more, until the high watermark is crossed again"


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
