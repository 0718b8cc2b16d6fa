"""A slab on a bad medium: what cannot be brought is an error of one object, and what is written is whole again."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from hicache.backends import slab_pages
from hicache.backends.lmdb_layout import CHUNK_BYTES
from hicache.backends.lmdb_slab import SLAB_NAME, Slab
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.slab_pages import SlabPages
from hicache.checksum import payload_hasher
from hicache.errors import BackendError
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put

SIZE = 3 * CHUNK_BYTES + 100


class Medium:
    """What madvise(2) says of it, by chunk; a chunk that is written past the mapping is good again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, code: int = errno.EFAULT) -> None:
        self.bad: set[int] = set()
        self.asked: list[int] = []
        self.code = code
        self.can_be_written = True
        self.mapped: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        real = SlabPages.__init__

        def begin(pages: SlabPages, path: Path, mapped: NDArray[np.uint8]) -> None:
            self.mapped = mapped
            real(pages, path, mapped)

        monkeypatch.setattr(SlabPages, "__init__", begin)
        monkeypatch.setattr(slab_pages, "_madvise", self.madvise)
        monkeypatch.setattr(SlabPages, "_zero", lambda pages, chunk_id: self.zero(chunk_id))

    def madvise(self, address: int, size_bytes: int, advice: int) -> int:
        chunk_id = (address - self.mapped.ctypes.data) // CHUNK_BYTES
        self.asked.append(chunk_id)
        ctypes.set_errno(self.code)
        return -1 if chunk_id in self.bad else 0

    def zero(self, chunk_id: int) -> None:
        if not self.can_be_written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.bad.discard(chunk_id)


@pytest.fixture
def medium(monkeypatch: pytest.MonkeyPatch) -> Medium:
    return Medium(monkeypatch)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store of four objects that was closed."""
    backend = LmdbBackend.open(tmp_path, capacity_bytes=64 * CHUNK_BYTES)
    assert put(backend, *((key(number), payload(number, SIZE)) for number in range(4))) == [Outcome.OK] * 4
    backend.close()
    return tmp_path


def test_a_page_that_the_medium_cannot_bring_costs_its_object_alone(directory: Path, medium: Medium) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=64 * CHUNK_BYTES)
    assert get(backend, key(0), SIZE) == (Outcome.OK, payload(0, SIZE))
    first_of_1 = max(medium.asked) + 1
    medium.bad = {first_of_1}
    assert get(backend, key(1), SIZE)[0] is Outcome.CORRUPT
    assert backend.contains([key(number) for number in range(4)]) == [True, False, True, True]
    assert [get(backend, key(number), SIZE)[0] for number in (0, 2, 3)] == [Outcome.OK] * 3
    assert backend.usage().objects == 3
    backend.close()


def test_a_chunk_is_asked_for_once(directory: Path, medium: Medium) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=64 * CHUNK_BYTES)
    for _ in range(3):
        assert get(backend, key(0), SIZE)[0] is Outcome.OK
    assert len(medium.asked) == len(set(medium.asked)) == 4
    backend.close()


def test_what_is_written_to_a_bad_sector_is_whole_again_or_an_error(directory: Path, medium: Medium) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=64 * CHUNK_BYTES)
    bad = medium.bad = set(range(64))
    medium.can_be_written = False
    assert put(backend, (key(9), payload(9, SIZE))) == [Outcome.IO_ERROR]
    assert backend.contains([key(9)]) == [False]
    used_bytes = backend.usage().stored_bytes
    medium.can_be_written = True
    assert put(backend, (key(9), payload(9, SIZE))) == [Outcome.OK]
    assert len(bad) == 60
    assert get(backend, key(9), SIZE) == (Outcome.OK, payload(9, SIZE))
    assert backend.usage().stored_bytes == used_bytes + 4 * CHUNK_BYTES
    backend.close()


def test_a_chunk_that_cannot_be_written_stops_no_put_but_one(directory: Path, medium: Medium) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=64 * CHUNK_BYTES)
    assert put(backend, (key(8), payload(8, SIZE))) == [Outcome.OK]
    medium.bad = {max(medium.asked) + 2}
    medium.can_be_written = False
    outcomes = [put(backend, (key(number), payload(number, SIZE)))[0] for number in range(9, 15)]
    assert outcomes.count(Outcome.IO_ERROR) == 1
    assert outcomes.count(Outcome.OK) == 5
    backend.close()


def test_a_kernel_that_cannot_be_asked_is_taken_at_its_word(directory: Path, medium: Medium) -> None:
    medium.code = errno.EINVAL
    medium.bad = set(range(64))
    backend = LmdbBackend.open(directory, capacity_bytes=64 * CHUNK_BYTES)
    assert get(backend, key(0), SIZE) == (Outcome.OK, payload(0, SIZE))
    backend.close()


def test_the_real_call_says_where_a_file_ends(tmp_path: Path) -> None:
    """Behind the end of its file a mapping is as a bad sector is: a SIGBUS for who touches it."""
    backend = LmdbBackend.open(tmp_path, capacity_bytes=64 * CHUNK_BYTES)
    assert put(backend, *((key(number), payload(number, SIZE)) for number in range(4))) == [Outcome.OK] * 4
    backend.close()
    backend = LmdbBackend.open(tmp_path, capacity_bytes=64 * CHUNK_BYTES)
    os.truncate(tmp_path / SLAB_NAME, 8 * CHUNK_BYTES)
    found = [get(backend, key(number), SIZE)[0] for number in range(4)]
    assert found == [Outcome.OK] * 2 + [Outcome.CORRUPT] * 2
    backend.close()


def test_what_is_read_while_the_slab_is_closed_comes_from_the_mapping_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = Slab(tmp_path / SLAB_NAME, chunks=4, capacity_bytes=4 * CHUNK_BYTES)
    ids, target = np.array([3, 1], dtype=np.uint32), bytearray(CHUNK_BYTES + 100)
    checksum = slab.write(key(1), memoryview(payload(1, len(target))), ids)

    def close_meanwhile(of: bytes) -> xxhash.xxh3_64:
        slab.close()
        return payload_hasher(of)

    monkeypatch.setattr("hicache.backends.lmdb_slab.payload_hasher", close_meanwhile)
    assert slab.read(key(1), memoryview(target), ids) == checksum
    assert bytes(target) == payload(1, len(target))
    with pytest.raises(BackendError, match="closed"):
        slab.read(key(1), memoryview(target), ids)
