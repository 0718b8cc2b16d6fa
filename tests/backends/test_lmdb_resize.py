"""Another capacity for an LMDB store that is open: full disks, objects in the way, other threads, kills."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from hicache.backends.lmdb_env import LmdbEnvironment
from hicache.backends.lmdb_index import Index
from hicache.backends.lmdb_slab import SLAB_NAME
from hicache.backends.lmdb_store import LmdbBackend
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import fill, get, key, payload, put

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def test_a_larger_capacity_is_used_at_once_and_all_of_it_is_on_the_disk(backend: LmdbBackend, directory: Path) -> None:
    stored = fill(backend, range(40))
    backend.resize(32 * MIB, floor_bytes=0)
    assert backend.usage().capacity_bytes == 32 * MIB
    slab = (directory / SLAB_NAME).stat()
    assert slab.st_blocks * 512 >= slab.st_size == 32 * MIB
    stored += fill(backend, range(100, 140))
    assert len(stored) == 32
    for number in stored:
        assert get(backend, key(number), MIB) == (Outcome.OK, payload(number, MIB))


def test_a_smaller_capacity_moves_what_is_stored_and_gives_the_space_back(
    backend: LmdbBackend, directory: Path
) -> None:
    stored = fill(backend, range(40))
    with pytest.raises(BackendError, match="delete first"):
        backend.resize(8 * MIB, floor_bytes=0)
    assert backend.usage().capacity_bytes == 16 * MIB
    gone, kept = stored[:8], stored[8:]
    backend.delete([key(number) for number in gone])
    backend.resize(8 * MIB, floor_bytes=0)
    assert (directory / SLAB_NAME).stat().st_size == 8 * MIB
    for number in kept:
        assert get(backend, key(number), MIB) == (Outcome.OK, payload(number, MIB))
    assert put(backend, (key(99), b"x")) == [Outcome.NO_SPACE]
    backend.close()
    backend = LmdbBackend.open(directory, capacity_bytes=8 * MIB)
    for number in kept:
        assert get(backend, key(number), MIB) == (Outcome.OK, payload(number, MIB))
    backend.close()


def test_a_store_that_is_read_and_written_meanwhile_is_resized(backend: LmdbBackend) -> None:
    put(backend, *[(key(number), payload(number, MIB)) for number in range(4)])
    stop = threading.Event()
    failures: list[str] = []

    def work(seed: int) -> None:
        number = 1000 * seed
        while not stop.is_set():
            number += 1
            if put(backend, (key(number), payload(number, MIB))) != [Outcome.OK]:
                failures.append(f"put {number}")
            if get(backend, key(number), MIB) != (Outcome.OK, payload(number, MIB)):
                failures.append(f"get {number}")
            if get(backend, key(number % 4), MIB) != (Outcome.OK, payload(number % 4, MIB)):
                failures.append(f"old object in {number}")
            backend.delete([key(number)])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        for capacity_bytes in (32, 7, 20, 7, 16):
            backend.resize(capacity_bytes * MIB, floor_bytes=0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert backend.usage().stored_bytes == 4 * MIB


def test_a_capacity_that_the_disk_does_not_have_is_refused_and_nothing_changes(
    backend: LmdbBackend, directory: Path
) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        backend.resize(1 << 47, floor_bytes=0)
    assert (directory / SLAB_NAME).stat().st_size == 16 * MIB
    assert backend.usage().capacity_bytes == 16 * MIB
    assert len(fill(backend, range(40))) == 16


@pytest.mark.parametrize("full_at", ["slab", "index"])
def test_a_disk_that_is_full_in_the_middle_of_a_resize_leaves_the_old_size(
    backend: LmdbBackend, directory: Path, monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        if full_at == "slab":
            patch.setattr(os, "posix_fallocate", no_space)
        else:
            patch.setattr(LmdbEnvironment, "_enlarge", no_space)
        with pytest.raises((ConfigError, OSError)):
            backend.resize(3 << 30, floor_bytes=0)
    assert (directory / SLAB_NAME).stat().st_size == 16 * MIB
    assert len(fill(backend, range(40))) == 16


def test_an_index_that_cannot_be_read_in_a_resize_leaves_the_old_capacity(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = fill(backend, range(40))
    backend.delete([key(number) for number in stored[:8]])

    def unreadable(_: Index) -> Iterator[object]:
        raise lmdb.Error("unreadable")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "records", unreadable)
        with pytest.raises(BackendError, match="unreadable"):
            backend.resize(8 * MIB, floor_bytes=0)
    assert backend.usage().capacity_bytes == 16 * MIB
    assert len(fill(backend, range(100, 140))) == 8, "all that is free, also behind the smaller capacity"
    backend.resize(32 * MIB, floor_bytes=0)
    assert len(fill(backend, range(200, 240))) == 16


RESIZE_UNTIL_KILLED = """
import sys
from pathlib import Path
from hicache.backends.lmdb_store import LmdbBackend
backend = LmdbBackend.open(Path(sys.argv[1]), capacity_bytes=16 << 20)
print("resizing", flush=True)
while True:
    for mib in (40, 8, 24, 16):
        backend.resize(mib << 20, floor_bytes=0)
"""


def test_a_resize_that_is_killed_leaves_a_store_that_opens_whole(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    fill(backend, range(16))
    backend.delete([key(number) for number in range(0, 16, 2)])
    backend.close()
    kept = range(1, 16, 2)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", RESIZE_UNTIL_KILLED, str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "resizing\n"
        finally:
            process.kill()
            process.communicate()
        backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
        for number in kept:
            assert get(backend, key(number), MIB) == (Outcome.OK, payload(number, MIB))
        assert backend.usage().stored_bytes == 8 * MIB
        backend.close()
