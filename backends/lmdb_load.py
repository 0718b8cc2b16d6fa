"""Reading the whole index of an LMDB store when it is opened, in columns: a million records take 0.7 s."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from hicache.backends.base import SCAN_OBJECTS_MAX, StoredBatch
from hicache.backends.lmdb_env import LmdbEnvironment
from hicache.backends.lmdb_layout import (
    BEHIND_IDS_BYTES,
    CHECK_BYTES,
    CHUNK_BYTES,
    FIXED_DTYPE,
    ID_DTYPE,
    ChunkIdArray,
    decode_record,
    record_check,
)
from hicache.backends.lmdb_open import StoreFiles
from hicache.backends.progress import tell_progress
from hicache.errors import BackendError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedIndex:
    """What an index says."""

    batches: list[StoredBatch]
    chunk_ids: ChunkIdArray  # in use, each once


def load_index(files: StoreFiles) -> LoadedIndex:
    """Read the index, the only place that says what is stored, and mark the store as in use.

    Damaged records are removed, and those that name a chunk which an earlier one names or which is not there. Raises
    BackendError when they cannot be.
    """
    env, chunks = files.env, files.slab.chunks
    loaded, damaged = _read_index(env, chunks)
    files.mark_in_use()
    if damaged:
        logger.warning("removing %d damaged index records", len(damaged))
        with env.write() as txn:
            for key in damaged:
                txn.delete(key, db=env.index)
        loaded, damaged = _read_index(env, chunks)
    if damaged:
        raise BackendError(f"{len(damaged)} damaged index records cannot be removed")
    return loaded


def _read_index(env: LmdbEnvironment, chunks: int) -> tuple[LoadedIndex, list[bytes]]:
    """What the index says, and the keys of its damaged records."""
    batches: list[StoredBatch] = []
    id_parts: list[bytes] = []
    damaged: list[bytes] = []
    with env.read_copies() as txn, txn.cursor(env.index) as cursor:
        entries = chain(cursor)  # the cursor's own iterator begins anew at the end
        while rows := list(islice(entries, SCAN_OBJECTS_MAX)):
            batch, raw_ids, bad = _decode([key for key, _ in rows], [raw for _, raw in rows])
            batches.append(batch)
            tell_progress(len(rows))
            id_parts.append(raw_ids)
            damaged += bad
    ids = np.frombuffer(b"".join(id_parts), dtype=ID_DTYPE)
    if len(ids) and (ids.max() >= chunks or np.bincount(ids, minlength=1).max() > 1):
        damaged += _wrong_claims(env, chunks)
    return LoadedIndex(batches, ids), damaged


def _decode(keys: list[bytes], raws: list[bytes]) -> tuple[StoredBatch, bytes, list[bytes]]:
    """The objects of some records, all their chunk ids, and the keys of damaged records."""
    width = FIXED_DTYPE.itemsize
    lengths = np.fromiter(map(len, raws), dtype=np.int64, count=len(raws))
    fixed = np.frombuffer(b"".join([raw[:width].ljust(width, b"\0") for raw in raws]), dtype=FIXED_DTYPE)
    tag_at = width + -(-fixed["size_bytes"].astype(np.float64) // CHUNK_BYTES) * ID_DTYPE.itemsize
    has_length = np.isin(lengths - tag_at, BEHIND_IDS_BYTES)
    is_good = has_length & (fixed["check"] == _checks(keys, raws))
    damaged: list[bytes] = []
    if not is_good.all():
        damaged = [keys[row] for row in np.flatnonzero(~is_good)]
        kept = np.flatnonzero(is_good).tolist()
        keys, raws, fixed, tag_at = (
            [keys[row] for row in kept],
            [raws[row] for row in kept],
            fixed[is_good],
            tag_at[is_good],
        )
    raw_ids = b"".join([raw[width:end] for raw, end in zip(raws, tag_at.astype(np.int64).tolist(), strict=True)])
    return StoredBatch(keys, fixed["size_bytes"].astype(np.int64), fixed["used_at_s"].copy()), raw_ids, damaged


def _checks(keys: Sequence[bytes], raws: Sequence[bytes]) -> NDArray[np.uint32]:
    checks = [record_check(key, raw[CHECK_BYTES:]) for key, raw in zip(keys, raws, strict=True)]
    return np.array(checks, dtype=np.uint32)


def _wrong_claims(env: LmdbEnvironment, chunks: int) -> list[bytes]:
    """Keys of records with chunks that an earlier one has too, or that are not there."""
    seen: set[int] = set()
    wrong: list[bytes] = []
    with env.read_copies() as txn, txn.cursor(env.index) as cursor:
        for key, raw in cursor:
            record = decode_record(key, raw)
            if record is None:
                continue
            ids = record.chunk_ids.tolist()
            if max(ids) < chunks and len(set(ids)) == len(ids) and seen.isdisjoint(ids):
                seen.update(ids)
            else:
                wrong.append(key)
    return wrong
