"""A model beside the object store: a dict, and what leases promise, under any sequence of calls."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache.backends.base import Backend, GetItem, PutItem
from hicache.backends.faulty import Fault, FaultKind, FaultyBackend
from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.store import ObjectStore
from hicache.backends.store_stats import NOTHING_HELD, Operation
from hicache.outcome import Outcome
from tests.backends.payloads import OTHER_TENANT, TENANT, key, payload, scanned

CAPACITY_BYTES = 20 * 69_632
NUMBERS = st.integers(min_value=0, max_value=40)
SIZES = {number: (1, 4096, 60_000, 69_617, 200_000)[number % 5] for number in range(41)}


def name_of(number: int) -> bytes:
    """Every third object is another tenant's."""
    return key(number, OTHER_TENANT if number % 3 == 0 else TENANT)


class ObjectStoreMachine(RuleBasedStateMachine):
    """``stored`` is what was acknowledged and not deleted: anything else is wrong, and what is missing was evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="hicache-machine-"))
        self.now_s = 0.0
        self.stored: set[int] = set()
        self.leases: dict[int, tuple[set[int], float]] = {}

    def open_backend(self) -> Backend:
        raise NotImplementedError

    @initialize()
    def open(self) -> None:
        self.faulty = FaultyBackend(self.open_backend())
        self.store = ObjectStore(
            self.faulty,
            object_bytes_max=1 << 20,
            high_watermark=0.9,
            low_watermark=0.6,
            free_space_floor_bytes=0,
            clock=lambda: self.now_s,
            wall_clock=lambda: 1e9 + self.now_s,
        )

    def leased(self) -> set[int]:
        """Numbers that live leases protect."""
        live = [numbers for numbers, expires_at_s in self.leases.values() if self.now_s < expires_at_s]
        return set().union(*live)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=8))
    def put(self, numbers: list[int]) -> None:
        before = self.store.stats().evictions
        room = self.store.usage().stored_bytes + sum(self.faulty.stored_bytes(SIZES[number]) for number in numbers)
        payloads = [memoryview(payload(number, SIZES[number])) for number in numbers]
        outcomes = self.store.put(
            [PutItem(name_of(number), content) for number, content in zip(numbers, payloads, strict=True)]
        )
        for number, outcome in zip(numbers, outcomes, strict=True):
            assert outcome in (Outcome.OK, Outcome.EXISTS, Outcome.NO_SPACE)
            if outcome.is_ok:
                self.stored.add(number)
            else:
                assert self.leased(), "no space, although everything may be evicted"
        if room <= 0.9 * CAPACITY_BYTES - 1:
            assert self.store.stats().evictions == before, "evicted below the high watermark"

    @rule(number=NUMBERS, is_size_right=st.booleans())
    def get(self, number: int, is_size_right: bool) -> None:
        target = bytearray(SIZES[number] + (0 if is_size_right else 1))
        outcome = self.store.get_into([GetItem(name_of(number), memoryview(target))])[0]
        if outcome is Outcome.OK:
            assert number in self.stored
            assert bytes(target) == payload(number, SIZES[number])
        elif is_size_right:
            assert outcome is Outcome.ABSENT
            assert number not in self.leased()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=8), lease_s=st.sampled_from([0.0, 5.0, 20.0]))
    def lookup(self, numbers: list[int], lease_s: float) -> None:
        has_ghosts = self.store.stats().holds.leased_keys > len(
            self.leased()
        )  # leased, deleted, and counted all the same
        outcomes, lease = self.store.lookup([name_of(number) for number in numbers], lease_s=lease_s)
        found = {number for number, outcome in zip(numbers, outcomes, strict=True) if outcome is Outcome.OK}
        assert found <= self.stored
        assert self.leased() & set(numbers) <= found
        if lease:
            catalog = self.store._catalog
            held = catalog.leases.held(lease)
            held_slots = set() if held is None else set(held.tolist())
            protected = {number for number in found if catalog.residents.slots([name_of(number)])[0] in held_slots}
            self.leases[lease] = (protected, self.now_s + lease_s)
        wanted = self.leased() | (found if lease_s > 0 else set())
        assert sum(self.faulty.stored_bytes(SIZES[number]) for number in self.leased()) <= CAPACITY_BYTES // 2
        if sum(self.faulty.stored_bytes(SIZES[number]) for number in wanted) <= CAPACITY_BYTES // 4 and not has_ghosts:
            assert self.leased() == wanted, "half of the share of either tenant"

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=4))
    def delete(self, numbers: list[int]) -> None:
        outcomes = self.store.delete([name_of(number) for number in numbers])
        for number, outcome in zip(numbers, outcomes, strict=True):
            assert outcome is Outcome.ABSENT or number in self.stored or numbers.count(number) > 1
        self.stored -= set(numbers)
        for lease, (leased, expires_at_s) in self.leases.items():
            self.leases[lease] = (leased - set(numbers), expires_at_s)

    @rule(data=st.data())
    def end_or_renew_a_lease(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([*self.leases, 999_999]))
        leased, expires_at_s = self.leases.get(lease, (set(), self.now_s))
        is_live = self.now_s < expires_at_s
        if data.draw(st.booleans()):
            assert self.store.renew(lease, lease_s=10.0) == is_live
            if is_live:
                self.leases[lease] = (leased, self.now_s + 10.0)
        else:
            assert self.store.release(lease) == is_live
            self.leases.pop(lease, None)

    @rule(seconds=st.sampled_from([1.0, 7.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(number=NUMBERS)
    def a_read_finds_wrong_bytes(self, number: int) -> None:
        name = name_of(number)
        self.faulty.arm("get_into", Fault(FaultKind.WRONG_BYTES, times=1, keys=frozenset({name})))
        target = bytearray(SIZES[number])
        outcome = self.store.get_into([GetItem(name, memoryview(target))])[0]
        self.faulty.disarm()
        assert outcome in (Outcome.CORRUPT, Outcome.ABSENT)
        assert self.store.lookup([name])[0] == [Outcome.ABSENT]
        self.delete([number])

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.leases.clear()
        self.open()

    @invariant()
    def objects_are_conserved(self) -> None:
        if not hasattr(self, "store"):
            return
        stats = self.store.stats()
        for operation in Operation:
            assert stats.asked.get(operation, 0) == sum(stats.finished[operation].values())
            assert stats.open.get(operation, 0) == 0
        gone = sum(stats.removed.values(), NOTHING_HELD)
        assert stats.recovered + stats.added == gone + stats.resident
        assert stats.leaving == NOTHING_HELD

    @invariant()
    def bytes_are_conserved(self) -> None:
        if not hasattr(self, "store"):
            return
        usage = self.store.usage()
        told = {stored.key: stored.size_bytes for stored in scanned(self.faulty)}
        assert set(told) <= {name_of(number) for number in self.stored}
        assert {name_of(number) for number in self.leased()} <= set(told)
        assert usage.payload_bytes == sum(told.values())
        assert usage.stored_bytes == sum(map(self.faulty.stored_bytes, told.values())) <= CAPACITY_BYTES
        tenants = [self.store.tenant_usage(tenant) for tenant in (TENANT, OTHER_TENANT)]
        assert usage.payload_bytes == sum(tenant.payload_bytes for tenant in tenants)
        assert usage.stored_bytes == sum(tenant.stored_bytes for tenant in tenants)
        assert usage.objects == sum(tenant.objects for tenant in tenants)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.directory)


class LmdbStoreMachine(ObjectStoreMachine):
    def open_backend(self) -> Backend:
        return LmdbBackend.open(self.directory, capacity_bytes=CAPACITY_BYTES)


class FileStoreMachine(ObjectStoreMachine):
    def open_backend(self) -> Backend:
        return FileBackend.open(self.directory, capacity_bytes=CAPACITY_BYTES)


BOUNDS = settings(max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestObjectStoreOverLmdb = LmdbStoreMachine.TestCase
TestObjectStoreOverLmdb.settings = BOUNDS
TestObjectStoreOverFiles = FileStoreMachine.TestCase
TestObjectStoreOverFiles.settings = BOUNDS
