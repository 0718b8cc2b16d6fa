"""An object store over files whose clock and faults a test moves."""

from __future__ import annotations

from pathlib import Path

from hicache.backends.base import GetItem, PutItem
from hicache.backends.faulty import FaultyBackend
from hicache.backends.file_store import FileBackend
from hicache.backends.store import ObjectStore
from hicache.outcome import Outcome
from tests.backends.payloads import key, payload

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


def fill(rig: Rig, count: int = 90) -> None:
    """Up to the high watermark, one by one so that the order of use is that of the numbers."""
    for number in range(count):
        assert rig.put(number) == [Outcome.OK]
