"""One mapping of memory, given out in extents that are their holder's alone."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence

import numpy as np

ALIGNMENT_BYTES = 4096


class Arena:
    """One mapping, given out in extents. Thread-safe.

    An extent belongs to whoever acquired it until ``release``: a transfer that nobody waits for any more keeps its
    extent, so what it writes late goes nowhere. Extents are first-fit from the low end: what is used stays resident.
    They are whole pages: no page ever has bytes of two holders.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._mapping = mmap.mmap(-1, self.size_bytes)
        self._view = memoryview(self._mapping)
        self.address = int(np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data)
        self._changed = threading.Condition()
        self._free = [(0, self.size_bytes)]  # [start, end), in order, never adjacent

    @property
    def free_bytes(self) -> int:
        """What is not given out."""
        with self._changed:
            return sum(end - start for start, end in self._free)

    def acquire(self, sizes: Sequence[int], *, timeout_s: float) -> Extent | None:
        """Room for buffers of these sizes; waits for others to release theirs. None: not in time, or never."""
        need_bytes = -(-sum(map(_aligned, sizes)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if need_bytes > self.size_bytes:
            return None
        with self._changed:
            start: int | None = None

            def is_taken() -> bool:
                nonlocal start
                start = self._take(need_bytes)
                return start is not None

            self._changed.wait_for(is_taken, timeout=max(0.0, timeout_s))
            if start is None:
                return None
        return Extent(self._view, self.address, start, need_bytes, sizes, give_back=self._give_back)

    def _take(self, need_bytes: int) -> int | None:
        for index, (start, end) in enumerate(self._free):
            if end - start >= need_bytes:
                self._free[index : index + 1] = [(start + need_bytes, end)] if end - start > need_bytes else []
                return start
        return None

    def _give_back(self, start: int, end: int) -> None:
        with self._changed:
            merged: list[tuple[int, int]] = []
            for free_start, free_end in sorted([*self._free, (start, end)]):
                if merged and merged[-1][1] == free_start:
                    merged[-1] = (merged[-1][0], free_end)
                else:
                    assert not merged or merged[-1][1] < free_start, "an extent was released twice"
                    merged.append((free_start, free_end))
            self._free = merged
            self._changed.notify_all()


class Extent:
    """Buffers one behind the other; theirs is the memory until ``release``, once."""

    def __init__(
        self,
        view: memoryview,
        address: int,
        start: int,
        size_bytes: int,
        sizes: Sequence[int],
        *,
        give_back: Callable[[int, int], None],
    ) -> None:
        self.addresses: list[int] = []
        self.views: list[memoryview] = []
        self._range = (start, start + size_bytes)
        self._give_back = give_back
        offset = start
        for size in sizes:
            self.addresses.append(address + offset)
            self.views.append(view[offset : offset + size])
            offset += _aligned(size)

    def release(self) -> None:
        """Nothing touches the memory any more."""
        assert self.views or not self.addresses, "an extent was released twice"
        self.views.clear()
        self._give_back(*self._range)


def _aligned(size_bytes: int) -> int:
    """Buffers start at cache lines."""
    return -(-size_bytes // 64) * 64
