"""From keys to slots and back: one table for each width of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hicache.backends.base import is_storable_key
from hicache.backends.columns import Column
from hicache.backends.key_rows import ROW_WORDS, by_length, key_of, row_of, width_of
from hicache.backends.key_table import NO_SLOT, KeyTable, Slots

ONE_BY_ONE_MAX = 12  # so many keys are found faster one by one than together


class KeyIndex:
    """Not thread-safe. Slots are numbered from 1 by the caller; NO_SLOT stands for what is not there."""

    def __init__(self) -> None:
        self._tables = tuple(KeyTable(width) for width in range(len(ROW_WORDS)))
        self._widths = Column(np.uint8)  # by slot

    def find(self, keys: Sequence[bytes]) -> Slots:
        """The slot of each key."""
        if len(keys) <= ONE_BY_ONE_MAX:
            return np.array([self.find_one(key) for key in keys], dtype=np.int64)
        groups = by_length(keys)
        if len(groups) == 1 and isinstance(groups[0][0], slice):
            return self._tables[groups[0][1].width].find(groups[0][1].rows())
        slots = np.zeros(len(keys), dtype=np.int64)
        for places, packed in groups:
            slots[places] = self._tables[packed.width].find(packed.rows())
        return slots

    def find_one(self, key: bytes) -> int:
        """The slot of one key."""
        return self._tables[width_of(len(key))].find_one(row_of(key)) if is_storable_key(key) else NO_SLOT

    def places_of_new(self, keys: Sequence[bytes]) -> NDArray[np.intp]:
        """Where in a batch the keys are that are not here, each once."""
        is_new = self.find(keys) == NO_SLOT
        if len(set(keys)) < len(keys):
            seen: set[bytes] = set()
            for place, key in enumerate(keys):
                is_new[place] &= key not in seen
                seen.add(key)
        return np.flatnonzero(is_new)

    def insert(self, keys: Sequence[bytes], slots: Slots) -> None:
        """Add storable keys, all different, none of which is there. Holds its caller for long."""
        self._widths.reserve(int(slots.max(initial=0)) + 1)
        for places, packed in by_length(keys):
            self._tables[packed.width].insert(packed.rows(), slots[places])
            self._widths.array[slots[places]] = packed.width

    def insert_one(self, key: bytes, slot: int) -> None:
        """Add a storable key that is not there."""
        width = width_of(len(key))
        self._tables[width].insert_one(row_of(key), slot)
        self._widths.reserve(slot + 1)
        self._widths.cells[slot] = width

    def remove_one(self, key: bytes) -> int:
        """Remove a key; returns the slot that it had."""
        return self._tables[width_of(len(key))].remove_one(row_of(key)) if is_storable_key(key) else NO_SLOT

    def remove(self, slots: Slots) -> None:
        """Remove the keys in these slots, all different, all of which are there."""
        widths = self._widths.array[slots]
        for width, table in enumerate(self._tables):
            if len(of_width := slots[widths == width]):
                table.remove(of_width)

    def key(self, slot: int) -> bytes:
        """The key that was put into a slot last."""
        return key_of(self._tables[self._widths.cells[slot]].row(slot))
