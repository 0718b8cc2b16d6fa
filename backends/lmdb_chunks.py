"""Moving payloads between memory and the chunks of an LMDB map, hashing each part while it is in cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import xxhash

from hicache.backends.base import GetItem
from hicache.backends.lmdb_env import LmdbEnvironment, Transaction
from hicache.backends.lmdb_layout import CHUNK_BYTES, CHUNK_VALUE_BYTES_MIN, IndexRecord, Segment, pack_chunk_id
from hicache.checksum import payload_hasher

_ZEROS = memoryview(bytes(CHUNK_BYTES))


@dataclass(slots=True)
class Writing:
    """An object on its way into the map."""

    chunk_ids: array[int]
    hasher: xxhash.xxh3_64


def write_chunks(
    env: LmdbEnvironment, txn: Transaction, payload: memoryview, segment: Segment, writing: Writing
) -> None:
    """Write one segment of an object. Segments of an object must come in order."""
    raw = payload.cast("B")
    update, put, table, ids = writing.hasher.update, txn.put, env.chunks, writing.chunk_ids
    for number in range(segment.first, segment.end):
        part = raw[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        update(part)
        value = part if len(part) >= CHUNK_VALUE_BYTES_MIN else _long_enough(raw, part)
        put(pack_chunk_id(ids[number]), value, db=table)


def _long_enough(raw: memoryview, part: memoryview) -> memoryview | bytes:
    """A value of as many pages as every chunk that ends with ``part``, the tail of ``raw``.

    In front of it are the bytes before it, or zeros in a short object.
    """
    if len(raw) >= CHUNK_VALUE_BYTES_MIN:
        return raw[len(raw) - CHUNK_VALUE_BYTES_MIN :]
    return b"".join((_ZEROS[: CHUNK_VALUE_BYTES_MIN - len(part)], part))


def read_chunks(env: LmdbEnvironment, txn: Transaction, item: GetItem, record: IndexRecord) -> bool:
    """Copy an object into its target; whether the bytes there verify."""
    target = item.target.cast("B")
    hasher = payload_hasher(item.key)
    update, get, table = hasher.update, txn.get, env.chunks
    start = 0
    for chunk_id in record.chunk_ids:
        chunk = get(pack_chunk_id(chunk_id), None, table)
        part = target[start : start + CHUNK_BYTES]
        if chunk is None or len(chunk) < len(part):
            return False
        part[:] = chunk if len(chunk) == len(part) else chunk[len(chunk) - len(part) :]
        update(part)
        start += CHUNK_BYTES
    return hasher.intdigest() == record.checksum
