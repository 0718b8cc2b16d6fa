"""Which chunks of a store are free."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from hicache.backends.lmdb_layout import CHUNK_BYTES
from hicache.errors import ConfigError

CHUNK_IDS_MAX = 2**32 - 1  # ids are array("I"): four bytes each


class ChunkIds:
    """Hands out the ids of a slab and takes them back. Not thread-safe.

    Two limits: ``chunks_max`` are out at most, and every id that is handed out is below ``end``. Ids that were given
    back are used again before others, the latest first: their pages exist and are warm.
    """

    def __init__(self, chunks_max: int, *, end: int, used: NDArray[np.uint32]) -> None:
        """``used`` are the ids in use, each once and below ``end``. There may be more than ``chunks_max``."""
        self.chunks_max = chunks_max
        self.used_count = len(used)
        self.end = end
        self._is_used = np.zeros(end, dtype=bool)
        self._is_used[used] = True
        self._stack_free()

    def _stack_free(self) -> None:
        free = np.flatnonzero(~self._is_used[: self.end])
        self._free = array("I", free[::-1].astype(np.uint32).tobytes())

    @property
    def used_end(self) -> int:
        """Every id in use is below this."""
        used = np.flatnonzero(self._is_used)
        return int(used[-1]) + 1 if len(used) else 0

    def is_used_from(self, end: int) -> bool:
        """Whether an id of ``end`` or above is in use. Costs little where there are few ids above."""
        return bool(self._is_used[end:].any())

    def allocate(self, count: int, *, beyond_max: bool = False) -> NDArray[np.uint32] | None:
        """``count`` ids, or None when that would exceed a limit; ``beyond_max`` passes over the first one."""
        left = len(self._free) - count
        if left < 0 or (self.used_count + count > self.chunks_max and not beyond_max):
            return None
        ids = np.array(self._free[left:], dtype=np.uint32)[::-1]
        del self._free[left:]
        self._is_used[ids] = True
        self.used_count += count
        return ids

    def release(self, ids: NDArray[np.uint32]) -> None:
        """Take back ids that ``allocate`` gave, or that were in use at the start."""
        assert self._is_used[ids].all(), "a chunk id was given back that was not out"
        self._is_used[ids] = False
        self.used_count -= len(ids)
        free = ids[ids < self.end]
        self._free.frombytes(free[::-1].astype(np.uint32).tobytes())

    def set_end(self, end: int) -> None:
        """Let ids that are handed out go up to another end. Those in use beyond it stay out until they are released."""
        if end > len(self._is_used):
            self._is_used = np.concatenate([self._is_used, np.zeros(end - len(self._is_used), dtype=bool)])
        self.end = end
        self._stack_free()


def chunks_in(capacity_bytes: int) -> int:
    """How many chunks there are in so many bytes. Raises ConfigError for none, or more than have ids."""
    chunks_max = capacity_bytes // CHUNK_BYTES
    if not 1 <= chunks_max <= CHUNK_IDS_MAX:
        expected = f"{CHUNK_BYTES} (one chunk) to {CHUNK_IDS_MAX * CHUNK_BYTES}"
        raise ConfigError("capacity_bytes", capacity_bytes, expected)
    return chunks_max
