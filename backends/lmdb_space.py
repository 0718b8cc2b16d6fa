"""What the threads of an open LMDB store must know of each other: who writes which key, and which chunks are free."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hicache.backends.base import Usage
from hicache.backends.chunk_ids import ChunkIds
from hicache.backends.lmdb_layout import CHUNK_BYTES, ChunkIdArray, IndexRecord
from hicache.errors import BackendError


class KeyClaims:
    """One put at a time of each key, so that no payload is copied twice. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._claimed: set[bytes] = set()
        self._is_shut = False

    @contextmanager
    def of(self, keys: Sequence[bytes], *, timeout_s: float) -> Iterator[bool]:
        """Inside, nobody else is there with any of these keys; False when somebody did not leave in time.

        Raises BackendError after ``shut``.
        """
        with self._lock:
            is_free = self._lock.wait_for(lambda: self._is_shut or self._claimed.isdisjoint(keys), timeout_s)
            if self._is_shut:
                raise BackendError("the backend is closed")
            if is_free:
                self._claimed.update(keys)
        if not is_free:
            yield False
            return
        try:
            yield True
        finally:
            with self._lock:
                self._claimed.difference_update(keys)
                self._lock.notify_all()

    def shut(self, *, timeout_s: float) -> bool:
        """Let nobody enter any more; whether those inside leave in time."""
        with self._lock:
            self._is_shut = True
            self._lock.notify_all()
            return self._lock.wait_for(lambda: not self._claimed, timeout_s)


@dataclass(slots=True)
class _Content:
    objects: int
    payload_bytes: int


class ChunkSpace:
    """Thread-safe. What ``usage`` tells is equal to the committed index, plus the chunks of puts in progress.

    A chunk is free when no committed index record names it and no get that may have seen such a record is under way.
    Only free chunks are written to. A get that is stuck keeps the chunks of its own keys, and no others.
    """

    def __init__(self, ids: ChunkIds, *, capacity_bytes: int, objects: int, payload_bytes: int) -> None:
        self._lock = threading.Condition()
        self._ids = ids
        self._capacity_bytes = capacity_bytes
        self._content = _Content(objects, payload_bytes)
        self._readers: Counter[bytes] = Counter()
        self._unread: dict[bytes, list[ChunkIdArray]] = {}  # removed while being read: free when the readers are done

    @contextmanager
    def reading(self, keys: Sequence[bytes]) -> Iterator[None]:
        """Inside, the chunks that these keys have are not written to. Enter before looking the keys up."""
        with self._lock:
            self._readers.update(keys)
        try:
            yield
        finally:
            with self._lock:
                for key in keys:
                    self._end_reading(key)

    def _end_reading(self, key: bytes) -> None:
        self._readers[key] -= 1
        if self._readers[key]:
            return
        del self._readers[key]
        for chunk_ids in self._unread.pop(key, ()):
            self._release(chunk_ids)

    def _release(self, chunk_ids: ChunkIdArray) -> None:
        self._ids.release(chunk_ids)
        self._lock.notify_all()

    def allocate(self, counts: Sequence[int]) -> list[ChunkIdArray | None]:
        """Chunks for each of some objects, None where they do not fit: to be written, then ``added`` or ``give_up``."""
        with self._lock:
            together = self._ids.allocate(sum(counts))
            if together is None:
                return [self._ids.allocate(count) for count in counts]
        return [together[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]

    def allocate_to_move(self, count: int) -> ChunkIdArray | None:
        """Chunks for what gives up as many: they may exceed the capacity until then."""
        with self._lock:
            return self._ids.allocate(count, beyond_max=True)

    def give_up(self, allocated: Sequence[ChunkIdArray]) -> None:
        """Take chunks back that no record has ever named."""
        with self._lock:
            for chunk_ids in allocated:
                self._release(chunk_ids)

    def added(self, sizes_bytes: Sequence[int]) -> None:
        """Objects of these payloads are in the committed index."""
        with self._lock:
            self._content.objects += len(sizes_bytes)
            self._content.payload_bytes += sum(sizes_bytes)

    def removed(self, removed: Sequence[tuple[bytes, IndexRecord | None]]) -> None:
        """Objects are no longer in the committed index. Nobody knows the chunks of one whose record is None."""
        records = [(key, record) for key, record in removed if record is not None]
        with self._lock:
            self._content.objects -= len(removed)
            self._content.payload_bytes -= sum(record.size_bytes for _, record in records)
            free = [record.chunk_ids for key, record in records if not self._leave_to_readers(key, record.chunk_ids)]
            if free:
                self._release(np.concatenate(free))

    def moved(self, key: bytes, chunk_ids: ChunkIdArray) -> None:
        """The committed record of ``key`` names other chunks than these."""
        with self._lock:
            if not self._leave_to_readers(key, chunk_ids):
                self._release(chunk_ids)

    def _leave_to_readers(self, key: bytes, chunk_ids: ChunkIdArray) -> bool:
        """Whether somebody may be reading these chunks: then the last of them frees them."""
        if key not in self._readers:
            return False
        self._unread.setdefault(key, []).append(chunk_ids)
        return True

    def usage(self) -> Usage:
        """See ``Backend.usage``."""
        with self._lock:
            stored_bytes = self._ids.used_count * CHUNK_BYTES
            return Usage(self._content.objects, self._content.payload_bytes, stored_bytes, self._capacity_bytes)

    @property
    def used_end(self) -> int:
        """Every chunk in use is below this."""
        with self._lock:
            return self._ids.used_end

    def limit(self, capacity_bytes: int, *, end: int) -> None:
        """Hand out as many chunks as fit, all below ``end``. Those that are out stay out."""
        with self._lock:
            self._capacity_bytes = capacity_bytes
            self._ids.chunks_max = capacity_bytes // CHUNK_BYTES
            self._ids.set_end(end)

    def wait_until_unused(self, *, end: int, timeout_s: float) -> bool:
        """Whether no chunk from ``end`` on is in use, or comes out of use in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._ids.is_used_from(end), timeout_s)
