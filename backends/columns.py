"""A numpy array that grows in place: one value, or one row of values, for each slot of an index."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

ROWS_MIN = 1 << 10
HUGE_PAGES_FROM_BYTES = 32 << 20  # above it a look-up in random order pays for small pages

_Scalar = TypeVar("_Scalar", bound=np.generic)


class Column(Generic[_Scalar]):
    """Zero until written. Rows that were never written take no memory, and growing copies nothing.

    Keep no reference to ``array`` or ``cells`` across a ``reserve``: the kernel moves the pages to another address.
    """

    def __init__(self, dtype: type[_Scalar], *, width: int = 1, is_sparse: bool = False) -> None:
        """``is_sparse``: few rows are ever written, here and there, so none is to cost a huge page."""
        self._is_sparse = is_sparse
        self._dtype = np.dtype(dtype)
        self._width = width
        self._row_bytes = self._dtype.itemsize * width
        self._mapping = _private_mapping(ROWS_MIN * self._row_bytes)
        self._look()

    def _look(self) -> None:
        flat = np.frombuffer(self._mapping, dtype=self._dtype)
        self.array: NDArray[_Scalar] = flat if self._width == 1 else flat.reshape(-1, self._width)
        self.cells: memoryview[Any] = flat.data  # Any: of its dtype
        self.raw = memoryview(self._mapping)

    def reserve(self, rows: int) -> None:
        """Have room for so many rows. Takes address space only, and doubles it, so that it is rarely asked for."""
        while len(self.array) < rows:
            self._resize(2 * len(self.array) * self._row_bytes)

    def _resize(self, size_bytes: int) -> None:
        self.cells.release()
        self.raw.release()
        del self.array
        try:
            self._mapping.resize(size_bytes)
        except BufferError:  # somebody, such as a traceback, still looks at it: leave it to them
            grown = _private_mapping(size_bytes)
            grown[: len(self._mapping)] = self._mapping[:]
            self._mapping = grown
        if not self._is_sparse:
            _prefer_huge_pages(self._mapping)
        self._look()


def _private_mapping(size_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _prefer_huge_pages(mapping: mmap.mmap) -> None:
    if len(mapping) >= HUGE_PAGES_FROM_BYTES:
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)


def each_of_few(values: NDArray[np.int64], function: Callable[[int], int]) -> NDArray[np.int64]:
    """``function`` of each of many values, of which few differ."""
    if len(values) and values.min() == values.max():
        return np.full(len(values), function(int(values[0])), dtype=np.int64)
    distinct, places = np.unique(values, return_inverse=True)
    found: NDArray[np.int64] = np.array([function(value) for value in distinct.tolist()], dtype=np.int64)
    each: NDArray[np.int64] = found[places]
    return each
