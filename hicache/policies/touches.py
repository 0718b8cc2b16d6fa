"""How often pages were touched lately, wherever they are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROWS = 4
_CELLS_PER_PAGE = 4  # of a row: one row takes a page for another in at most 1 - exp(-1/4) of all cases
_KEY_BYTES = _ROWS * 4


class TouchCounts:
    """How often keys were touched lately, in 32 bytes for each of ``remembered`` touches, whatever the keys are.

    Two count-min sketches: touches go into the newer one, and after ``remembered`` of them the older one is emptied
    and becomes the newer. What is remembered is never counted too low. It is counted too high when its cells of all
    rows are taken by others: for at most 0.24 % of keys and sketch, when that is full.
    """

    def __init__(self, remembered: int) -> None:
        width = 1 << (_CELLS_PER_PAGE * remembered - 1).bit_length()
        self._remembered = remembered
        self._mask = width - 1
        self._newer = np.zeros((_ROWS, width), np.uint8)
        self._older = np.zeros((_ROWS, width), np.uint8)
        self._touched = 0  # in the newer one

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count each of ``keys``, all different, once more."""
        start = 0
        while start < len(keys):
            if self._touched == self._remembered:
                self._newer, self._older = self._older, self._newer
                self._newer.fill(0)
                self._touched = 0
            some = keys[start : start + self._remembered - self._touched]
            self._add(some)
            self._touched += len(some)
            start += len(some)

    def count(self, key: bytes) -> int:
        """At least the touches of ``key`` that are remembered; at most 255 of each sketch."""
        cells = self._cells([key])
        return sum(int(self._least(sketch, cells)[0]) for sketch in (self._newer, self._older))

    def leading(self, keys: Sequence[bytes], touches: int) -> int:
        """How many leading ones of the keys of a path were touched so often.

        No page is touched more often than those before it, so the last one can be searched for by halves.
        """
        return bisect_left(keys, x=True, key=lambda key: self.count(key) < touches)

    def _add(self, keys: Sequence[bytes]) -> None:
        cells = self._cells(keys)
        counts = np.minimum(self._least(self._newer, cells), 254) + np.uint8(1)
        for row in range(_ROWS):  # a cell that several keys share keeps the highest of their counts
            np.maximum.at(self._newer[row], cells[row], counts)

    @staticmethod
    def _least(sketch: NDArray[np.uint8], cells: NDArray[np.uint32]) -> NDArray[np.uint8]:
        counts: NDArray[np.uint8] = np.minimum.reduce([sketch[row][cells[row]] for row in range(_ROWS)])
        return counts

    def _cells(self, keys: Sequence[bytes]) -> NDArray[np.uint32]:
        """The cell of each key in each row. Keys are hashes: their bytes are as good as random."""
        packed = b"".join(key[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0") for key in keys)
        return np.frombuffer(packed, np.uint32).reshape(len(keys), _ROWS).T & np.uint32(self._mask)
