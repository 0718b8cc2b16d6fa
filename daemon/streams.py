"""Objects over a gRPC stream in bounded frames, for clients that cannot share memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from hicache.backends.base import GetItem, PutItem
from hicache.checksum import payload_checksum
from hicache.daemon.batches import Batch, check_size
from hicache.daemon.budget import Ticket
from hicache.daemon.config import DaemonConfig
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session
from hicache.daemon.transfers import Extent, Transfers, split_chunks
from hicache.outcome import Outcome
from hicache.tenancy import TENANT_BYTES
from hicache.wire import hicached_pb2 as pb
from hicache.wire.protocol import KEY_BYTES_MAX, RefusalCode
from hicache.workers import QueueFull

SendFrame = Callable[[pb.Frame], Awaitable[None]]
NextFrame = Callable[[], Awaitable[pb.Frame | None]]  # None: the client has sent everything


@dataclass(slots=True)
class _Loaded:
    """An object in the daemon's memory on its way to a client."""

    extent: Extent
    payload: bytearray
    outcome: Outcome = Outcome.DEADLINE
    checksum: int = 0


class StreamSender:
    """Answers one GetStream: loads a chunk of objects, sends their frames, loads the next."""

    def __init__(self, transfers: Transfers, session: Session, *, frame_bytes_max: int) -> None:
        self._store = transfers.store
        self._transfers = transfers
        self._session = session
        self._frame_bytes_max = frame_bytes_max

    async def send_all(self, batch: Batch, send: SendFrame, *, deadline: float) -> None:
        """Sends every object or its outcome; fills in ``batch.outcomes``. A client that reads slowly slows only itself:
        no more than one chunk is in memory, and gRPC's flow control holds back the next one.
        """
        tried = {extent.index for extent in batch.extents}
        for index, outcome in enumerate(batch.outcomes):
            if index not in tried:
                await send(pb.Frame(index=index, outcome=outcome, last=True))
        for chunk in split_chunks(batch.extents, bytes_max=self._transfers.read_chunk_bytes_max):
            await self._send_chunk(chunk, batch.outcomes, send, deadline=deadline)

    async def _send_chunk(
        self, chunk: list[Extent], outcomes: list[Outcome], send: SendFrame, *, deadline: float
    ) -> None:
        for extent in chunk:
            outcomes[extent.index] = Outcome.DEADLINE
        try:
            ticket = await self._session.budget.acquire(sum(extent.size_bytes for extent in chunk), deadline=deadline)
        except TimeoutError:
            loaded = [_Loaded(extent, bytearray()) for extent in chunk]
            await self._send_loaded(loaded, outcomes, send)
            return
        try:
            loaded = await self._load(chunk, ticket, deadline=deadline)
            await self._send_loaded(loaded, outcomes, send)
        finally:
            ticket.drop()

    async def _load(self, chunk: list[Extent], ticket: Ticket, *, deadline: float) -> list[_Loaded]:
        """Reads and checks the chunk. Objects that are not there in time have outcome DEADLINE and no payload."""
        loaded = [_Loaded(extent, bytearray(extent.size_bytes)) for extent in chunk]
        ticket.share()
        try:
            job = self._transfers.start(lambda: self._read(loaded), len(loaded), let_go=ticket.drop)
        except QueueFull:
            ticket.drop()
            return [_Loaded(extent, bytearray(), Outcome.REFUSED) for extent in chunk]
        try:
            async with asyncio.timeout_at(deadline):
                outcomes = await asyncio.shield(asyncio.wrap_future(job.future))
        except TimeoutError:
            return [_Loaded(extent, bytearray()) for extent in chunk]
        finally:
            self._transfers.withdraw(job)
        for entry, outcome in zip(loaded, outcomes, strict=True):
            entry.outcome = outcome
        return loaded

    def _read(self, loaded: list[_Loaded]) -> list[Outcome]:
        items = [GetItem(entry.extent.key, memoryview(entry.payload)) for entry in loaded]
        outcomes = self._store.get_into(items)
        for entry, outcome in zip(loaded, outcomes, strict=True):
            if outcome is Outcome.OK:
                entry.checksum = payload_checksum(entry.extent.key[TENANT_BYTES:], memoryview(entry.payload))
        return outcomes

    async def _send_loaded(self, loaded: list[_Loaded], outcomes: list[Outcome], send: SendFrame) -> None:
        for entry in loaded:
            outcomes[entry.extent.index] = entry.outcome
            for frame in self._frames(entry):
                await send(frame)

    def _frames(self, entry: _Loaded) -> Iterator[pb.Frame]:
        index, size_bytes = entry.extent.index, entry.extent.size_bytes
        if entry.outcome is not Outcome.OK:
            yield pb.Frame(index=index, outcome=entry.outcome, last=True)
            return
        view = memoryview(entry.payload)
        for start in range(0, size_bytes, self._frame_bytes_max):
            payload = bytes(view[start : start + self._frame_bytes_max])
            if start + len(payload) < size_bytes:
                yield pb.Frame(index=index, payload=payload)
            else:
                yield pb.Frame(index=index, payload=payload, last=True, checksum=entry.checksum)


@dataclass(slots=True)
class _Upload:
    """An object that a client is sending. ``buffer`` is None where its bytes are thrown away."""

    index: int
    key: bytes
    size_bytes: int
    buffer: bytearray | None
    ticket: Ticket | None
    received_bytes: int = 0


class StreamReceiver:
    """Takes one PutStream: gathers whole objects, checks them, and stores them a chunk at a time.

    Nothing of an object reaches the store before all of it is here and its checksum is right, so a client that dies in
    the middle of one leaves nothing behind.
    """

    def __init__(self, transfers: Transfers, session: Session, config: DaemonConfig) -> None:
        self._store = transfers.store
        self._transfers = transfers
        self._session = session
        self._config = config
        self.sizes: list[int] = []
        self._outcomes: list[Outcome] = []
        self._whole: list[_Upload] = []
        self._current: _Upload | None = None
        self._total_bytes = 0

    async def receive_all(self, first: pb.Frame, next_frame: NextFrame, *, deadline: float) -> list[Outcome]:
        """Outcomes by index. What was stored before one of these is raised stays stored.

        Raises Refusal(BAD_FRAME or BATCH_TOO_LARGE), and TimeoutError at the deadline.
        """
        try:
            frame: pb.Frame | None = first
            while frame is not None:
                await self._take(frame, deadline=deadline)
                frame = await next_frame()
            if self._current is not None:
                raise Refusal(RefusalCode.BAD_FRAME, f"the stream ended within object {self._current.index}")
            await self._flush(deadline=deadline)
            return self._outcomes
        finally:
            for upload in (*self._whole, *([self._current] if self._current else [])):
                _drop(upload)

    async def _take(self, frame: pb.Frame, *, deadline: float) -> None:
        if len(frame.payload) > self._config.frame_bytes_max:
            raise Refusal(
                RefusalCode.BAD_FRAME,
                f"a frame of {len(frame.payload)} bytes: frame_bytes_max is {self._config.frame_bytes_max}",
            )
        if self._current is None:
            self._current = await self._begin(frame, deadline=deadline)
        upload = self._current
        if frame.index != upload.index:
            raise Refusal(RefusalCode.BAD_FRAME, f"a frame of object {frame.index} within object {upload.index}")
        end = upload.received_bytes + len(frame.payload)
        if end > upload.size_bytes or (frame.last and end != upload.size_bytes):
            raise Refusal(RefusalCode.BAD_FRAME, f"object {upload.index} has {end} bytes, not {upload.size_bytes}")
        if upload.buffer is not None:
            upload.buffer[upload.received_bytes : end] = frame.payload
        upload.received_bytes = end
        if frame.last:
            self._current = None
            await self._finish(upload, frame.checksum, deadline=deadline)

    async def _begin(self, frame: pb.Frame, *, deadline: float) -> _Upload:
        index = len(self._outcomes)
        if frame.index != index or not 1 <= len(frame.key) <= KEY_BYTES_MAX:
            raise Refusal(
                RefusalCode.BAD_FRAME,
                f"expected the first frame of object {index}, with a key of 1 to {KEY_BYTES_MAX} bytes",
            )
        if index >= self._config.batch_keys_max:
            raise Refusal(RefusalCode.BATCH_TOO_LARGE, f"batch_keys_max is {self._config.batch_keys_max}")
        self.sizes.append(frame.size)
        self._total_bytes += frame.size
        if self._total_bytes > self._config.batch_bytes_max:
            raise Refusal(RefusalCode.BATCH_TOO_LARGE, f"batch_bytes_max is {self._config.batch_bytes_max}")
        problem = check_size(frame.size, self._config)
        if problem is not None:
            self._outcomes.append(problem)
            return _Upload(index, frame.key, frame.size, buffer=None, ticket=None)
        self._outcomes.append(Outcome.DEADLINE)
        ticket = await self._acquire(frame.size, deadline=deadline)
        return _Upload(index, frame.key, frame.size, bytearray(frame.size), ticket)

    async def _acquire(self, size_bytes: int, *, deadline: float) -> Ticket:
        """Room for one object. Never waits while it holds room: two uploads would wait for each other."""
        ticket = self._session.budget.try_acquire(size_bytes)
        if ticket is None:
            await self._flush(deadline=deadline)
            ticket = await self._session.budget.acquire(size_bytes, deadline=deadline)
        return ticket

    async def _finish(self, upload: _Upload, checksum: int, *, deadline: float) -> None:
        if upload.buffer is None:
            return
        self._whole.append(upload)
        if payload_checksum(upload.key, memoryview(upload.buffer)) != checksum:
            self._outcomes[upload.index] = Outcome.CORRUPT
            self._whole.pop()
            _drop(upload)
        elif sum(whole.size_bytes for whole in self._whole) >= self._transfers.read_chunk_bytes_max:
            await self._flush(deadline=deadline)

    async def _flush(self, *, deadline: float) -> None:
        """Stores the objects that are complete. One that is not stored by the deadline keeps the outcome DEADLINE."""
        batch, self._whole = self._whole, []
        if not batch:
            return

        def let_go() -> None:
            for upload in batch:
                _drop(upload)

        try:
            job = self._transfers.start(lambda: self._write(batch), len(batch), let_go=let_go)
        except QueueFull:
            let_go()
            self._settle(batch, [Outcome.REFUSED] * len(batch))
            return
        try:
            async with asyncio.timeout_at(deadline):
                self._settle(batch, await asyncio.shield(asyncio.wrap_future(job.future)))
        finally:
            self._transfers.withdraw(job)

    def _write(self, batch: list[_Upload]) -> list[Outcome]:
        return self._store.put(
            [
                PutItem(self._session.physical_key(upload.key), memoryview(upload.buffer))
                for upload in batch
                if upload.buffer is not None
            ]
        )

    def _settle(self, batch: list[_Upload], outcomes: list[Outcome]) -> None:
        for upload, outcome in zip(batch, outcomes, strict=True):
            self._outcomes[upload.index] = outcome


def _drop(upload: _Upload) -> None:
    if upload.ticket is not None:
        upload.ticket.drop()
        upload.ticket = None
