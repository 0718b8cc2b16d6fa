"""Changing the capacity of an open LMDB store, beside everything that its other threads do."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import lmdb

from hicache.backends.lmdb_env import LmdbEnvironment
from hicache.backends.lmdb_index import Index
from hicache.backends.lmdb_layout import CHUNK_BYTES, IndexRecord, decode_record, index_map_bytes
from hicache.backends.lmdb_slab import Slab
from hicache.backends.lmdb_space import ChunkSpace
from hicache.backends.space import require_space
from hicache.errors import BackendError

CLEAR_TIMEOUT_S = 10.0  # for gets and puts that are at work in what is to be cut off
MOVE_AGAIN_S = 0.5  # after which a put that was at work there may have left an object

logger = logging.getLogger(__name__)


class Resizing:
    """Takes space before it is used, and stops using it before it is given back.

        [0, chunks_max) handed out | [chunks_max, slab.chunks) emptied by moving objects, then cut off

    A kill in the middle leaves files that are larger than the store needs: the next start uses or cuts them.
    """

    def __init__(self, env: LmdbEnvironment, slab: Slab, index: Index, space: ChunkSpace, *, is_sealed: bool) -> None:
        self._env = env
        self._slab = slab
        self._index = index
        self._space = space
        self._is_sealed = is_sealed
        self._lock = threading.Lock()

    def resize(self, capacity_bytes: int, *, floor_bytes: int) -> None:
        """See ``LmdbBackend.resize``."""
        chunks_max = capacity_bytes // CHUNK_BYTES
        with self._lock:
            if chunks_max * CHUNK_BYTES < self._space.usage().stored_bytes:
                raise BackendError("more is stored than the smaller capacity holds: delete first")
            if chunks_max > self._slab.chunks:
                self._grow(chunks_max, floor_bytes)
            before_bytes = self._space.usage().capacity_bytes
            self._space.limit(capacity_bytes, end=chunks_max)
            try:
                if chunks_max < self._slab.chunks:
                    self._empty_from(chunks_max)
                    self.cut(capacity_bytes)
            except BaseException:
                self._space.limit(before_bytes, end=self._slab.chunks)
                raise

    def _grow(self, chunks: int, floor_bytes: int) -> None:
        capacity_bytes, before = chunks * CHUNK_BYTES, self._slab.chunks
        map_bytes = index_map_bytes(chunks, is_sealed=self._is_sealed)
        wanted = {self._slab.path: capacity_bytes, self._env.path: map_bytes}
        require_space(wanted, capacity_bytes=capacity_bytes, floor_bytes=floor_bytes)
        self._slab.grow(chunks, capacity_bytes=capacity_bytes)
        try:
            self._env.grow(map_bytes, capacity_bytes=capacity_bytes)
        except BaseException:
            self._slab.cut(before)
            raise

    def _empty_from(self, end: int) -> None:
        """Move what lies in chunks from ``end`` on. Puts that are at work there end first, or CLEAR_TIMEOUT_S pass."""
        deadline_s = time.monotonic() + CLEAR_TIMEOUT_S
        is_empty = False
        while not is_empty and time.monotonic() < deadline_s:
            self._move_from(end)
            is_empty = self._space.wait_until_unused(end=end, timeout_s=MOVE_AGAIN_S)

    def _move_from(self, end: int) -> None:
        """Raises BackendError when the index cannot be read."""
        try:
            for batch in self._index.records():
                for key, raw in batch:
                    record = decode_record(key, raw)
                    if record is not None and record.chunk_ids.max() >= end:
                        self._move(key, raw, record, end)
        except lmdb.Error as error:
            raise BackendError(f"the index cannot be read: {error}") from error

    def _move(self, key: bytes, raw: bytes, record: IndexRecord, end: int) -> None:
        """Write those chunks of an object that lie from ``end`` on to others, unless it changes meanwhile."""
        is_leaving = record.chunk_ids >= end
        leaving = record.chunk_ids[is_leaving]
        with self._space.reading([key]):
            allocated = self._space.allocate_to_move(len(leaving))
            if allocated is None:
                return
            chunk_ids = record.chunk_ids.copy()
            chunk_ids[is_leaving] = allocated
            moved = replace(record, chunk_ids=chunk_ids)
            is_moved = False
            try:
                if self._index.is_still(key, raw):
                    self._slab.move(leaving, allocated)
                    is_moved = self._index.replace(key, raw, moved)
            except (lmdb.Error, OSError) as error:
                logger.warning("an object could not be moved: %s", error)
            finally:
                if is_moved:
                    self._space.moved(key, leaving)
                else:
                    self._space.give_up([self._slab.usable(allocated)])

    def cut(self, capacity_bytes: int) -> None:
        """Give back what lies behind the capacity and behind everything in use."""
        chunks_max = capacity_bytes // CHUNK_BYTES
        end = max(chunks_max, self._space.used_end)
        if end > chunks_max:
            logger.warning("%d MiB stay taken until the next start or resize", (end - chunks_max) * CHUNK_BYTES >> 20)
        if end < self._slab.chunks:
            self._space.limit(capacity_bytes, end=end)
            self._slab.cut(end)
