"""Reads past the page cache, and acknowledgements of what is on the medium."""

from __future__ import annotations

import logging
import mmap
import os
from collections import Counter
from pathlib import Path

import pytest

from hicache.backends.base import GetItem, PutItem
from hicache.backends.file_calls import FileCalls
from hicache.backends.file_direct import is_aligned, wins
from hicache.backends.file_layout import object_path
from hicache.backends.file_settings import FileSettings
from hicache.backends.file_store import FileBackend
from hicache.memory_limits import total_memory_bytes
from hicache.notices import Notices
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put

MIB = 1 << 20
CAPACITY_BYTES = 32 * MIB
SIZES = (1, 4095, 4096, 4097, MIB - 4096, MIB, MIB + 1, 3 * MIB + 12_345)


class ColdCalls(FileCalls):
    """Nothing is in the page cache, as far as this tells; counts what is read past it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def read_cached(self, fd: int, targets: list[memoryview], offset: int) -> int:
        raise BlockingIOError

    def open_direct(self, path: str) -> int:
        self.counts["direct"] += 1
        return super().open_direct(path)

    def sync(self, fd: int) -> None:
        self.counts["sync"] += 1
        super().sync(fd)

    def sync_folder(self, path: str) -> None:
        self.counts["folder"] += 1
        super().sync_folder(path)


def open_direct(directory: Path, calls: FileCalls) -> FileBackend:
    """A store that reads past the page cache what that does not have."""
    settings = FileSettings(direct="on")
    return FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES, settings=settings, calls=calls)


@pytest.mark.parametrize("shift", [0, 1, 512])
def test_cold_objects_of_any_size_are_read_into_targets_at_any_address(tmp_path: Path, shift: int) -> None:
    calls = ColdCalls()
    backend = open_direct(tmp_path / "store", calls)
    memory = memoryview(mmap.mmap(-1, 4 * MIB))
    for size in SIZES:
        put(backend, (key(size), payload(size, size)))
        target = memory[shift : shift + size]
        assert backend.get_into([GetItem(key(size), target)]) == [Outcome.OK]
        assert target == payload(size, size)
        assert memory[shift + size : shift + size + 4096] == bytes(4096)
        memory[shift : shift + size] = bytes(size)
    assert calls.counts["direct"] == len(SIZES)
    backend.close()


def test_cold_objects_that_are_damaged_or_of_another_size_are_told_apart(tmp_path: Path) -> None:
    backend = open_direct(tmp_path / "store", ColdCalls())
    for size in SIZES[3:]:
        put(backend, (key(size), payload(size, size)))
        assert get(backend, key(size), size - 1)[0] is Outcome.SIZE_MISMATCH
        assert get(backend, key(size), size + 1)[0] is Outcome.SIZE_MISMATCH
        path = object_path(str(tmp_path / "store" / "objects"), key(size))
        os.truncate(path, os.path.getsize(path) - 1)
        assert get(backend, key(size), size)[0] is Outcome.CORRUPT
        assert backend.contains([key(size)]) == [False]
    backend.close()


def test_a_cold_object_whose_end_is_missing_is_corrupt_in_aligned_targets_too(tmp_path: Path) -> None:
    backend = open_direct(tmp_path / "store", ColdCalls())
    target = memoryview(mmap.mmap(-1, 3 * MIB))
    for number, cut_bytes in enumerate((1, 4096, MIB, MIB + 1, 3 * MIB)):
        put(backend, (key(number), payload(number, 3 * MIB)))
        path = object_path(str(tmp_path / "store" / "objects"), key(number))
        os.truncate(path, os.path.getsize(path) - cut_bytes)
        assert backend.get_into([GetItem(key(number), target)]) == [Outcome.CORRUPT]
    backend.close()


def test_what_the_page_cache_has_is_read_from_there(tmp_path: Path) -> None:
    class WarmCalls(ColdCalls):
        def read_cached(self, fd: int, targets: list[memoryview], offset: int) -> int:
            self.counts["asked"] += 1
            return FileCalls.read_cached(self, fd, targets, offset)

    calls = WarmCalls()
    backend = open_direct(tmp_path / "store", calls)
    put(backend, (key(1), payload(1, 2 * MIB)))
    assert get(backend, key(1), 2 * MIB) == (Outcome.OK, payload(1, 2 * MIB))
    assert calls.counts == {"asked": 1}
    backend.close()


def test_direct_reads_are_tried_only_for_a_store_that_memory_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices = Notices(logging.getLogger(__name__))
    tried: list[Path] = []

    def probe(directory: Path) -> tuple[float, float]:
        tried.append(directory)
        return speeds

    monkeypatch.setattr("hicache.backends.file_direct._probe", probe)
    speeds = (3.0, 2.0)
    assert wins(tmp_path, setting="on", capacity_bytes=1, notices=notices)
    assert not wins(tmp_path, setting="off", capacity_bytes=total_memory_bytes() + 1, notices=notices)
    assert not wins(tmp_path, setting="auto", capacity_bytes=total_memory_bytes(), notices=notices)
    assert tried == []
    assert wins(tmp_path, setting="auto", capacity_bytes=total_memory_bytes() + 1, notices=notices)
    speeds = (2.0, 1.9)
    assert not wins(tmp_path, setting="auto", capacity_bytes=total_memory_bytes() + 1, notices=notices)


def test_the_trial_measures_something_and_leaves_nothing(tmp_path: Path) -> None:
    wins(
        tmp_path,
        setting="auto",
        capacity_bytes=total_memory_bytes() + 1,
        notices=Notices(logging.getLogger(__name__)),
    )
    assert list(tmp_path.iterdir()) == []


def test_whole_blocks_at_the_start_of_one_are_aligned() -> None:
    memory = memoryview(mmap.mmap(-1, 16384))
    assert is_aligned(memory[4096:12288])
    assert not is_aligned(memory[1:4097])
    assert not is_aligned(memory[4096:5000])


def test_with_fsync_content_is_synced_before_it_has_a_name_and_names_once_a_batch(tmp_path: Path) -> None:
    calls = ColdCalls()
    settings = FileSettings(fsync=True)
    backend = FileBackend.open(tmp_path / "store", capacity_bytes=CAPACITY_BYTES, settings=settings, calls=calls)
    items = [PutItem(key(number), memoryview(payload(number, 5000))) for number in range(400)]
    folders = {os.path.dirname(object_path("", item.key)) for item in items}
    assert backend.put(items) == [Outcome.OK] * 400
    assert calls.counts == {"sync": 400, "folder": len(folders)}
    assert backend.put(items[:3]) == [Outcome.EXISTS] * 3
    assert calls.counts == {"sync": 400, "folder": len(folders)}
    assert backend.delete([items[0].key]) == [Outcome.OK]
    assert calls.counts["folder"] == len(folders) + 1
    backend.close()
