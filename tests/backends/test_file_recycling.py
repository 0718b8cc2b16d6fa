"""Steady state of the file backend under its store: evicted files are written again, no file is made or removed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hicache.backends.base import PutItem
from hicache.backends.file_calls import FileCalls
from hicache.backends.file_store import FileBackend
from hicache.backends.store import ObjectStore
from hicache.outcome import Outcome
from tests.backends.payloads import key

OBJECT_BYTES = 60 << 10  # 64 KiB with its header
CAPACITY_BYTES = 640 * (64 << 10)
BATCH = 32


class CountingCalls(FileCalls):
    """Counts how files come to be."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def create(self, path: str) -> int:
        self.counts["create"] += 1
        return super().create(path)

    def reopen(self, path: str) -> int:
        self.counts["reopen"] += 1
        return super().reopen(path)

    def remove(self, path: str) -> None:
        self.counts["remove"] += 1
        super().remove(path)


def test_a_full_store_makes_and_removes_no_files(tmp_path: Path) -> None:
    """ext4 looks past every inode that was removed in the last seconds before it gives one to a new file."""
    calls = CountingCalls()
    backend = FileBackend.open(tmp_path / "store", capacity_bytes=CAPACITY_BYTES, calls=calls)
    store = ObjectStore(backend, object_bytes_max=1 << 20, free_space_floor_bytes=0)
    payload = memoryview(bytes(OBJECT_BYTES))

    def put(first: int, count: int) -> None:
        for start in range(first, first + count, BATCH):
            items = [PutItem(key(number), payload) for number in range(start, start + BATCH)]
            assert store.put(items) == [Outcome.OK] * BATCH

    put(0, 768)
    assert calls.counts["create"] > 0
    calls.counts.clear()
    put(768, 1024)
    store.close()
    assert calls.counts == {"reopen": 1024}
