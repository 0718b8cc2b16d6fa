"""Moves batches between the store and memory, in chunks, within byte budgets, and never past a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hicache.backends.base import GetItem, PutItem
from hicache.daemon.memory import Region
from hicache.daemon.metrics import Metrics
from hicache.daemon.sessions import Session
from hicache.daemon.storage import Storage
from hicache.notices import Notices
from hicache.outcome import Outcome
from hicache.workers import Job, QueueFull

# A chunk is the unit that a thread works on and that a deadline can cut a batch at. Reads are small, so that several
# threads share a batch; writes are large, because each is one commit of the backend.
READ_CHUNK_BYTES_MAX = 8 * 1024 * 1024
WRITE_CHUNK_BYTES_MAX = 32 * 1024 * 1024
CHUNK_ITEMS_MAX = 256
CHUNKS_PER_CALL_MAX = 4  # of one call at a time in the queue, so that other calls get their turn


@dataclass(frozen=True, slots=True)
class Extent:
    """One object of a batch and where its bytes are in the region: ``[offset, offset + size_bytes)``, checked."""

    index: int  # position in the batch
    key: bytes  # physical
    offset: int
    size_bytes: int


Work = Callable[[], list[Outcome]]


class Transfers:
    """Runs the storage work of all sessions. Event loop only where nothing else is said; the work runs in storage
    threads.
    """

    def __init__(self, storage: Storage, metrics: Metrics, *, chunk_bytes_ceiling: int) -> None:
        self.store = storage.store
        self._storage = storage
        self._metrics = metrics
        self._notices = Notices(logging.getLogger(__name__))
        self.read_chunk_bytes_max = min(READ_CHUNK_BYTES_MAX, chunk_bytes_ceiling)
        self.write_chunk_bytes_max = min(WRITE_CHUNK_BYTES_MAX, chunk_bytes_ceiling)

    async def get(
        self, session: Session, region: Region, extents: Sequence[Extent], outcomes: list[Outcome], *, deadline: float
    ) -> None:
        """Backend -> region. Fills in the outcome of each extent; see ``_run``."""
        chunks = split_chunks(extents, bytes_max=self.read_chunk_bytes_max)
        await self._run(session, region, chunks, outcomes, work=self._read, deadline=deadline)

    async def put(
        self, session: Session, region: Region, extents: Sequence[Extent], outcomes: list[Outcome], *, deadline: float
    ) -> None:
        """Region -> backend. Fills in the outcome of each extent; see ``_run``."""
        chunks = split_chunks(extents, bytes_max=self.write_chunk_bytes_max)
        await self._run(session, region, chunks, outcomes, work=self._write, deadline=deadline)

    def submit(self, work: Work, item_count: int) -> Job[list[Outcome]]:
        """Queues ``work`` for a thread that moves bytes. It never raises: a failure is IO_ERROR for all items.

        Raises QueueFull. Thread-safe.
        """
        return self._storage.bulk.submit(partial(self._safely, work, item_count))

    def ask(self, work: Work, item_count: int) -> Job[list[Outcome]]:
        """As ``submit``, for a thread that answers short questions."""
        return self._storage.control.submit(partial(self._safely, work, item_count))

    def withdraw(self, job: Job[list[Outcome]]) -> None:
        """Takes a job of ``submit`` back if no thread has started it. Thread-safe."""
        self._storage.bulk.withdraw(job)

    async def _run(
        self,
        session: Session,
        region: Region,
        chunks: deque[list[Extent]],
        outcomes: list[Outcome],
        *,
        work: Callable[[Region, Sequence[Extent]], list[Outcome]],
        deadline: float,
    ) -> None:
        """Works through the chunks. At the deadline every item without a result is DEADLINE, and chunks that no thread
        has started are taken back; running ones go on, and hold the region until they end. A region that is detached
        meanwhile leaves CANCELLED, a full queue REFUSED.
        """
        for chunk in chunks:
            _fill(outcomes, chunk, Outcome.DEADLINE)
        running: dict[asyncio.Future[list[Outcome]], tuple[Job[list[Outcome]], list[Extent]]] = {}
        try:
            async with asyncio.timeout_at(deadline):
                while chunks or running:
                    while chunks and len(running) < CHUNKS_PER_CALL_MAX:
                        chunk = chunks.popleft()
                        job = await self._start_chunk(session, region, chunk, work, outcomes, deadline=deadline)
                        if job is not None:
                            running[asyncio.wrap_future(job.future)] = (job, chunk)
                    await _collect(running, outcomes)
        except TimeoutError:
            self._notices.warning("deadline", "a transfer of session %d was not done in time", session.session_id)
        finally:
            for job, _ in running.values():
                self.withdraw(job)

    async def _start_chunk(
        self,
        session: Session,
        region: Region,
        chunk: list[Extent],
        work: Callable[[Region, Sequence[Extent]], list[Outcome]],
        outcomes: list[Outcome],
        *,
        deadline: float,
    ) -> Job[list[Outcome]] | None:
        ticket = await session.budget.acquire(sum(extent.size_bytes for extent in chunk), deadline=deadline)
        if not region.hold():
            ticket.drop()
            _fill(outcomes, chunk, Outcome.CANCELLED)
            return None

        def let_go() -> None:
            ticket.drop()
            region.release()

        try:
            job = self.submit(partial(work, region, chunk), len(chunk))
        except QueueFull:
            let_go()
            _fill(outcomes, chunk, Outcome.REFUSED)
            return None
        _when_done(job, let_go)
        return job

    def _safely(self, work: Work, item_count: int) -> list[Outcome]:
        try:
            outcomes = work()
        except Exception as error:
            self._metrics.storage_errors.inc()
            self._notices.warning("storage", "a storage call failed as a whole: %r", error)
            return [Outcome.IO_ERROR] * item_count
        assert len(outcomes) == item_count
        return outcomes

    def _read(self, region: Region, chunk: Sequence[Extent]) -> list[Outcome]:
        with _slices(region, chunk) as targets:
            items = [GetItem(extent.key, target) for extent, target in zip(chunk, targets, strict=True)]
            return self.store.get_into(items)

    def _write(self, region: Region, chunk: Sequence[Extent]) -> list[Outcome]:
        with _slices(region, chunk) as sources:
            items = [PutItem(extent.key, source) for extent, source in zip(chunk, sources, strict=True)]
            return self.store.put(items)


def _when_done(job: Job[list[Outcome]], let_go: Callable[[], None]) -> None:
    """Calls ``let_go`` in the event loop when no thread touches what the job touches any more."""
    loop = asyncio.get_running_loop()

    def ended(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends, and its mappings with it
            loop.call_soon_threadsafe(let_go)

    job.future.add_done_callback(ended)


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


@contextlib.contextmanager
def _slices(region: Region, chunk: Sequence[Extent]) -> Iterator[list[memoryview]]:
    """The bytes of each extent, released at the end of the block so that the region can be unmapped."""
    views = [region.view[extent.offset : extent.offset + extent.size_bytes] for extent in chunk]
    try:
        yield views
    finally:
        for view in views:
            with contextlib.suppress(BufferError):  # still exported somewhere: the region logs it when it goes
                view.release()


async def _collect(
    running: dict[asyncio.Future[list[Outcome]], tuple[Job[list[Outcome]], list[Extent]]], outcomes: list[Outcome]
) -> None:
    """Waits for at least one running chunk, and writes down the results of all that are done."""
    if not running:
        return
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for future in done:
        _, chunk = running.pop(future)
        if future.cancelled():
            _fill(outcomes, chunk, Outcome.CANCELLED)
            continue
        for extent, outcome in zip(chunk, future.result(), strict=True):
            outcomes[extent.index] = outcome


def _fill(outcomes: list[Outcome], chunk: Iterable[Extent], outcome: Outcome) -> None:
    for extent in chunk:
        outcomes[extent.index] = outcome
