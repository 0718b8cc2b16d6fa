"""A model beside the limits of tenants: whatever three of them do, each gets what it was promised."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache.backends.base import GetItem, PutItem
from hicache.backends.events import Subscription
from hicache.backends.file_store import FileBackend
from hicache.backends.store import ObjectStore
from hicache.backends.tenant_limits import StoreLimits, TenantLimits
from hicache.outcome import Outcome
from tests.backends.payloads import key, payload

SLOT = 8192
SLOTS = 40
LOW = 0.7
HEAVY, CAPPED, BRIEF = b"heavy-tenant-123", b"capped-tenant-12", b"brief-tenant-123"
LIMITS = {
    HEAVY: TenantLimits(weight=2.0, pinned_objects_max=3),
    CAPPED: TenantLimits(quota_bytes=9 * SLOT, quota_objects=8),
    BRIEF: TenantLimits(ttl_s=50.0),
}
WEIGHTS = sum(limits.weight for limits in LIMITS.values())
TENANTS = st.sampled_from(list(LIMITS))
NUMBERS = st.integers(0, 70)
RUNS = st.builds(lambda first, count: list(range(first, min(first + count, 71))), NUMBERS, st.sampled_from([1, 4, 40]))
SIZES = {number: SLOT - 4096 if number % 4 else 2 * SLOT - 4096 for number in range(71)}

Name = tuple[bytes, int]  # tenant, number


class LimitsMachine(RuleBasedStateMachine):
    """``used`` has when each object that may be there was used last; ``pins`` until when some of them must be."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="hicache-limits-"))
        self.now_s = 2_000_000_000.0
        self.used: dict[Name, float] = {}
        self.pins: dict[Name, float] = {}
        self.watched: dict[bytes, tuple[Subscription, set[bytes]]] = {}

    @initialize()
    def open(self) -> None:
        self.backend = FileBackend.open(self.directory, capacity_bytes=SLOTS * SLOT)
        self.store = ObjectStore(
            self.backend,
            object_bytes_max=SLOTS * SLOT,
            high_watermark=0.85,
            low_watermark=LOW,
            free_space_floor_bytes=0,
            limits=StoreLimits(by_tenant=LIMITS, pin_share=0.2),
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
        )
        self.watched = {
            tenant: (self.store.watch(tenant, wake=lambda: None), set().union(*self.store.snapshot(tenant)))
            for tenant in LIMITS
        }

    def there(self) -> set[Name]:
        """What is on the medium."""
        names = list(self.used)
        found = self.backend.contains([key(number, tenant) for tenant, number in names])
        return {name for name, is_there in zip(names, found, strict=True) if is_there}

    def pinned(self) -> set[Name]:
        return {name for name, until_s in self.pins.items() if self.now_s < until_s}

    def stored_bytes(self, names: set[Name], tenant: bytes) -> int:
        return sum(self.backend.stored_bytes(SIZES[number]) for owner, number in names if owner == tenant)

    def is_expired(self, name: Name) -> bool:
        ttl_s = LIMITS[name[0]].ttl_s
        return bool(ttl_s) and name not in self.pinned() and self.used[name] < self.now_s - ttl_s

    def note_used(self, names: set[Name]) -> None:
        self.used.update(dict.fromkeys(names, self.now_s))

    @rule(tenant=TENANTS, numbers=RUNS)
    def put(self, tenant: bytes, numbers: list[int]) -> None:
        before = self.there()
        outcomes = self.store.put(
            [PutItem(key(number, tenant), memoryview(payload(number, SIZES[number]))) for number in numbers]
        )
        self.note_used({(tenant, n) for n, outcome in zip(numbers, outcomes, strict=True) if outcome.is_ok})
        after = self.there()
        for other, limits in LIMITS.items():
            share_bytes = LOW * SLOTS * SLOT * limits.weight / WEIGHTS
            lost = {name for name in before - after if name[0] == other}
            if other != tenant and self.stored_bytes(before, other) <= share_bytes:
                assert not lost, "an object of a tenant within its share, for the put of another"
            if other != tenant and tenant == CAPPED and self.store.usage().stored_bytes < 0.5 * SLOTS * SLOT:
                assert not lost, "evicted although there was room"
        for outcome in outcomes:
            assert outcome in (Outcome.OK, Outcome.EXISTS) or self.pinned(), "no space, although all may go"

    @rule(tenant=TENANTS, numbers=RUNS)
    def look_up(self, tenant: bytes, numbers: list[int]) -> None:
        there = self.there()
        outcomes, _ = self.store.lookup([key(number, tenant) for number in numbers])
        for number, outcome in zip(numbers, outcomes, strict=True):
            name = (tenant, number)
            assert (outcome is Outcome.OK) == (name in there and not self.is_expired(name))
            if outcome is Outcome.OK:
                self.note_used({name})

    @rule(tenant=TENANTS, number=NUMBERS)
    def get(self, tenant: bytes, number: int) -> None:
        name, target = (tenant, number), bytearray(SIZES[number])
        is_there = name in self.there() and not self.is_expired(name)
        outcome = self.store.get_into([GetItem(key(number, tenant), memoryview(target))])[0]
        assert outcome is (Outcome.OK if is_there else Outcome.ABSENT)
        if is_there:
            assert bytes(target) == payload(number, SIZES[number])
            self.note_used({name})

    @rule(tenant=TENANTS, numbers=RUNS, pin_s=st.integers(1, 90))
    def pin(self, tenant: bytes, numbers: list[int], pin_s: int) -> None:
        outcomes = self.store.pin([key(number, tenant) for number in numbers], pin_s=pin_s)
        for number, outcome in zip(numbers, outcomes, strict=True):
            name = (tenant, number)
            if outcome is Outcome.OK:
                self.pins[name] = max(self.now_s + pin_s, self.pins.get(name, 0.0))
            if outcome in (Outcome.OK, Outcome.REFUSED):
                self.note_used({name})

    @rule(tenant=TENANTS, numbers=RUNS)
    def delete_or_unpin(self, tenant: bytes, numbers: list[int]) -> None:
        names = [(tenant, number) for number in numbers]
        keys = [key(number, tenant) for number in numbers]
        outcomes = self.store.unpin(keys)
        assert [outcome is Outcome.OK for outcome in outcomes] == [name in self.pinned() for name in names]
        self.store.delete(keys[:2])
        for name in names:
            self.pins.pop(name, None)

    @rule(seconds=st.sampled_from([1.0, 20.0, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def sweep(self) -> None:
        while self.store.sweep():
            pass
        # What was set aside under a pin counts as used when the pin ends, so only what never was pinned is exact.
        assert not [name for name in self.there() if self.is_expired(name) and name not in self.pins]

    @rule()
    def restart(self) -> None:
        for tenant in LIMITS:  # times of use are written; that of a put is the medium's own, whose clock is another one
            self.look_up(tenant, list(SIZES))
        self.store.close()
        self.pins.clear()
        self.open()

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "store"):
            return
        there = self.there()
        assert self.pinned() <= there
        usage = self.store.tenant_usage(CAPPED)
        assert usage.objects <= 8
        assert usage.stored_bytes <= 9 * SLOT
        assert len([name for name in self.pinned() if name[0] == HEAVY]) <= 3
        for tenant, limits in LIMITS.items():
            assert self.stored_bytes(self.pinned(), tenant) <= 0.2 * SLOTS * SLOT * limits.weight / WEIGHTS
            assert self.store.tenant_usage(tenant).stored_bytes == self.stored_bytes(there, tenant)

    @invariant()
    def watchers_have_the_picture(self) -> None:
        for tenant, (subscription, picture) in self.watched.items():
            lost, events = subscription.take()
            assert not lost
            for event in events:
                assert event.key.startswith(tenant)
                picture.add(event.key) if event.removal is None else picture.discard(event.key)
            assert picture == {key(number, owner) for owner, number in self.there() if owner == tenant}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.directory)


TestLimitsOfTenants = LimitsMachine.TestCase
TestLimitsOfTenants.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
