"""Objects over a gRPC stream in bounded frames, for clients that cannot share memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from hicache.backends.base import GetItem, PutItem
from hicache.checksum import payload_checksum
from hicache.daemon.batches import Batch, check_size
from hicache.daemon.budget import Ticket
from hicache.daemon.calls import REPLY_MARGIN_S_MAX
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

# How long a client may take to send, or to take, a frame: room that others wait for is held meanwhile.
FRAME_S = 5.0


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

        Raises TimeoutError when the client takes no frame for FRAME_S, or has not taken all soon after the deadline.
        """
        send = _bounded(send, ends_at=deadline + REPLY_MARGIN_S_MAX)
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


def _bounded(send: SendFrame, *, ends_at: float) -> SendFrame:
    async def send_in_time(frame: pb.Frame) -> None:
        async with asyncio.timeout_at(min(ends_at, asyncio.get_running_loop().time() + FRAME_S)):
            await send(frame)

    return send_in_time


@dataclass(slots=True)
class _Upload:
    """An object that a client is sending.

        [0, received) in ``buffer`` | [received, reserved) covered by ``ticket`` | [reserved, size) not asked for yet

    ``buffer`` is None where its bytes are thrown away.
    """

    index: int
    key: bytes
    size_bytes: int
    buffer: bytearray | None
    ticket: Ticket | None = None
    received_bytes: int = 0
    reserved_bytes: int = 0


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
        self.counted_bytes = 0  # against the tenant's rate
        self._outcomes: list[Outcome] = []
        self._whole: list[_Upload] = []
        self._current: _Upload | None = None
        self._total_bytes = 0

    async def receive_all(self, first: pb.Frame, next_frame: NextFrame, *, deadline: float) -> list[Outcome]:
        """Outcomes by index. What was stored before one of these is raised stays stored.

        Raises Refusal(BAD_FRAME or BATCH_TOO_LARGE), and TimeoutError at the deadline. A client that sends nothing for
        FRAME_S breaks the rules, too.
        """
        try:
            frame: pb.Frame | None = first
            while frame is not None:
                await self._take(frame, deadline=deadline)
                frame = await _within_patience(next_frame)
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
            self._current = self._begin(frame)
        upload = self._current
        if frame.index != upload.index:
            raise Refusal(RefusalCode.BAD_FRAME, f"a frame of object {frame.index} within object {upload.index}")
        end = upload.received_bytes + len(frame.payload)
        if end > upload.size_bytes or (frame.last and end != upload.size_bytes):
            raise Refusal(RefusalCode.BAD_FRAME, f"object {upload.index} has {end} bytes, not {upload.size_bytes}")
        if upload.buffer is not None:
            await self._reserve(upload, end, deadline=deadline)
            upload.buffer += frame.payload
        upload.received_bytes = end
        if frame.last:
            self._current = None
            await self._finish(upload, frame.checksum, deadline=deadline)

    def _begin(self, frame: pb.Frame) -> _Upload:
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
        if problem is None and not self._session.rates.try_bytes(frame.size):
            problem = Outcome.REFUSED
        if problem is not None:
            self._outcomes.append(problem)
            return _Upload(index, frame.key, frame.size, buffer=None)
        self.counted_bytes += frame.size
        self._outcomes.append(Outcome.DEADLINE)
        return _Upload(index, frame.key, frame.size, bytearray())

    async def _reserve(self, upload: _Upload, end: int, *, deadline: float) -> None:
        """Room for ``[0, end)`` of an object at least: only what is sent takes room, not what is announced.

        While there is room for one more object of any size beside it, just these bytes are taken. Otherwise all the
        rest of the object is waited for. That never ends with uploads that wait for each other: what was taken without
        waiting always left room for a whole object, so who is first in the line gets its rest, ends, and gives both
        back. Objects that are complete are stored before the wait, so they hold up nobody.
        """
        if end <= upload.reserved_bytes:
            return
        budget = self._session.budget
        spare_bytes = self._config.object_bytes_max
        ticket = budget.try_acquire(end - upload.reserved_bytes, spare_bytes=spare_bytes)
        if ticket is None:
            await self._flush(deadline=deadline)
            end = upload.size_bytes
            ticket = await budget.acquire(end - upload.reserved_bytes, deadline=deadline)
        upload.reserved_bytes = end
        if upload.ticket is None:
            upload.ticket = ticket
        else:
            upload.ticket.absorb(ticket)

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


async def _within_patience(next_frame: NextFrame) -> pb.Frame | None:
    patience = asyncio.timeout(FRAME_S)
    try:
        async with patience:
            return await next_frame()
    except TimeoutError as error:
        if not patience.expired():
            raise
        raise Refusal(RefusalCode.BAD_FRAME, f"no frame came within {FRAME_S:g} s") from error


def _drop(upload: _Upload) -> None:
    if upload.ticket is not None:
        upload.ticket.drop()
        upload.ticket = None
