"""Objects between the store and registered memory of a client, which storage threads write to and read."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hicache.backends.base import GetItem, PutItem
from hicache.daemon.batches import Batch
from hicache.daemon.budget import Granted
from hicache.daemon.bulk_connection import BulkConnection
from hicache.daemon.memory import Region
from hicache.daemon.sessions import Session
from hicache.daemon.transfers import Extent, Transfers
from hicache.notices import Notices
from hicache.outcome import Outcome
from hicache.workers import Job, QueueFull

CHUNKS_PER_CALL_MAX = 4  # of one call at a time in the queue, so that other calls get their turn

Work = Callable[[Sequence[Extent]], list[Outcome]]

_notices = Notices(logging.getLogger(__name__))


class RegionTransfer:
    """One call about registered memory. In the thread of its connection, which only waits."""

    def __init__(
        self, transfers: Transfers, session: Session, region: Region, connection: BulkConnection, *, deadline_s: float
    ) -> None:
        self._transfers = transfers
        self._session = session
        self._region = region
        self._connection = connection
        self._deadline_s = deadline_s
        self._running: deque[tuple[Job[list[Outcome]], list[Extent]]] = deque()

    def load(self, batch: Batch) -> None:
        """Backend -> region. Fills in the outcome of each extent; see ``_run``."""
        self._run(batch, self._read)

    def store(self, batch: Batch) -> None:
        """Region -> backend. Fills in the outcome of each extent; see ``_run``."""
        self._run(batch, self._write)

    def _run(self, batch: Batch, work: Work) -> None:
        """Works through the chunks. At the deadline every item without a result is DEADLINE, and chunks that no thread
        has started are taken back; running ones go on, and hold the region until they end. A region that is detached
        meanwhile leaves CANCELLED, a full queue REFUSED. Raises ConnectionOver.
        """
        _fill(batch, batch.extents, Outcome.DEADLINE)
        chunks = self._transfers.chunks(batch.extents)
        try:
            while chunks or self._running:
                while chunks and len(self._running) < CHUNKS_PER_CALL_MAX:
                    self._start(batch, chunks.popleft(), work)
                if self._running:
                    self._connection.wait(self._running[0][0].future, deadline_s=self._deadline_s)
                    self._settle(batch, *self._running.popleft())
        except TimeoutError:
            _notices.warning("deadline", "a transfer of session %d was not done in time", self._session.session_id)
        finally:
            for job, chunk in self._running:
                self._transfers.withdraw(job)
                self._settle(batch, job, chunk)

    def _start(self, batch: Batch, chunk: list[Extent], work: Work) -> None:
        """Queues a chunk, once there is room for its bytes. Raises TimeoutError and ConnectionOver."""
        size_bytes = sum(extent.size_bytes for extent in chunk)
        ticket = self._session.budget.acquire(size_bytes, wait=self._wait_for_room)
        if not self._region.hold():
            ticket.drop()
            _fill(batch, chunk, Outcome.CANCELLED)
            return

        def let_go(_: object = None) -> None:
            ticket.drop()
            self._region.release()

        try:
            job = self._transfers.submit(partial(work, chunk), len(chunk))
        except QueueFull:
            let_go()
            _fill(batch, chunk, Outcome.REFUSED)
            return
        job.future.add_done_callback(let_go)
        self._running.append((job, chunk))

    def _settle(self, batch: Batch, job: Job[list[Outcome]], chunk: Sequence[Extent]) -> None:
        """Writes down the results of a chunk that is done."""
        if job.future.done() and not job.future.cancelled():
            for extent, outcome in zip(chunk, job.future.result(), strict=True):
                batch.outcomes[extent.index] = outcome

    def _wait_for_room(self, granted: Granted) -> None:
        self._connection.wait(granted, deadline_s=self._deadline_s)

    def _read(self, chunk: Sequence[Extent]) -> list[Outcome]:
        with self._slices(chunk) as targets:
            items = [GetItem(extent.key, target) for extent, target in zip(chunk, targets, strict=True)]
            return self._transfers.read(items)

    def _write(self, chunk: Sequence[Extent]) -> list[Outcome]:
        with self._slices(chunk) as sources:
            items = [
                PutItem(extent.key, source, self._session.namespace_tag)
                for extent, source in zip(chunk, sources, strict=True)
            ]
            return self._transfers.write(items)

    @contextlib.contextmanager
    def _slices(self, chunk: Sequence[Extent]) -> Iterator[list[memoryview]]:
        """The bytes of each extent, released at the end of the block so that the region can be unmapped."""
        view = self._region.view
        views = [view[extent.offset : extent.offset + extent.size_bytes] for extent in chunk]
        try:
            yield views
        finally:
            for view in views:
                with contextlib.suppress(BufferError):  # still exported somewhere: the region logs it when it goes
                    view.release()


def _fill(batch: Batch, chunk: Sequence[Extent], outcome: Outcome) -> None:
    for extent in chunk:
        batch.outcomes[extent.index] = outcome
