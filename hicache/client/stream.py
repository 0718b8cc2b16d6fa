"""Objects as frames over a gRPC stream, for a client that cannot share its memory with hicached."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import grpc

from hicache.checksum import payload_checksum
from hicache.client.batch import decode_outcome, decode_outcomes, item_batches
from hicache.client.fault import NEVER_SENT, OUT_OF_TIME, Fault, call, fault_of, is_closed_channel
from hicache.client.session import Session
from hicache.client.transfer import Direction, Transfer
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as wire
from hicache.wire.protocol import pack_keys


def through_stream(session: Session, memory: memoryview, transfer: Transfer) -> Fault | None:
    """Move the bytes frame by frame, batch after batch, until all are done or a stream ends before its time.

    Returns the fault that ended it. hicached never touches ``memory`` here, and this thread is the only one that
    writes to it, so nothing is ever in doubt: when this returns, the bytes are the caller's.
    """
    move = _get_batch if transfer.direction is Direction.GET else _put_batch
    for batch in item_batches(transfer.items, transfer.pending, limits=session.limits):
        if transfer.left_s <= 0:
            return OUT_OF_TIME
        items = [transfer.items[position] for position in batch]
        try:
            outcomes, fault = move(session, memory, items, transfer)
        except ValueError as error:
            if not is_closed_channel(error):
                raise
            return NEVER_SENT
        for position, outcome in zip(batch, outcomes, strict=True):
            transfer.outcomes[position] = outcome
        if fault is not None:
            return fault
    return None


def _get_batch(
    session: Session, memory: memoryview, items: Sequence[L3Item], transfer: Transfer
) -> tuple[list[Outcome | None], Fault | None]:
    keys, key_bytes = pack_keys([item.key for item in items])
    request = wire.StreamGetRequest(
        session_secret=session.secret, keys=keys, key_bytes=key_bytes, sizes=[item.size_bytes for item in items]
    )
    assembly = FrameAssembly(memory, items)
    stream = session.stub.GetStream(request, timeout=transfer.left_s)
    fault = None
    try:
        for frame in stream:
            if not assembly.take(frame):
                break
    except grpc.RpcError as error:
        fault = fault_of(error)
    finally:
        stream.cancel()  # says nothing to a stream that has ended; one that has not would live on
    return assembly.outcomes(when_missing=None if fault else Outcome.IO_ERROR), fault


class FrameAssembly:
    """Writes the frames of one GetStream to where their objects belong, and verifies them there.

    An object is OK when its frames came in one piece, filled exactly its range, and the bytes that now lie in the
    memory match the checksum. Whatever else happens to it makes it IO_ERROR, and never touches another object.
    """

    def __init__(self, memory: memoryview, items: Sequence[L3Item]) -> None:
        self._memory = memory
        self._items = items
        self._outcomes: list[Outcome | None] = [None] * len(items)
        self._current: int | None = None  # the object whose frames are coming
        self._filled_bytes = 0

    def take(self, frame: wire.Frame) -> bool:
        """Use one frame. False when the stream makes no sense any more: no object without an outcome can trust it."""
        if frame.index >= len(self._items):
            return False
        if self._current is not None and frame.index != self._current:
            self._end(Outcome.IO_ERROR)  # it was cut short: another object's frame came before its last
        if self._outcomes[frame.index] is not None:
            return True  # a frame too many about something that is decided: its bytes go nowhere
        if self._current is None:
            self._current, self._filled_bytes = frame.index, 0
        if frame.outcome != Outcome.OK:
            self._end(decode_outcome(frame.outcome))
        elif self._filled_bytes + len(frame.payload) > self._items[frame.index].size_bytes:
            self._end(Outcome.IO_ERROR)
        else:
            self._write(frame)
        return True

    def outcomes(self, *, when_missing: Outcome | None) -> list[Outcome | None]:
        """One per item; ``when_missing`` for objects whose last frame never came."""
        return [when_missing if outcome is None else outcome for outcome in self._outcomes]

    def _write(self, frame: wire.Frame) -> None:
        item = self._items[frame.index]
        start = item.offset + self._filled_bytes
        self._filled_bytes += len(frame.payload)
        self._memory[start : start + len(frame.payload)] = frame.payload
        if frame.last:
            is_whole = self._filled_bytes == item.size_bytes and self._verifies(item, frame.checksum)
            self._end(Outcome.OK if is_whole else Outcome.IO_ERROR)

    def _verifies(self, item: L3Item, checksum: int) -> bool:
        with self._memory[item.offset : item.offset + item.size_bytes] as payload:
            return payload_checksum(item.key, payload) == checksum

    def _end(self, outcome: Outcome) -> None:
        assert self._current is not None
        self._outcomes[self._current] = outcome
        self._current = None


def _put_batch(
    session: Session, memory: memoryview, items: Sequence[L3Item], transfer: Transfer
) -> tuple[list[Outcome | None], Fault | None]:
    """Send what hicached does not have yet: a present object costs one key, not its bytes."""
    keys, key_bytes = pack_keys([item.key for item in items])
    request = wire.LookupRequest(session_secret=session.secret, keys=keys, key_bytes=key_bytes)
    known = call(session.stub.Lookup, request, timeout_s=transfer.left_s)
    if isinstance(known, Fault):
        return [None] * len(items), known
    present = [outcome.is_ok for outcome in decode_outcomes(known.outcomes, count=len(items))]
    outcomes: list[Outcome | None] = [Outcome.EXISTS if is_present else None for is_present in present]
    missing = [index for index, is_present in enumerate(present) if not is_present]
    fault = None
    if missing:
        sent, fault = _send(session, memory, [items[index] for index in missing], timeout_s=transfer.left_s)
        for index, outcome in zip(missing, sent, strict=True):
            outcomes[index] = outcome
    return outcomes, fault


def _send(
    session: Session, memory: memoryview, items: Sequence[L3Item], *, timeout_s: float
) -> tuple[list[Outcome | None], Fault | None]:
    frames = FrameSource(memory, items, session_secret=session.secret, frame_bytes_max=session.limits.frame_bytes_max)
    try:
        reply = session.stub.PutStream(frames, timeout=max(0.0, timeout_s))
    except grpc.RpcError as error:
        return [None] * len(items), fault_of(error)
    finally:
        frames.stop()
    return [*decode_outcomes(reply.outcomes, count=len(items))], None


class FrameSource(Iterator[wire.Frame]):
    """The frames of one PutStream. gRPC takes them from a thread of its own, which may outlive the call.

    After ``stop`` no byte of the memory is read any more.
    """

    def __init__(
        self, memory: memoryview, items: Sequence[L3Item], *, session_secret: bytes, frame_bytes_max: int
    ) -> None:
        self._memory = memory
        self._frames = _frame_ranges(items, frame_bytes_max=frame_bytes_max)
        self._session_secret = session_secret
        self._lock = threading.Lock()
        self._is_stopped = False

    def __next__(self) -> wire.Frame:
        with self._lock:
            if self._is_stopped:
                raise StopIteration
            index, item, start, end = next(self._frames)
            frame = wire.Frame(index=index, payload=self._read(item, start, end))
            if start == 0:
                frame.key, frame.size = item.key, item.size_bytes
            if end == item.size_bytes:
                frame.last, frame.checksum = True, self._checksum(item)
            if self._session_secret:
                frame.session_secret, self._session_secret = self._session_secret, b""
            return frame

    def stop(self) -> None:
        """End the frames here, and let go of the memory."""
        with self._lock:
            self._is_stopped = True

    def _read(self, item: L3Item, start: int, end: int) -> bytes:
        with self._memory[item.offset + start : item.offset + end] as part:
            return bytes(part)

    def _checksum(self, item: L3Item) -> int:
        with self._memory[item.offset : item.offset + item.size_bytes] as payload:
            return payload_checksum(item.key, payload)


def _frame_ranges(items: Sequence[L3Item], *, frame_bytes_max: int) -> Iterator[tuple[int, L3Item, int, int]]:
    """Index and item of every frame, and its range ``[start, end)`` within the object."""
    for index, item in enumerate(items):
        for start in range(0, item.size_bytes, frame_bytes_max):
            yield index, item, start, min(start + frame_bytes_max, item.size_bytes)
