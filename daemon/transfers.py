"""Work for the storage threads: batches of objects, cut into chunks."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hicache.backends.base import GetItem, PutItem
from hicache.backends.store_stats import Operation
from hicache.daemon.metrics import Metrics
from hicache.daemon.object_class import count_classes
from hicache.daemon.sessions import Session
from hicache.daemon.slowest import Slowest
from hicache.daemon.storage import Storage
from hicache.notices import Notices
from hicache.outcome import Outcome
from hicache.tracing import tracer
from hicache.workers import Job

# A chunk is the unit that a thread works on and that a deadline can cut a batch at. The backend has helpers of its own
# for a large one: two chunks of half the size pay twice for looking up, making room and committing.
CHUNK_BYTES_MAX = 32 * 1024 * 1024
CHUNK_ITEMS_MAX = 256


@dataclass(frozen=True, slots=True)
class Extent:
    """One object of a batch and where its bytes are in the region: ``[offset, offset + size_bytes)``, checked.

    0 is the offset where they come or go over the connection.
    """

    index: int  # position in the batch
    key: bytes  # physical
    offset: int
    size_bytes: int


Work = Callable[[], list[Outcome]]
Item = TypeVar("Item", GetItem, PutItem)


class Transfers:
    """Has the work of all sessions done by storage threads. Thread-safe."""

    def __init__(self, storage: Storage, metrics: Metrics, *, chunk_bytes_ceiling: int) -> None:
        self.store = storage.store
        self._storage = storage
        self._metrics = metrics
        self._notices = Notices(logging.getLogger(__name__))
        self.slowest = Slowest()
        self._tracer = tracer()
        self.chunk_bytes_max = min(CHUNK_BYTES_MAX, chunk_bytes_ceiling)

    def chunks(self, extents: Sequence[Extent]) -> deque[list[Extent]]:
        """The extents in chunks, each of them for one call of the store."""
        return split_chunks(extents, bytes_max=self.chunk_bytes_max)

    def submit(self, work: Work, item_count: int) -> Job[list[Outcome]]:
        """Queues ``work`` for a thread that moves bytes. It never raises: a failure is IO_ERROR for all items.

        Raises QueueFull.
        """
        return self._storage.bulk.submit(partial(self._safely, self._tracer.carried(work), item_count))

    def ask(self, work: Work, item_count: int) -> Job[list[Outcome]]:
        """As ``submit``, for a thread that answers short questions."""
        return self._storage.control.submit(partial(self._safely, work, item_count))

    def get(self, session: Session, items: Sequence[GetItem]) -> list[Outcome]:
        """Reads objects of a session in a storage thread, which calls it."""
        return self._timed(Operation.GET, session, items, self.store.get_into)

    def put(self, session: Session, items: Sequence[PutItem]) -> list[Outcome]:
        """Stores objects of a session in a storage thread, which calls it."""
        return self._timed(Operation.PUT, session, items, self.store.put)

    def _timed(
        self,
        operation: Operation,
        session: Session,
        items: Sequence[Item],
        move: Callable[[Sequence[Item]], list[Outcome]],
    ) -> list[Outcome]:
        with self._tracer.span(f"hicached.store.{operation}") as span:
            span.set_attributes({"hicached.objects": len(items)})
            started_s = time.perf_counter()
            outcomes = move(items)
            elapsed_s = time.perf_counter() - started_s
        moved = [item.key for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.OK]
        self.slowest.note(operation, elapsed_s, lambda: [(_size_bytes(item), item.key) for item in items])
        if moved:
            self._metrics.tally.moved(operation, count_classes(moved, session.object_classes), elapsed_s)
        return outcomes

    def withdraw(self, job: Job[list[Outcome]]) -> None:
        """Takes a job of ``submit`` back if no thread has started it."""
        self._storage.bulk.withdraw(job)

    def _safely(self, work: Work, item_count: int) -> list[Outcome]:
        try:
            outcomes = work()
        except Exception as error:
            self._metrics.storage_errors.inc()
            self._notices.warning("storage", "a storage call failed as a whole: %r", error)
            return [Outcome.IO_ERROR] * item_count
        assert len(outcomes) == item_count
        return outcomes


def _size_bytes(item: GetItem | PutItem) -> int:
    return len(item.target if isinstance(item, GetItem) else item.payload)


def split_chunks(extents: Iterable[Extent], *, bytes_max: int) -> deque[list[Extent]]:
    """Consecutive extents in chunks of at most ``bytes_max`` bytes and CHUNK_ITEMS_MAX items; a big one stays alone."""
    chunks: deque[list[Extent]] = deque()
    chunk_bytes = 0
    for extent in extents:
        if not chunks or chunk_bytes + extent.size_bytes > bytes_max or len(chunks[-1]) == CHUNK_ITEMS_MAX:
            chunks.append([])
            chunk_bytes = 0
        chunks[-1].append(extent)
        chunk_bytes += extent.size_bytes
    return chunks
