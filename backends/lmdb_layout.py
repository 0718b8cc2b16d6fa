"""How objects lie in an LMDB store: equal chunks of one slab file, and the index records that name them."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from hicache.backends.base import UNKNOWN_TAG, WalkedObject

PAGE_BYTES = mmap.PAGESIZE
CHUNK_BYTES = 64 << 10  # a multiple of every page, and what most objects are a multiple of

MOVING_BYTES_MIN = 16 << 20
MOVING_BYTES_MAX = 256 << 20

TAG_BYTES = 4
SEAL_BYTES = 40  # of an encrypted object, behind all else (backends/sealing.py)
BEHIND_IDS_BYTES = (0, TAG_BYTES, SEAL_BYTES, TAG_BYTES + SEAL_BYTES)
FIXED_DTYPE = np.dtype([("check", "<u4"), ("size_bytes", "<u8"), ("checksum", "<u8"), ("used_at_s", "<f8")])
ID_DTYPE = np.dtype("<u4")
_FIXED = struct.Struct("<IQQd")  # the same; then the chunk ids, and the tag of the namespace where that is known
_TAG = struct.Struct("<I")
assert _TAG.size == TAG_BYTES
CHECK_BYTES = 4
assert _FIXED.size == FIXED_DTYPE.itemsize

ChunkIdArray = NDArray[np.uint32]


def chunk_count(size_bytes: int) -> int:
    """How many chunks an object takes."""
    return -(-size_bytes // CHUNK_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class IndexRecord:
    """What the index keeps of one object."""

    size_bytes: int
    checksum: int
    used_at_s: float
    chunk_ids: ChunkIdArray
    namespace_tag: int = UNKNOWN_TAG
    seal: bytes = b""  # of an encrypted object; its checksum is 0, since the seal says more

    def encode(self, key: bytes) -> bytes:
        """The record with a check over itself and its key."""
        fixed = _FIXED.pack(0, self.size_bytes, self.checksum, self.used_at_s)
        tag = b"" if self.namespace_tag == UNKNOWN_TAG else _TAG.pack(self.namespace_tag)
        checked = fixed[CHECK_BYTES:] + self.chunk_ids.tobytes() + tag + self.seal
        return record_check(key, checked).to_bytes(CHECK_BYTES, "little") + checked


def decode_record(key: bytes, raw: bytes) -> IndexRecord | None:
    """The record; None when it is damaged or belongs to another key."""
    if len(raw) < _FIXED.size:
        return None
    check, size_bytes, checksum, used_at_s = _FIXED.unpack_from(raw)
    id_count = chunk_count(size_bytes)
    tag_at = _FIXED.size + id_count * ID_DTYPE.itemsize
    if check != record_check(key, raw[CHECK_BYTES:]) or len(raw) - tag_at not in BEHIND_IDS_BYTES:
        return None
    chunk_ids = np.frombuffer(raw, ID_DTYPE, count=id_count, offset=_FIXED.size)
    is_tagged = len(raw) - tag_at in (TAG_BYTES, TAG_BYTES + SEAL_BYTES)
    [tag] = _TAG.unpack_from(raw, tag_at) if is_tagged else (UNKNOWN_TAG,)
    seal = raw[tag_at + TAG_BYTES * is_tagged :]
    return IndexRecord(size_bytes, checksum, used_at_s, chunk_ids, tag, seal)


def record_check(key: bytes, checked: bytes) -> int:
    """What a record begins with: a hash of all that follows, bound to its key."""
    return xxhash.xxh32_intdigest(checked, xxhash.xxh32_intdigest(key))


def index_map_bytes(chunks_max: int, *, is_sealed: bool = False) -> int:
    """The size of a map that holds the index of ``chunks_max`` chunks, and what copy-on-write needs to move in.

    The worst is one-chunk objects with the longest key in leaves that are half full: 1/12 page each, with the branches,
    and 1/9 where they have seals. Ids of larger objects take 4 bytes a chunk.
    """
    index_bytes = (chunks_max // (8 if is_sealed else 10) + 64) * PAGE_BYTES
    return index_bytes + moving_bytes_for(index_bytes)


def moving_bytes_for(used_bytes: int) -> int:
    """What copy-on-write needs beside ``used_bytes``.

    A page that is written again moves, and the one that it leaves is free to LMDB two transactions later and after the
    readers that see it.
    """
    wanted_bytes = min(max(used_bytes // 8, MOVING_BYTES_MIN), MOVING_BYTES_MAX)
    return -(-wanted_bytes // PAGE_BYTES) * PAGE_BYTES


def walked_object(key: bytes, raw: bytes) -> WalkedObject:
    """What ``Backend.walk`` tells of a record: of one that is damaged, its key alone."""
    record = decode_record(key, raw)
    if record is None:
        return WalkedObject(key, 0, 0.0, UNKNOWN_TAG)
    return WalkedObject(key, record.size_bytes, record.used_at_s, record.namespace_tag)
