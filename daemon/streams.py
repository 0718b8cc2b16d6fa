"""Objects over a connection of the bulk socket, for clients that cannot share memory."""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

from hicache.backends.base import GetItem, PutItem
from hicache.checksum import payload_hasher
from hicache.daemon.batches import Batch
from hicache.daemon.budget import Granted, Ticket
from hicache.daemon.bulk_connection import BulkConnection, ConnectionOver
from hicache.daemon.config import DaemonConfig
from hicache.daemon.sessions import Session
from hicache.daemon.staging import Staging
from hicache.daemon.transfers import Extent, Transfers, split_chunks
from hicache.outcome import Outcome
from hicache.tenancy import TENANT_BYTES
from hicache.wire.bulk import BULK_CHECKSUM, BULK_OBJECT, BULK_PIECE_BYTES
from hicache.workers import Job, QueueFull

# What a storage thread reads while the chunk before is sent, and writes while the next one is received.
READ_CHUNK_BYTES = 2 * 1024 * 1024
WRITE_CHUNK_BYTES = 4 * 1024 * 1024
WRITING_CHUNKS_MAX = 2
PARTS_MAX = 256  # of one call of the kernel


@dataclass(slots=True, eq=False)
class _Loading:
    """A chunk on its way to a client; ``job`` is None where there was no room or no place in the queue for it."""

    chunk: list[Extent]
    failure: Outcome = Outcome.DEADLINE  # of all objects, unless the job says otherwise
    ticket: Ticket | None = None
    buffers: list[bytearray] = field(default_factory=list)
    job: Job[list[Outcome]] | None = None


class StreamSender:
    """Answers one GET: while a chunk of objects is sent, the next one is read. In the thread of the connection."""

    def __init__(
        self, transfers: Transfers, staging: Staging, session: Session, connection: BulkConnection, *, deadline_s: float
    ) -> None:
        self._transfers = transfers
        self._staging = staging
        self._budget = session.budget
        self._connection = connection
        self._deadline_s = deadline_s
        self._chunk_bytes_max = min(READ_CHUNK_BYTES, transfers.chunk_bytes_max)
        self._loading: deque[_Loading] = deque()

    def send_all(self, batch: Batch) -> None:
        """Sends every object or its outcome; fills in ``batch.outcomes``. A client that reads slowly slows only itself:
        no more than two chunks are in memory. Raises ConnectionOver.
        """
        tried = {extent.index for extent in batch.extents}
        headers = [
            BULK_OBJECT.pack(index, outcome) for index, outcome in enumerate(batch.outcomes) if index not in tried
        ]
        if headers:
            self._connection.send([b"".join(headers)])
        for extent in batch.extents:
            batch.outcomes[extent.index] = Outcome.DEADLINE
        chunks = split_chunks(batch.extents, bytes_max=self._chunk_bytes_max)
        try:
            while chunks or self._loading:
                if not self._loading:
                    self._loading.append(self._load(chunks.popleft()))
                self._load_ahead(chunks)
                self._send(self._loading[0], batch.outcomes)
                self._free(self._loading.popleft())
        finally:
            for loading in self._loading:
                self._free(loading)

    def _load(self, chunk: list[Extent]) -> _Loading:
        """Starts to read a chunk, once there is room for it."""
        loading = _Loading(chunk)
        try:
            loading.ticket = self._budget.acquire(_bytes_of(chunk), wait=self._wait_for_room)
        except TimeoutError:
            return loading
        return self._start(loading)

    def _load_ahead(self, chunks: deque[list[Extent]]) -> None:
        """Starts the chunk after this one if there is room now: whoever holds room never waits for more."""
        if not chunks:
            return
        ticket = self._budget.try_acquire(_bytes_of(chunks[0]))
        if ticket is not None:
            self._loading.append(self._start(_Loading(chunks.popleft(), ticket=ticket)))

    def _start(self, loading: _Loading) -> _Loading:
        try:
            for extent in loading.chunk:
                loading.buffers.append(self._staging.lend(extent.size_bytes))
        except MemoryError:
            self._free(loading)
            raise
        items = [
            GetItem(extent.key, memoryview(buffer))
            for extent, buffer in zip(loading.chunk, loading.buffers, strict=True)
        ]
        try:
            loading.job = self._transfers.submit(lambda: self._transfers.read(items), len(items))
        except QueueFull:
            loading.failure = Outcome.REFUSED
        return loading

    def _wait_for_room(self, granted: Granted) -> None:
        self._connection.wait(granted, deadline_s=self._deadline_s)

    def _send(self, loading: _Loading, outcomes: list[Outcome]) -> None:
        results = [loading.failure] * len(loading.chunk)
        if loading.job is not None:
            with contextlib.suppress(TimeoutError, CancelledError):
                results = self._connection.wait(loading.job.future, deadline_s=self._deadline_s)
        parts: list[bytes | memoryview] = []
        for position, (extent, result) in enumerate(zip(loading.chunk, results, strict=True)):
            outcomes[extent.index] = result
            parts.append(BULK_OBJECT.pack(extent.index, result))
            if result is Outcome.OK:
                self._send_payload(extent, memoryview(loading.buffers[position]), parts)
        self._connection.send(parts)

    def _send_payload(self, extent: Extent, payload: memoryview, parts: list[bytes | memoryview]) -> None:
        """Sends all but the last part of it; ``parts`` is what is to be sent before, and then what is left."""
        hasher = payload_hasher(extent.key[TENANT_BYTES:])
        for start in range(0, len(payload), BULK_PIECE_BYTES):
            piece = payload[start : start + BULK_PIECE_BYTES]
            hasher.update(piece)
            parts.append(piece)
            if len(piece) == BULK_PIECE_BYTES or len(parts) > PARTS_MAX:
                self._connection.send(parts)
                parts.clear()
        parts.append(BULK_CHECKSUM.pack(hasher.intdigest()))

    def _free(self, loading: _Loading) -> None:
        """Gives room and memory back, as soon as no storage thread touches them."""

        def give_back(_: object = None) -> None:
            for buffer in loading.buffers:
                self._staging.give_back(buffer)
            if loading.ticket is not None:
                loading.ticket.drop()

        if loading.job is None:
            give_back()
            return
        self._transfers.withdraw(loading.job)
        loading.job.future.add_done_callback(give_back)


@dataclass(slots=True, eq=False)
class _Upload:
    """An object that a client is sending.

    [0, received) in ``buffer`` | [received, reserved) covered by ``ticket`` | [reserved, size) not asked for yet
    """

    extent: Extent
    buffer: bytearray
    ticket: Ticket | None = None
    received_bytes: int = 0
    reserved_bytes: int = 0


class StreamReceiver:
    """Takes the objects of one PUT: while a chunk is stored, the next one is received. In the thread of the connection.

    Nothing of an object reaches the store before all of it is here and its checksum is right, so a client that dies in
    the middle of one leaves nothing behind.
    """

    def __init__(
        self,
        transfers: Transfers,
        staging: Staging,
        session: Session,
        connection: BulkConnection,
        config: DaemonConfig,
        *,
        deadline_s: float,
    ) -> None:
        self._transfers = transfers
        self._staging = staging
        self._budget = session.budget
        self._namespace_tag = session.namespace_tag
        self._connection = connection
        self._object_bytes_max = config.object_bytes_max
        self._deadline_s = deadline_s
        self._chunk_bytes_max = min(WRITE_CHUNK_BYTES, transfers.chunk_bytes_max)
        self._received_bytes = 0  # of this call
        self._current: _Upload | None = None
        self._whole: list[_Upload] = []
        self._writing: deque[tuple[list[_Upload], Job[list[Outcome]]]] = deque()

    def receive_all(self, extents: list[Extent], outcomes: list[Outcome]) -> None:
        """Receives the objects in order, and fills in their outcomes: DEADLINE for what is not stored by then. What was
        stored before one of these is raised stays stored.

        Raises ConnectionOver, and Refusal(BAD_STREAM) when the client keeps the daemon waiting.
        """
        for extent in extents:
            outcomes[extent.index] = Outcome.DEADLINE
        try:
            for extent in extents:
                self._receive(extent, outcomes)
            self._flush(outcomes)
            while self._writing:
                self._settle_oldest(outcomes)
        finally:
            for upload in (*self._whole, *([self._current] if self._current else [])):
                self._free(upload)
            for _, job in self._writing:
                self._transfers.withdraw(job)

    def _receive(self, extent: Extent, outcomes: list[Outcome]) -> None:
        upload = self._current = _Upload(extent, self._staging.lend(extent.size_bytes))
        payload = memoryview(upload.buffer)
        hasher = payload_hasher(extent.key[TENANT_BYTES:])
        while upload.received_bytes < extent.size_bytes:
            if upload.received_bytes == upload.reserved_bytes:
                self._reserve(upload, outcomes)
            end = min(upload.received_bytes + BULK_PIECE_BYTES, upload.reserved_bytes)
            piece = payload[upload.received_bytes : end]
            self._connection.receive(piece)
            hasher.update(piece)
            self._received_bytes += len(piece)
            upload.received_bytes = end
        [checksum] = BULK_CHECKSUM.unpack(self._connection.receive_bytes(BULK_CHECKSUM.size))
        self._current = None
        if hasher.intdigest() != checksum:
            outcomes[extent.index] = Outcome.CORRUPT
            self._free(upload)
            return
        self._whole.append(upload)
        if sum(whole.extent.size_bytes for whole in self._whole) >= self._chunk_bytes_max:
            self._flush(outcomes)

    def _reserve(self, upload: _Upload, outcomes: list[Outcome]) -> None:
        """Room for more of an object: for what has been sent, not for what was announced. Who has sent so much in this
        call may be expected to send as much again.

        While there is room for one more object of any size beside it, just these bytes are taken. Otherwise all the
        rest of the object is waited for. That never ends with uploads that wait for each other: what was taken without
        waiting always left room for a whole object, so who is first in the line gets its rest, ends, and gives both
        back. Objects that are complete are stored before the wait, so they hold up nobody.
        """
        missing_bytes = upload.extent.size_bytes - upload.reserved_bytes
        sent_bytes = self._received_bytes
        if sent_bytes < missing_bytes:
            sent_bytes = max(sent_bytes, self._connection.available_bytes())
        step_bytes = min(missing_bytes, sent_bytes)
        ticket = self._budget.try_acquire(step_bytes, spare_bytes=self._object_bytes_max)
        if ticket is None:
            self._flush(outcomes)
            step_bytes = missing_bytes
            try:
                ticket = self._budget.acquire(step_bytes, wait=self._wait_for_room)
            except TimeoutError as error:
                raise ConnectionOver("deadline") from error
        upload.reserved_bytes += step_bytes
        if upload.ticket is None:
            upload.ticket = ticket
        else:
            upload.ticket.absorb(ticket)

    def _wait_for_room(self, granted: Granted) -> None:
        self._connection.wait(granted, deadline_s=self._deadline_s)

    def _flush(self, outcomes: list[Outcome]) -> None:
        """Starts to store the objects that are complete, when not too many are being stored."""
        batch, self._whole = self._whole, []
        if not batch:
            return
        items = [PutItem(upload.extent.key, memoryview(upload.buffer), self._namespace_tag) for upload in batch]

        def free(_: object = None) -> None:
            for upload in batch:
                self._free(upload)

        try:
            job = self._transfers.submit(lambda: self._transfers.write(items), len(items))
        except QueueFull:
            free()
            _settle(batch, [Outcome.REFUSED] * len(batch), outcomes)
            return
        job.future.add_done_callback(free)
        self._writing.append((batch, job))
        if len(self._writing) > WRITING_CHUNKS_MAX:
            self._settle_oldest(outcomes)

    def _settle_oldest(self, outcomes: list[Outcome]) -> None:
        batch, job = self._writing.popleft()
        try:
            _settle(batch, self._connection.wait(job.future, deadline_s=self._deadline_s), outcomes)
        except (TimeoutError, CancelledError):
            self._transfers.withdraw(job)
        except ConnectionOver:
            self._transfers.withdraw(job)
            raise

    def _free(self, upload: _Upload) -> None:
        self._staging.give_back(upload.buffer)
        if upload.ticket is not None:
            upload.ticket.drop()


def _settle(batch: list[_Upload], stored: list[Outcome], outcomes: list[Outcome]) -> None:
    for upload, outcome in zip(batch, stored, strict=True):
        outcomes[upload.extent.index] = outcome


def _bytes_of(chunk: list[Extent]) -> int:
    return sum(extent.size_bytes for extent in chunk)
