"""A client that writes to its memory while an object is read into it spoils its own bytes, and no object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from hicache.backends import file_objects, lmdb_slab
from hicache.backends.base import Backend
from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_store import LmdbBackend
from hicache.checksum import payload_hasher
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put

MIB = 1 << 20
CAPACITY_BYTES = 16 * MIB


class Meddler:
    """Changes the first bytes that it is given to hash, as a client may between the copy and the hash."""

    def __init__(self) -> None:
        self.changes_left = 1

    def hasher(self, key: bytes) -> Meddler:
        self._hasher: xxhash.xxh3_64 = payload_hasher(key)
        return self

    def update(self, piece: memoryview) -> None:
        if self.changes_left:
            self.changes_left -= 1
            piece[0] ^= 0xFF
        self._hasher.update(piece)

    def intdigest(self) -> int:
        return self._hasher.intdigest()


@pytest.mark.parametrize("size_bytes", [1, MIB + 1, 3 * MIB])
@pytest.mark.parametrize(
    ("opener", "module"),
    [(LmdbBackend.open, lmdb_slab), (FileBackend.open, file_objects)],
    ids=["lmdb", "file"],
)
def test_an_object_whose_target_is_written_to_meanwhile_is_read_whole_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opener: Callable[..., Backend], module: object, size_bytes: int
) -> None:
    backend = opener(tmp_path / "store", capacity_bytes=CAPACITY_BYTES)
    content = payload(1, size_bytes)
    put(backend, (key(1), content))
    meddler = Meddler()
    with monkeypatch.context() as patch:
        patch.setattr(module, "payload_hasher", meddler.hasher)
        assert get(backend, key(1), size_bytes) == (Outcome.OK, content)
    assert not meddler.changes_left
    assert get(backend, key(1), size_bytes) == (Outcome.OK, content)
    backend.close()
