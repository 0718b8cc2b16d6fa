"""How objects lie in an LMDB map: equal chunks, and the index records that name them.

LMDB keeps a value that is larger than half a page in a run of whole pages behind a 16-byte header. Values of many sizes
break the map into runs that fit nobody; so every chunk is exactly CHUNK_PAGES pages with its header, whatever it holds.
17 pages, because an object of a power of two of at least 64 KiB then wastes 7 % at most (with 16 pages the 16 bytes
of the header push 64 KiB into a second chunk).
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

PAGE_BYTES = mmap.PAGESIZE  # LMDB takes the page of the machine; the layout is made for 4096 and correct for others
LMDB_HEADER_BYTES = 16
CHUNK_PAGES = 17
CHUNK_BYTES = CHUNK_PAGES * 4096 - LMDB_HEADER_BYTES
CHUNK_VALUE_BYTES_MIN = (CHUNK_PAGES - 1) * 4096 - LMDB_HEADER_BYTES + 1  # less would take a page less
CHUNK_STORED_BYTES = -(-(CHUNK_BYTES + LMDB_HEADER_BYTES) // PAGE_BYTES) * PAGE_BYTES

MOVING_BYTES_MIN = 16 << 20
MOVING_BYTES_MAX = 256 << 20

pack_chunk_id = struct.Struct("=Q").pack  # the native integer that an integerkey table wants
_FIXED = struct.Struct("<IQQd")  # check, size, checksum, used at; then the chunk ids, uint32 each
_ID_BYTES = 4


def chunk_count(size_bytes: int) -> int:
    """How many chunks an object takes."""
    return -(-size_bytes // CHUNK_BYTES)


class IndexRecord(msgspec.Struct, frozen=True, gc=False):
    """What the index keeps of one object. A struct: a restart makes two for every object."""

    size_bytes: int
    checksum: int
    used_at_s: float
    chunk_ids: array[int]

    def encode(self, key: bytes) -> bytes:
        """The record with a check over itself and its key."""
        ids = self.chunk_ids.tobytes()
        raw = _FIXED.pack(0, self.size_bytes, self.checksum, self.used_at_s) + ids
        return _check(key, raw[4:]).to_bytes(4, "little") + raw[4:]


def decode_record(key: bytes, raw: bytes) -> IndexRecord | None:
    """The record; None when it is damaged or belongs to another key."""
    if len(raw) < _FIXED.size or (len(raw) - _FIXED.size) % _ID_BYTES:
        return None
    check, size_bytes, checksum, used_at_s = _FIXED.unpack_from(raw)
    if check != _check(key, raw[4:]):
        return None
    record = IndexRecord(size_bytes, checksum, used_at_s, array("I", raw[_FIXED.size :]))
    return record if len(record.chunk_ids) == chunk_count(size_bytes) else None


def _check(key: bytes, raw: bytes) -> int:
    return xxhash.xxh32_intdigest(raw, xxhash.xxh32_intdigest(key))


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive chunks ``[first, end)`` of the object at ``position`` of a batch."""

    position: int
    first: int
    end: int
    is_last: bool


def plan_transactions(sizes: Sequence[tuple[int, int]], *, chunks_max: int) -> Iterator[list[Segment]]:
    """Cut a batch of ``(position, size_bytes)`` into transactions of at most ``chunks_max`` chunks, in order.

    An object of more chunks spans several: until its last one commits, no index record names what the others wrote.
    """
    group: list[Segment] = []
    room = chunks_max
    for position, size_bytes in sizes:
        first, count = 0, chunk_count(size_bytes)
        while first < count:
            end = min(first + room, count)
            group.append(Segment(position, first, end, is_last=end == count))
            room -= end - first
            first = end
            if room == 0:
                yield group
                group, room = [], chunks_max
    if group:
        yield group


def map_bytes_for(chunks_max: int) -> int:
    """The size of a map that holds ``chunks_max`` chunks, their index, and what copy-on-write needs to move in.

    A chunk costs at most 1/60 page in the chunk table and, as a one-chunk object with the longest key, 1/8 page in the
    index, each half full.
    """
    chunk_bytes = chunks_max * CHUNK_STORED_BYTES
    index_bytes = (chunks_max // 7 + 64) * PAGE_BYTES
    return chunk_bytes + index_bytes + moving_bytes_for(chunk_bytes)


def moving_bytes_for(used_bytes: int) -> int:
    """What copy-on-write needs beside ``used_bytes``.

    A page that is written again moves, and the one that it leaves is free to LMDB two transactions later and after the
    readers that see it.
    """
    wanted_bytes = min(max(used_bytes // 8, MOVING_BYTES_MIN), MOVING_BYTES_MAX)
    return -(-wanted_bytes // PAGE_BYTES) * PAGE_BYTES
