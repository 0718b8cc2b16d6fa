"""The object store: what leases keep from eviction, and for how long."""

from __future__ import annotations

import pytest

from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import key
from tests.backends.store_rig import KIB, MIB, Rig, fill


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


def test_no_lease_is_given_for_nothing(rig: Rig) -> None:
    rig.put(1)
    assert rig.store.lookup([key(1)])[1] == 0
    assert rig.store.lookup([key(2)], lease_s=5.0)[1] == 0
    assert not rig.store.renew(0, lease_s=1.0)
    assert not rig.store.release(0)


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
