"""A small store whose tenants have limits."""

from __future__ import annotations

from pathlib import Path

from hicache.backends.base import GetItem, PutItem
from hicache.backends.faulty import FaultyBackend
from hicache.backends.file_store import FileBackend
from hicache.backends.store import ObjectStore
from hicache.backends.tenant_limits import StoreLimits, TenantLimits
from hicache.outcome import Outcome
from tests.backends.payloads import OTHER_TENANT, TENANT, key, payload

SLOT = 64 << 10
OBJECT_BYTES = SLOT - 4096  # what fills a slot with its header
SLOTS = 100
THIRD_TENANT = b"3" * 16


class Rig:
    """A store of SLOTS slots with limits; ``now_s`` is both clocks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_s = 1_000_000.0
        self.store: ObjectStore

    def open(self, *, pin_share: float = 0.25, objects_max: int = 0, **by_tenant: TenantLimits) -> ObjectStore:
        """``mine`` and ``other`` are the limits of the two tenants."""
        digests = {"mine": TENANT, "other": OTHER_TENANT, "third": THIRD_TENANT}
        self.files = FileBackend.open(self.directory, capacity_bytes=SLOTS * SLOT)
        self.faulty = FaultyBackend(self.files)
        self.store = ObjectStore(
            self.faulty,
            object_bytes_max=SLOTS * SLOT,
            high_watermark=0.9,
            low_watermark=0.8,
            free_space_floor_bytes=0,
            objects_max=objects_max,
            limits=StoreLimits(
                by_tenant={digests[name]: limits for name, limits in by_tenant.items()}, pin_share=pin_share
            ),
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
        )
        return self.store

    def put(self, *numbers: int, tenant: bytes = TENANT, size: int = OBJECT_BYTES) -> list[Outcome]:
        return self.store.put([PutItem(key(number, tenant), memoryview(payload(number, size))) for number in numbers])

    def put_each(self, numbers: range, tenant: bytes = TENANT) -> None:
        for number in numbers:
            assert self.put(number, tenant=tenant) == [Outcome.OK]

    def present(self, numbers: range, tenant: bytes = TENANT) -> list[int]:
        """Which are on the medium, without counting as use."""
        found = self.files.contains([key(number, tenant) for number in numbers])
        return [number for number, is_there in zip(numbers, found, strict=True) if is_there]

    def looked_up(self, *numbers: int, tenant: bytes = TENANT) -> list[Outcome]:
        return self.store.lookup([key(number, tenant) for number in numbers])[0]

    def get(self, number: int) -> Outcome:
        return self.store.get_into([GetItem(key(number), memoryview(bytearray(OBJECT_BYTES)))])[0]

    def pin(self, *numbers: int, pin_s: float = 100.0, tenant: bytes = TENANT) -> list[Outcome]:
        return self.store.pin([key(number, tenant) for number in numbers], pin_s=pin_s)
