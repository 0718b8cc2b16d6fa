"""Limits of tenants in the object store: quotas, shares, time to live and pins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.backends.tenant_limits import TenantLimits
from hicache.outcome import Outcome
from tests.backends.limits_rig import SLOT, SLOTS, THIRD_TENANT, Rig
from tests.backends.payloads import OTHER_TENANT, TENANT, key


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "store")
    yield rig
    rig.store.close()


class TestQuotas:
    @pytest.mark.parametrize(
        "limits", [TenantLimits(quota_bytes=20 * SLOT), TenantLimits(quota_objects=20)], ids=["bytes", "objects"]
    )
    def test_a_tenant_at_its_quota_makes_room_with_its_own_least_recently_used(
        self, rig: Rig, limits: TenantLimits
    ) -> None:
        rig.open(mine=limits)
        rig.put_each(range(5), OTHER_TENANT)
        rig.put_each(range(20))
        assert rig.store.stats().evictions == 0
        rig.looked_up(0)
        assert rig.put(*range(20, 26)) == [Outcome.OK] * 6
        assert rig.present(range(26)) == [0, *range(7, 26)]
        assert rig.present(range(5), OTHER_TENANT) == list(range(5))
        assert (rig.store.stats().quota_evictions, rig.store.stats().evictions) == (6, 6)
        assert [stats.evictions for stats in rig.store.tenant_stats([TENANT, OTHER_TENANT])] == [6, 0]

    def test_a_batch_larger_than_the_quota_leaves_its_last_objects(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(quota_bytes=20 * SLOT))
        assert rig.put(*range(50)) == [Outcome.OK] * 50
        assert rig.store.tenant_usage(TENANT).stored_bytes == 20 * SLOT
        assert rig.present(range(50))[-1] == 49

    def test_an_object_above_the_quota_finds_no_space_and_costs_nothing(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(quota_bytes=4 * SLOT))
        rig.put_each(range(4))
        assert rig.put(9, size=5 * SLOT) == [Outcome.NO_SPACE]
        assert rig.present(range(4)) == list(range(4))

    def test_what_is_leased_or_pinned_leaves_no_space_and_the_rest_of_a_batch_still_fits(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(quota_objects=6))
        rig.put_each(range(6))
        _, lease = rig.store.lookup([key(number) for number in range(3)], lease_s=10.0)
        assert rig.pin(3, 4) == [Outcome.OK] * 2
        assert rig.put(10) == [Outcome.OK]
        assert rig.present(range(6)) == [0, 1, 2, 3, 4]
        rig.store.lookup([key(10)], lease_s=10.0)
        assert rig.put(11) == [Outcome.NO_SPACE]
        assert rig.present(range(12)) == [0, 1, 2, 3, 4, 10]
        rig.store.release(lease)
        assert rig.put(12, 13) == [Outcome.OK] * 2

    def test_a_delete_that_fails_does_not_let_a_tenant_above_its_quota(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(quota_objects=4))
        rig.put_each(range(4))
        rig.faulty.arm("delete", Fault(FaultKind.EIO))
        assert rig.put(5) == [Outcome.NO_SPACE]
        assert rig.store.tenant_usage(TENANT).objects == 4
        rig.faulty.disarm()
        assert rig.put(5) == [Outcome.OK]

    def test_a_quota_that_became_smaller_holds_from_the_next_put_on(self, rig: Rig) -> None:
        rig.open()
        rig.put_each(range(20))
        rig.store.close()
        rig.open(mine=TenantLimits(quota_objects=5))
        assert rig.put(20) == [Outcome.OK]
        assert rig.store.tenant_usage(TENANT).objects == 5


class TestShares:
    def test_a_flood_costs_a_tenant_within_its_share_nothing(self, rig: Rig) -> None:
        rig.open()
        rig.put_each(range(40), OTHER_TENANT)  # as many as its share of what stays, and the oldest
        rig.put_each(range(300))
        assert rig.present(range(40), OTHER_TENANT) == list(range(40))
        assert rig.store.tenant_usage(TENANT).objects in range(40, 51)

    def test_what_others_leave_is_borrowed_and_given_back(self, rig: Rig) -> None:
        rig.open()
        rig.put_each(range(90))
        rig.put_each(range(100, 140), OTHER_TENANT)
        assert rig.present(range(100, 140), OTHER_TENANT) == list(range(100, 140))
        assert rig.store.tenant_usage(TENANT).objects >= 40

    def test_a_tenant_with_twice_the_weight_keeps_twice_as_much(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(weight=2.0), other=TenantLimits())
        for number in range(0, 400, 5):
            rig.put_each(range(number, number + 5))
            rig.put_each(range(number, number + 5), OTHER_TENANT)
        rig.put(1000)
        mine, other = (rig.store.tenant_usage(tenant).objects for tenant in (TENANT, OTHER_TENANT))
        assert 80 <= mine + other <= 90
        assert abs(mine - 2 * other) <= 10

    def test_a_borrower_whose_objects_are_leased_costs_nobody_within_his_share_anything(self, rig: Rig) -> None:
        rig.open()
        rig.put_each(range(60))
        rig.store.lookup([key(number) for number in range(50)], lease_s=10.0)  # while all of the store is its share
        rig.put_each(range(25), OTHER_TENANT)
        rig.put_each(range(100, 130), THIRD_TENANT)
        rig.put_each(range(200, 300), THIRD_TENANT)
        assert rig.present(range(25), OTHER_TENANT) == list(range(25))
        assert rig.present(range(50)) == list(range(50))

    def test_what_others_left_above_the_low_watermark_costs_nobody_within_his_share_anything(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.backends.eviction.AHEAD_OBJECTS", 2)
        rig.open()
        rig.put_each(range(60))
        rig.store.lookup([key(number) for number in range(50)], lease_s=10.0)
        rig.put_each(range(30), OTHER_TENANT)
        rig.put(60)  # crosses the high watermark, and removes a part of what is above the low one
        rig.put_each(range(30, 36), OTHER_TENANT)
        while rig.store.sweep():
            pass
        assert rig.present(range(36), OTHER_TENANT) == list(range(36))
        assert rig.present(range(61)) == list(range(50)), "who crossed it has nothing left to give"

    def test_a_tenant_that_leases_all_it_puts_keeps_what_it_put_last(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(weight=2.0), other=TenantLimits())
        rig.put_each(range(60), OTHER_TENANT)
        for number in range(100):
            rig.put(number)
            rig.store.lookup([key(number)], lease_s=1000.0)
            assert rig.present(range(max(0, number - 9), number + 1)) == [*range(max(0, number - 9), number + 1)]
        assert rig.store.stats().holds.leased_keys == SLOTS // 2 * 2 // 3
        _, lease = rig.store.lookup([key(number, OTHER_TENANT) for number in range(60)], lease_s=1000.0)
        assert lease, "leases of one tenant leave those of others their part"

    def test_at_objects_max_shares_are_of_objects_so_many_small_ones_do_not_push_out_few_large_ones(
        self, rig: Rig
    ) -> None:
        rig.open(objects_max=40)
        rig.put_each(range(10), OTHER_TENANT)
        for start in range(0, 300, 5):
            assert rig.put(*range(start, start + 5), size=100) == [Outcome.OK] * 5
        assert rig.present(range(10), OTHER_TENANT) == list(range(10))
        assert rig.present(range(270, 300)) == list(range(270, 300))
        rig.put_each(range(10, 20), OTHER_TENANT)
        assert rig.present(range(20), OTHER_TENANT) == list(range(20))
        assert rig.present(range(300)) == list(range(280, 300))

    def test_a_full_medium_costs_the_tenant_that_puts(self, rig: Rig) -> None:
        rig.open()
        rig.put_each(range(5), OTHER_TENANT)
        rig.put_each(range(5))
        rig.faulty.arm("put", Fault(FaultKind.ENOSPC, times=1))
        assert rig.put(10) == [Outcome.OK]
        assert rig.present(range(5), OTHER_TENANT) == list(range(5))
        assert rig.present(range(5)) == [1, 2, 3, 4]


class TestTimeToLive:
    def test_an_object_expires_after_its_last_use_and_only_for_its_tenant(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(ttl_s=60.0))
        rig.put(1, 2)
        rig.put(1, tenant=OTHER_TENANT)
        rig.now_s += 59.0
        assert rig.looked_up(1) == [Outcome.OK]
        rig.now_s += 2.0
        assert rig.looked_up(1, 2) == [Outcome.OK, Outcome.ABSENT]
        assert (rig.get(2), rig.get(1)) == (Outcome.ABSENT, Outcome.OK)
        rig.now_s += 1000.0
        assert rig.looked_up(1, tenant=OTHER_TENANT) == [Outcome.OK]
        assert rig.present(range(1, 3)) == [1, 2], "nothing has swept yet"

    def test_a_sweep_removes_what_has_expired_in_bounded_batches(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.backends.eviction.EVICTION_KEYS_MAX", 4)
        rig.open(mine=TenantLimits(ttl_s=60.0))
        rig.put(*range(10))
        rig.put(*range(10), tenant=OTHER_TENANT)
        assert rig.store.sweep() == 0
        rig.now_s += 61.0
        rig.put(20)
        assert [rig.store.sweep() for _ in range(4)] == [4, 4, 2, 0]
        assert rig.present(range(21)) == [20]
        assert rig.present(range(10), OTHER_TENANT) == list(range(10))
        assert (rig.store.stats().expirations, rig.store.stats().evictions) == (10, 0)

    def test_a_restart_does_not_make_objects_younger(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(ttl_s=60.0))
        rig.now_s = 4_000_000_000.0  # files know when they were written by themselves
        rig.put(1, 2)
        rig.looked_up(1, 2)
        rig.store.close()
        rig.open(mine=TenantLimits(ttl_s=60.0))
        rig.now_s += 50.0
        assert rig.looked_up(1) == [Outcome.OK]
        rig.now_s += 11.0
        assert rig.looked_up(1, 2) == [Outcome.OK, Outcome.ABSENT]

    def test_a_clock_that_goes_back_expires_nothing_early(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(ttl_s=60.0))
        rig.put(1)
        rig.now_s -= 10_000.0
        assert rig.looked_up(1) == [Outcome.OK]
        rig.put(2)
        assert rig.store.sweep() == 0
        rig.now_s += 59.0
        assert rig.looked_up(1, 2) == [Outcome.OK, Outcome.OK]

    def test_leases_and_pins_outlast_the_time_to_live(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(ttl_s=5.0))
        rig.put(1, 2, 3)
        rig.store.lookup([key(1)], lease_s=20.0)
        rig.pin(2, pin_s=20.0)
        rig.now_s += 10.0
        assert rig.looked_up(3) == [Outcome.ABSENT]
        rig.store.sweep()
        assert (rig.get(1), rig.get(2)) == (Outcome.OK, Outcome.OK)
        rig.now_s += 10.0
        assert rig.looked_up(1, 2) == [Outcome.ABSENT, Outcome.ABSENT]

    def test_an_expired_object_that_is_put_again_is_there_again_without_a_copy(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(ttl_s=5.0))
        rig.put(1)
        rig.now_s += 6.0
        assert rig.put(1) == [Outcome.EXISTS]
        assert rig.looked_up(1) == [Outcome.OK]

    def test_an_expired_object_that_cannot_be_deleted_stays_absent(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(ttl_s=5.0))
        rig.put(1)
        rig.now_s += 6.0
        rig.faulty.arm("delete", Fault(FaultKind.EIO))
        assert rig.store.sweep() == 0
        assert rig.looked_up(1) == [Outcome.ABSENT]
        rig.faulty.disarm()
        assert rig.store.sweep() == 1
        assert rig.present(range(2)) == []


class TestPins:
    def test_pinned_objects_stay_until_the_pin_ends(self, rig: Rig) -> None:
        rig.open()
        rig.put_each(range(90))
        assert rig.pin(0, 1, 500, pin_s=100.0) == [Outcome.OK, Outcome.OK, Outcome.ABSENT]
        assert (rig.store.stats().holds.pins, rig.store.stats().holds.pinned_bytes) == (2, 2 * SLOT)
        rig.put_each(range(100, 300))
        assert rig.present(range(2)) == [0, 1]
        rig.now_s += 100.0
        assert rig.store.stats().holds.pins == 0
        rig.put_each(range(300, 500))
        assert rig.present(range(2)) == []

    def test_an_unpinned_object_may_go_and_a_pin_is_only_made_longer(self, rig: Rig) -> None:
        rig.open()
        rig.put_each(range(3))
        rig.pin(0, 1, pin_s=100.0)
        rig.pin(1, pin_s=5.0)
        rig.pin(1, pin_s=200.0)
        assert rig.store.unpin([key(0), key(2)]) == [Outcome.OK, Outcome.ABSENT]
        rig.now_s += 150.0
        rig.put_each(range(100, 300))
        assert rig.present(range(3)) == [1]

    def test_pins_are_limited_by_bytes_and_by_count(self, rig: Rig) -> None:
        rig.open(pin_share=0.1, mine=TenantLimits(weight=3.0), other=TenantLimits(pinned_objects_max=1))
        rig.put_each(range(10))
        rig.put_each(range(3), OTHER_TENANT)
        assert rig.pin(*range(10)) == [Outcome.OK] * 7 + [Outcome.REFUSED] * 3
        assert rig.pin(0, 1, tenant=OTHER_TENANT) == [Outcome.OK, Outcome.REFUSED]
        rig.store.unpin([key(0)])
        assert rig.pin(9) == [Outcome.OK]

    def test_pins_of_one_tenant_leave_the_store_to_others(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(), other=TenantLimits())
        rig.put_each(range(90))
        assert rig.pin(*range(90)).count(Outcome.OK) == 12
        assert rig.put(*range(100, 180), tenant=OTHER_TENANT) == [Outcome.OK] * 80

    def test_what_pins_may_protect_follows_the_capacity(self, rig: Rig) -> None:
        rig.open(pin_share=0.1)
        rig.put_each(range(40))
        assert rig.pin(*range(12)).count(Outcome.OK) == 10
        rig.store.resize(2 * SLOTS * SLOT)
        assert rig.pin(*range(10, 22)).count(Outcome.OK) == 10
        rig.store.unpin([key(number) for number in range(5, 22)])
        rig.store.resize(SLOTS * SLOT)
        assert rig.pin(*range(30, 40)) == [Outcome.OK] * 5 + [Outcome.REFUSED] * 5

    def test_what_its_owner_deletes_or_what_is_corrupt_is_pinned_no_more(self, rig: Rig) -> None:
        rig.open()
        rig.put(1, 2)
        rig.pin(1, 2)
        assert rig.store.delete([key(1)]) == [Outcome.OK]
        rig.faulty.arm("get_into", Fault(FaultKind.WRONG_BYTES, times=1))
        assert rig.get(2) is Outcome.CORRUPT
        assert (rig.store.stats().holds.pins, rig.store.stats().holds.pinned_bytes) == (0, 0)

    def test_pinning_and_unpinning_for_ever_takes_no_memory(self, rig: Rig) -> None:
        rig.open()
        rig.put(1)
        for _ in range(500):
            rig.pin(1)
            rig.store.unpin([key(1)])
        assert len(rig.store._catalog.pins._expiries) <= 66


class TestManyThreads:
    def run(self, *works: Callable[[], None]) -> None:
        """All at once; fails with what one of them raised."""
        with ThreadPoolExecutor(len(works)) as threads:
            for done in [threads.submit(work) for work in works]:
                done.result(timeout=60)

    def test_puts_of_one_tenant_at_once_keep_its_quota_and_find_room(self, rig: Rig) -> None:
        rig.open(mine=TenantLimits(quota_bytes=40 * SLOT, quota_objects=32))

        def flood(first: int) -> None:
            for number in range(first, first + 60, 4):
                assert rig.put(*range(number, number + 4)) == [Outcome.OK] * 4
                usage = rig.store.tenant_usage(TENANT)
                assert usage.objects <= 32
                assert usage.stored_bytes <= 40 * SLOT

        self.run(*(partial(flood, 1000 * number) for number in range(4)))
        assert rig.store.tenant_usage(TENANT).objects >= 28

    def test_floods_of_two_tenants_at_once_leave_a_third_within_its_share_alone(self, rig: Rig) -> None:
        rig.open()
        rig.put_each(range(26), THIRD_TENANT)
        self.run(
            *(partial(rig.put_each, range(first, first + 80), TENANT) for first in (0, 1000)),
            *(partial(rig.put_each, range(first, first + 80), OTHER_TENANT) for first in (0, 1000)),
        )
        assert rig.present(range(26), THIRD_TENANT) == list(range(26))
