"""Which chunks of a store are free."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

CHUNK_IDS_MAX = 2**32 - 1  # ids are array("I"): four bytes each


class ChunkIds:
    """Hands out chunk ids below a limit and takes them back. Not thread-safe.

    Ids that were given back are used again before new ones, the latest first: their pages exist and are warm.

        [0, next_id) in use or on the free stack | [next_id, ...) never used
    """

    def __init__(self, chunks_max: int, *, used: NDArray[np.uint32]) -> None:
        """``used`` are the ids in use, each once. There may be more than ``chunks_max`` when the limit was lowered."""
        self.chunks_max = chunks_max
        self.used_count = len(used)
        self._next_id = int(used.max()) + 1 if len(used) else 0
        is_free = np.ones(self._next_id, dtype=bool)
        is_free[used] = False
        self._free = array("I", np.flatnonzero(is_free)[::-1].astype(np.uint32).tobytes())

    def allocate(self, count: int) -> array[int] | None:
        """``count`` ids, or None when that would exceed the limit."""
        if self.used_count + count > self.chunks_max:
            return None
        recycled = min(count, len(self._free))
        ids = self._free[len(self._free) - recycled :]
        del self._free[len(self._free) - recycled :]
        ids.reverse()
        fresh = count - recycled
        ids.extend(range(self._next_id, self._next_id + fresh))
        self._next_id += fresh
        self.used_count += count
        return ids

    def release(self, ids: array[int]) -> None:
        """Take back ids that ``allocate`` gave, or that were in use at the start."""
        self.used_count -= len(ids)
        assert self.used_count >= 0, "more chunk ids were given back than were out"
        self._free.extend(reversed(ids))
