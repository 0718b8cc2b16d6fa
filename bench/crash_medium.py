"""What is on the medium of a store, counted without the store: its files are read as they lie there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import lmdb

from hicache.backends.file_layout import HEADER_BYTES, decode_header, object_path, stored_bytes_of
from hicache.backends.lmdb_layout import CHUNK_BYTES, decode_record
from hicache.backends.lmdb_slab import SLAB_NAME
from hicache.backends.namespaces import NAMES_FILE

STORE_FILES = {"lmdb": {"data.mdb", "lock.mdb", SLAB_NAME}, "file": {"objects", "unfinished"}}
COMMON_FILES = {"hicache.lock", "hicache.store", NAMES_FILE, f"{NAMES_FILE}.tmp"}  # the last of a kill


@dataclass(frozen=True, slots=True)
class Counted:
    """The objects on a medium, and what should not be there."""

    objects: int
    payload_bytes: int
    stored_bytes: int
    orphans: tuple[str, ...]


def count_medium(backend: str, directory: Path) -> Counted:
    """Read a store that nobody changes just now."""
    counted = {"lmdb": _count_lmdb, "file": _count_files}[backend](directory)
    foreign = {path.name for path in directory.iterdir()} - STORE_FILES[backend] - COMMON_FILES
    return Counted(counted.objects, counted.payload_bytes, counted.stored_bytes, (*counted.orphans, *sorted(foreign)))


def _count_lmdb(directory: Path) -> Counted:
    objects = payload_bytes = 0
    chunk_ids: list[int] = []
    orphans: list[str] = []
    with (
        lmdb.open(str(directory), readonly=True, lock=False, max_dbs=3) as env,
        env.begin(buffers=True) as txn,
    ):
        for key, raw in txn.cursor(env.open_db(b"index", txn, create=False)):
            record = decode_record(bytes(key), bytes(raw))
            if record is None:
                orphans.append(f"a damaged index record of {bytes(key).hex()}")
                continue
            objects += 1
            payload_bytes += record.size_bytes
            chunk_ids += record.chunk_ids.tolist()
    if chunk_ids and max(chunk_ids) >= (directory / SLAB_NAME).stat().st_size // CHUNK_BYTES:
        orphans.append("an index record names a chunk that is not there")
    if len(set(chunk_ids)) < len(chunk_ids):
        orphans.append("two index records name one chunk")
    return Counted(objects, payload_bytes, len(chunk_ids) * CHUNK_BYTES, tuple(orphans))


def _count_files(directory: Path) -> Counted:
    objects = payload_bytes = stored_bytes = 0
    unfinished = [path for path in (directory / "unfinished").rglob("*") if path.is_file()]
    orphans = [str(path) for path in unfinished if path.suffix != ".alive"]
    if len(unfinished) - len(orphans) > 1:
        orphans.append("more than one writer is said to live")
    for path in (directory / "objects").rglob("*"):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            header = decode_header(file.read(HEADER_BYTES))
        size_bytes = path.stat().st_size - HEADER_BYTES
        if header is None or header.size_bytes != size_bytes:
            orphans.append(f"{path} is no whole object")
            continue
        if object_path(str(directory / "objects"), header.key) != str(path):
            orphans.append(f"{path} is not where its key says")
        objects += 1
        payload_bytes += size_bytes
        stored_bytes += stored_bytes_of(size_bytes)
    return Counted(objects, payload_bytes, stored_bytes, tuple(orphans))
