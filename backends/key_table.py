"""Finds the slots of keys: a hash table in numpy arrays whose growth never stops anybody."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hicache.backends.columns import Column
from hicache.backends.key_rows import ROW_WORDS, Hashes, KeyHash, Rows

NO_SLOT = 0
BUCKET_WAYS = 16  # tags of a bucket fill half a cache line, its slots a whole one
BUCKET_LOAD = 6  # keys a bucket on the average; those whose turn to be split has not come have up to twice as many
_FIRST_BUCKETS = 64
_SPLIT_BUCKETS = 32  # split together, so that numpy's cost a call is shared
_OVERFLOW_RETRIED = 8  # after a split
_SECOND_SHIFT = 24  # bits [0, 24) of a hash choose the first bucket, [24, 48) the second, [48, 64) are the tag
_BUCKET_MASK = (1 << _SECOND_SHIFT) - 1
_TAG_SHIFT = 48
_EMPTY_TAG = b"\0\0"

Slots = NDArray[np.int64]  # [n]; NO_SLOT: not there


class KeyTable:
    """From rows of one width to slots, which the caller numbers from 1. Not thread-safe.

    Linear hashing (Litwin 1980) in buckets of BUCKET_WAYS: a key lies in one of two buckets, the second only when the
    first was full, or else in a dict. So a look-up touches two buckets at most, whatever keys there are.
    """

    def __init__(self, width: int) -> None:
        self._row_bytes = ROW_WORDS[width] * 8
        self._hash = KeyHash(ROW_WORDS[width])
        self._rows = Column(np.uint64, width=ROW_WORDS[width])  # by slot
        self._tags = Column(np.uint16, width=BUCKET_WAYS)  # by bucket; 0: nothing
        self._slots = Column(np.uint32, width=BUCKET_WAYS)
        self._overflow: dict[bytes, int] = {}
        self._overflow_tags = np.zeros(1 << 16, dtype=np.uint32)  # how many keys of the dict have each tag
        self._last_row, self._last_hash = b"", 0
        self._count = 0
        self._half = _FIRST_BUCKETS  # a power of two: [0, half) are the buckets of the round, of which ...
        self._split_count = 0  # ... [0, split_count) have been split into themselves and [half, half + split_count)

    @property
    def overflow_count(self) -> int:
        """Keys that were in neither of their buckets."""
        return len(self._overflow)

    def row(self, slot: int) -> bytes:
        """The row of the key in a slot that is taken."""
        return self._rows.raw[slot * self._row_bytes : (slot + 1) * self._row_bytes].tobytes()

    def find(self, rows: Rows) -> Slots:
        """The slot of each row, or NO_SLOT."""
        hashes = self._hash.of_rows(rows)
        tags = _tags_of(hashes)
        slots = self._probe(rows, tags, self._first_buckets(hashes))
        missing = np.flatnonzero(slots == NO_SLOT)
        if missing.size:
            left = rows[missing]
            found = self._probe(left, tags[missing], self._second_buckets(hashes[missing]))
            if self._overflow:
                is_near = (found == NO_SLOT) & (self._overflow_tags.take(tags[missing]) > 0)
                for place in np.flatnonzero(is_near).tolist():
                    found[place] = self._overflow.get(left[place].tobytes(), NO_SLOT)
            slots[missing] = found
        return slots

    def _probe(self, rows: Rows, tags: NDArray[np.uint16], buckets: NDArray[np.int64]) -> Slots:
        same_tag = self._tags.array.take(buckets, axis=0) == tags[:, np.newaxis]
        ways = same_tag.argmax(axis=1)
        met = np.flatnonzero(same_tag.ravel().take(np.arange(0, same_tag.size, BUCKET_WAYS) + ways))
        slots = np.zeros(len(rows), dtype=np.int64)
        candidates = self._slots.array.ravel().take(buckets[met] * BUCKET_WAYS + ways[met])
        wanted = rows if met.size == len(rows) else rows[met]
        same_key = self._rows.array.take(candidates, axis=0) == wanted
        slots[met] = candidates
        if not same_key.all():  # the tag of another key; the own one may be behind it
            for place in met[~same_key.all(axis=1)].tolist():
                slots[place] = self._scan_bucket(rows[place].tobytes(), int(tags[place]), int(buckets[place]))[1]
        return slots

    def _hash_one(self, row: bytes) -> int:
        """Remembers the last, since a key that is added is looked for before."""
        if row != self._last_row:
            self._last_row, self._last_hash = row, self._hash.of_row(row)
        return self._last_hash

    def find_one(self, row: bytes) -> int:
        """The slot of one row, or NO_SLOT."""
        return self._locate(row)[1]

    def _locate(self, row: bytes) -> tuple[int, int]:
        """Cell and slot of a row; the cell of one in the dict, and of one that is not there, means nothing."""
        hashed = self._hash_one(row)
        tag = hashed >> _TAG_SHIFT or 1
        for bits in (hashed, hashed >> _SECOND_SHIFT):
            cell, slot = self._scan_bucket(row, tag, self._bucket(bits & _BUCKET_MASK))
            if slot != NO_SLOT:
                return cell, slot
        return 0, self._overflow.get(row, NO_SLOT)

    def _scan_bucket(self, row: bytes, tag: int, bucket: int) -> tuple[int, int]:
        start = bucket * BUCKET_WAYS
        tags = self._tags.raw[2 * start : 2 * (start + BUCKET_WAYS)].tobytes()
        wanted = tag.to_bytes(2, "little")
        at = tags.find(wanted)
        while at >= 0:
            if at % 2 == 0:
                slot = self._slots.cells[start + at // 2]
                if self.row(slot) == row:
                    return start + at // 2, slot
            at = tags.find(wanted, at + 1)
        return 0, NO_SLOT

    def insert_one(self, row: bytes, slot: int) -> None:
        """Add a row that is not there."""
        self._rows.reserve(slot + 1)
        self._rows.raw[slot * self._row_bytes : (slot + 1) * self._row_bytes] = row
        self._place(row, slot)
        self._count += 1
        if self._count > BUCKET_LOAD * self._bucket_count:
            self._split(_SPLIT_BUCKETS)

    def _place(self, row: bytes, slot: int) -> None:
        hashed = self._hash_one(row)
        for bits in (hashed, hashed >> _SECOND_SHIFT):
            start = self._bucket(bits & _BUCKET_MASK) * BUCKET_WAYS
            tags = self._tags.raw[2 * start : 2 * (start + BUCKET_WAYS)].tobytes()
            at = tags.find(_EMPTY_TAG)
            while at % 2 == 1 and at >= 0:
                at = tags.find(_EMPTY_TAG, at + 1)
            if at >= 0:
                self._tags.cells[start + at // 2] = hashed >> _TAG_SHIFT or 1
                self._slots.cells[start + at // 2] = slot
                return
        self._overflow[row] = slot
        self._overflow_tags[hashed >> _TAG_SHIFT or 1] += 1

    def remove_one(self, row: bytes) -> int:
        """Remove a row; returns the slot that it had, or NO_SLOT."""
        cell, slot = self._locate(row)
        if slot == NO_SLOT:
            return NO_SLOT
        self._count -= 1
        if row in self._overflow:
            self._drop_overflow(row)
        else:
            self._tags.cells[cell] = 0
            self._slots.cells[cell] = NO_SLOT
        return slot

    def remove(self, slots: Slots) -> None:
        """Remove the rows in these slots, all different, all of which are there."""
        self._count -= len(slots)
        hashes = self._hash.of_rows(self._rows.array[slots])
        for buckets_of in (self._first_buckets, self._second_buckets):
            buckets = buckets_of(hashes)
            is_own = self._slots.array[buckets] == slots[:, np.newaxis]
            is_here = is_own.any(axis=1)
            cells = (buckets * BUCKET_WAYS + is_own.argmax(axis=1))[is_here]
            self._tags.array.ravel()[cells] = 0
            self._slots.array.ravel()[cells] = NO_SLOT
            if is_here.all():
                return
            slots, hashes = slots[~is_here], hashes[~is_here]
        for slot in slots.tolist():
            self._drop_overflow(self.row(slot))

    def _drop_overflow(self, row: bytes) -> int:
        self._overflow_tags[self._hash_one(row) >> _TAG_SHIFT or 1] -= 1
        return self._overflow.pop(row)

    def insert(self, rows: Rows, slots: Slots) -> None:
        """Add rows, all different, none of which is there. For many at once: it may hold its caller for long."""
        self._rows.reserve(int(slots.max(initial=0)) + 1)
        self._rows.array[slots] = rows
        self._count += len(rows)
        while (lacking := -(-self._count // BUCKET_LOAD) - self._bucket_count) > 0 and self._split(
            max(lacking, _SPLIT_BUCKETS)
        ):
            pass
        hashes = self._hash.of_rows(rows)
        left = np.arange(len(rows))
        for buckets_of in (self._first_buckets, self._second_buckets):
            left = self._fill(buckets_of(hashes[left]), _tags_of(hashes[left]), slots[left], left)
        for place in left.tolist():
            self._place(rows[place].tobytes(), int(slots[place]))

    def _fill(
        self, buckets: NDArray[np.int64], tags: NDArray[np.uint16], slots: Slots, places: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Put tags and slots into free ways of their buckets; returns which of ``places`` found none."""
        if not len(places):
            return places
        order = np.argsort(buckets, kind="stable")
        buckets, tags, slots = buckets[order], tags[order], slots[order]
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        ranks = np.arange(len(buckets)) - np.repeat(starts, np.diff(starts, append=len(buckets)))
        is_free = self._tags.array[buckets] == 0
        is_mine = is_free & (is_free.cumsum(axis=1) == ranks[:, np.newaxis] + 1)
        fits = is_mine.any(axis=1)
        cells = (buckets * BUCKET_WAYS + is_mine.argmax(axis=1))[fits]
        self._tags.array.ravel()[cells] = tags[fits]
        self._slots.array.ravel()[cells] = slots[fits]
        homeless: NDArray[np.int64] = places[order[~fits]]
        return homeless

    @property
    def _bucket_count(self) -> int:
        return self._half + self._split_count

    def _bucket(self, bits: int) -> int:
        bucket = bits & (2 * self._half - 1)
        return bucket if bucket < self._bucket_count else bucket - self._half

    def _first_buckets(self, hashes: Hashes) -> NDArray[np.int64]:
        buckets = (hashes & np.uint64(2 * self._half - 1)).astype(np.int64)
        buckets[buckets >= self._bucket_count] -= self._half
        return buckets

    def _second_buckets(self, hashes: Hashes) -> NDArray[np.int64]:
        return self._first_buckets((hashes >> np.uint64(_SECOND_SHIFT)) & np.uint64(_BUCKET_MASK))

    def _split(self, count: int) -> bool:
        """Split the next buckets, ``count`` or as many as the round has left; False when all bits of hashes are used.

        What lies in bucket b goes to b + half where one more bit of its hash says so, into the same way.
        """
        if 2 * self._half > _BUCKET_MASK + 1:
            return False
        count = min(count, self._half - self._split_count)
        self._tags.reserve(self._bucket_count + count)
        self._slots.reserve(self._bucket_count + count)
        old = slice(self._split_count, self._split_count + count)
        new = slice(self._half + old.start, self._half + old.stop)
        tags, slots = self._tags.array, self._slots.array
        buckets, ways = np.nonzero(slots[old])
        hashes = self._hash.of_rows(self._rows.array[slots[old][buckets, ways]])
        here = (buckets + old.start).astype(np.uint64)
        in_first = (hashes & np.uint64(self._half - 1)) == here
        bits = np.where(in_first, hashes, hashes >> np.uint64(_SECOND_SHIFT))
        moves = (bits & np.uint64(self._half)) != 0
        cells = (buckets[moves], ways[moves])
        for table in (tags, slots):
            table[new][cells] = table[old][cells]
            table[old][cells] = 0
        self._split_count += count
        if self._split_count == self._half:
            self._half, self._split_count = 2 * self._half, 0
        self._retry_overflow()
        return True

    def _retry_overflow(self) -> None:
        for _ in range(min(_OVERFLOW_RETRIED, len(self._overflow))):
            row = next(iter(self._overflow))
            self._place(row, self._drop_overflow(row))


def _tags_of(hashes: Hashes) -> NDArray[np.uint16]:
    tags: NDArray[np.uint16] = np.maximum(hashes >> np.uint64(_TAG_SHIFT), np.uint64(1)).astype(np.uint16)
    return tags


def first_of_each(slots: Slots) -> Slots:
    """Without those that came before in the same batch."""
    in_order = np.sort(slots)
    if not (in_order[1:] == in_order[:-1]).any():
        return slots
    _, first = np.unique(slots, return_index=True)
    return slots[np.sort(first)]
