"""The wall clock jumps by days: nothing is lost early by a clock that goes back, and leases and pins do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.base import PutItem
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.store import ObjectStore
from hicache.backends.tenant_limits import StoreLimits, TenantLimits
from hicache.outcome import Outcome
from tests.backends.payloads import key

DAY_S = 86_400.0
T0_S = 1_800_000_000.0


class Clocks:
    """A wall clock that can be set, and one that only goes on."""

    def __init__(self) -> None:
        self.wall_s = T0_S
        self.steady_s = 1000.0

    def wall(self) -> float:
        return self.wall_s

    def steady(self) -> float:
        return self.steady_s


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def store(tmp_path: Path, clocks: Clocks) -> Iterator[ObjectStore]:
    opened = open_store(tmp_path, clocks)
    yield opened
    opened.close()


def open_store(directory: Path, clocks: Clocks) -> ObjectStore:
    """With a time to live of a day."""
    return ObjectStore(
        LmdbBackend.open(directory / "store", capacity_bytes=4 << 20, wall_clock=clocks.wall),
        object_bytes_max=1 << 20,
        free_space_floor_bytes=0,
        limits=StoreLimits(TenantLimits(ttl_s=DAY_S)),
        clock=clocks.steady,
        wall_clock=clocks.wall,
    )


def put(store: ObjectStore, *numbers: int) -> None:
    outcomes = store.put([PutItem(key(number), memoryview(b"x" * 100)) for number in numbers])
    assert outcomes == [Outcome.OK] * len(numbers)


def present(store: ObjectStore, *numbers: int) -> list[bool]:
    return [outcome is Outcome.OK for outcome in store.lookup([key(number) for number in numbers])[0]]


@pytest.mark.parametrize("days", [-400, -3, -0.01])
def test_a_clock_that_is_set_back_makes_objects_live_longer_never_shorter(
    days: float, store: ObjectStore, clocks: Clocks
) -> None:
    put(store, 1)
    clocks.wall_s += days * DAY_S
    assert present(store, 1) == [True]
    put(store, 2)
    clocks.wall_s += 0.9 * DAY_S
    assert present(store, 1, 2) == [True, True]
    assert store.sweep() == 0


@pytest.mark.parametrize("days", [2, 400])
def test_a_clock_that_is_set_forward_expires_what_was_not_used_and_nothing_new(
    days: float, store: ObjectStore, clocks: Clocks
) -> None:
    put(store, 1)
    clocks.wall_s += days * DAY_S
    put(store, 2)
    assert present(store, 1, 2) == [False, True]
    assert store.sweep() == 1
    clocks.wall_s = T0_S  # and right again
    assert present(store, 2) == [True]
    put(store, 3)
    clocks.wall_s += 0.5 * DAY_S
    assert present(store, 2, 3) == [True, True]


def test_the_order_of_use_survives_a_clock_that_goes_back(store: ObjectStore, clocks: Clocks) -> None:
    put(store, 1)
    clocks.wall_s -= 30 * DAY_S
    put(store, 2)
    assert present(store, 1) == [True]  # used last, by a clock that says otherwise
    residents = store._catalog.residents
    used = [float(residents._used.array[slot]) for slot in residents.slots([key(2), key(1)]).tolist()]
    assert used == sorted(used)
    assert len(set(used)) == 2


@pytest.mark.parametrize("days", [-400, 400])
def test_leases_and_pins_go_by_a_clock_that_nobody_sets(days: float, store: ObjectStore, clocks: Clocks) -> None:
    put(store, 1, 2)
    _, lease_id = store.lookup([key(1)], lease_s=10.0)
    assert store.pin([key(2)], pin_s=10.0) == [Outcome.OK]
    clocks.wall_s += days * DAY_S
    clocks.steady_s += 9.0
    assert store.renew(lease_id, lease_s=10.0)
    assert (store.stats().holds.leases, store.stats().holds.pins) == (1, 1)
    clocks.steady_s += 10.5
    assert (store.stats().holds.leases, store.stats().holds.pins) == (0, 0)


def test_times_of_the_future_on_the_medium_count_as_now_after_a_restart(tmp_path: Path, clocks: Clocks) -> None:
    clocks.wall_s += 400 * DAY_S
    store = open_store(tmp_path, clocks)
    put(store, 1)
    store.close()
    clocks.wall_s = T0_S
    store = open_store(tmp_path, clocks)
    assert present(store, 1) == [True]
    put(store, 2)
    clocks.wall_s += 1.5 * DAY_S
    assert present(store, 1, 2) == [False, False], "it does not live for 400 days"
    store.close()
