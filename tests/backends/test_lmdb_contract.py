"""The contract of backends, kept by LMDB."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lmdb

from hicache.backends.base import Backend
from hicache.backends.lmdb_layout import CHUNK_BYTES, IndexRecord, decode_record
from hicache.backends.lmdb_slab import SLAB_NAME
from hicache.backends.lmdb_store import LmdbBackend
from tests.backends.contract import BackendContract


class TestLmdbBackend(BackendContract):
    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        return LmdbBackend.open(directory, capacity_bytes=capacity_bytes)

    def swap(self, directory: Path, first: bytes, second: bytes) -> None:
        with open_raw(directory) as env, env.begin(write=True) as txn:
            index = env.open_db(b"index", txn=txn)
            records = {name: record_of(txn, index, name) for name in (first, second)}
            for name, other in ((first, second), (second, first)):
                mine, foreign = records[name], records[other]
                forged = replace(mine, chunk_ids=foreign.chunk_ids)
                txn.put(name, forged.encode(name), db=index)

    def cut_short(self, directory: Path, name: bytes) -> None:
        with open_raw(directory) as env, env.begin() as txn:
            record = record_of(txn, env.open_db(b"index", txn=txn), name)
        with (directory / SLAB_NAME).open("r+b") as slab:
            slab.seek(int(record.chunk_ids[-1]) * CHUNK_BYTES)
            slab.write(bytes(CHUNK_BYTES))


def open_raw(directory: Path) -> lmdb.Environment:
    """The environment of a closed store, for tampering."""
    size_bytes = (directory / "data.mdb").stat().st_size
    return lmdb.open(str(directory), map_size=size_bytes, max_dbs=3, writemap=True, sync=False)


def record_of(txn: lmdb.Transaction[bytes], index: object, name: bytes) -> IndexRecord:
    raw = txn.get(name, db=index)  # type: ignore[call-overload]  # the class of a table is private
    assert raw is not None
    record = decode_record(name, raw)
    assert record is not None
    return record
