"""Objects on the same node for a client whose memory cannot be shared: they pass through memory that can be."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hicache.client.batch import decode_outcomes, item_batches, pack_region_request, timeout_ms_of
from hicache.client.bulk_link import LINK_ERRORS, BulkLink, fault_of_link
from hicache.client.fault import OUT_OF_TIME, Fault, late_fault
from hicache.client.memory_link import MemoryLink
from hicache.client.session import Session
from hicache.client.stream import through_stream
from hicache.client.transfer import Direction, Transfer
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.sealed_memory import sealed_memory
from hicache.wire.bulk import BulkKind

LANES = 2  # calls at a time; further ones go through streams
LANE_BYTES_MIN = 16 << 20  # two objects of 8 MiB
PIECE_BYTES = 4 << 20  # smaller ones cost too many requests, and larger ones leave too little to overlap (measured)
SLOTS_MAX = 3  # of a call: with more, what hicached has written leaves the cache before it is copied (measured)


class Bounce:
    """Implements SharedMemory: a sealed memfd of LANES equal parts, all its pages there. Thread-safe."""

    def __init__(self, *, object_bytes_max: int) -> None:
        """A lane holds two objects of ``object_bytes_max``. Raises OSError where there is no memory for it."""
        pages = -(-max(2 * object_bytes_max, LANE_BYTES_MIN) // mmap.PAGESIZE)
        self.lane_bytes = pages * mmap.PAGESIZE
        self.size_bytes = LANES * self.lane_bytes
        self.fd: int | None
        self.fd, mapping = sealed_memory("hicache-bounce", self.size_bytes)
        self.buffer = memoryview(mapping)
        self._lock = threading.Lock()
        self._free = [number * self.lane_bytes for number in range(LANES)]

    def take(self) -> int | None:
        """Where a lane begins, None while all are in use. To be given back once."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, lane: int) -> None:
        """The end of its use: hicached does not touch it any more."""
        with self._lock:
            self._free.append(lane)

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with the last view of it. Idempotent.

        hicached may still write to what it mapped: nobody reads that any more.
        """
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
            self.buffer = memoryview(b"")


def through_bounce(
    session: Session, link: MemoryLink, bounce: Bounce, memory: memoryview, transfer: Transfer
) -> Fault | None:
    """Move the bytes through a lane of ``bounce``, and what is left, since it is too large or no lane is free, through
    a stream.

    Returns the fault that ended it. hicached never touches ``memory``, so nothing in it is ever in doubt. What may be
    is the lane: it is used again when hicached has let go of the region; ``link`` drains, and takes no call.
    """
    lane = bounce.take()
    if lane is not None:
        passage = _Passage(session, link, bounce, lane, memory, transfer)
        fault: Fault | None = None
        try:
            fault = _move(passage, session, transfer)
        finally:
            if passage.is_over(fault):
                bounce.give_back(lane)
            else:
                link.doubt(0, partial(bounce.give_back, lane))
        if fault is not None:
            return fault
    return through_stream(session, memory, transfer)


def _move(passage: _Passage, session: Session, transfer: Transfer) -> Fault | None:
    try:
        with session.bulk.borrow(left_s=lambda: transfer.left_s) as bulk:
            return passage.move(bulk)
    except LINK_ERRORS as error:
        return fault_of_link(error)


class _Passage:
    """One call: a piece of its items after another is asked for in the slots of a lane, and copied in that order.

    [slot: item | item | ... ][slot: ... ]      while one is copied, hicached fills or empties the next
    """

    def __init__(
        self,
        session: Session,
        link: MemoryLink,
        bounce: Bounce,
        lane: int,
        memory: memoryview,
        transfer: Transfer,
    ) -> None:
        self._link = link
        self._caller = session.caller()
        self._bounce = bounce
        self._memory = memory
        self._transfer = transfer
        items = transfer.items
        fitting = [position for position in transfer.pending if items[position].size_bytes <= bounce.lane_bytes]
        slot_bytes = max([PIECE_BYTES, *(items[position].size_bytes for position in fitting)])
        slots = min(SLOTS_MAX, bounce.lane_bytes // slot_bytes)
        self._free = [lane + number * slot_bytes for number in range(slots)]
        self._asked: deque[tuple[int, list[int]]] = deque()  # slot, positions of its items
        self._is_late = False
        limits = session.limits
        piece_limits = replace(limits, batch_bytes_max=min(limits.batch_bytes_max, PIECE_BYTES))
        self._pieces = item_batches(items, fitting, limits=piece_limits)

    def is_over(self, fault: Fault | None) -> bool:
        """Whether hicached touches no byte of the lane any more, when ``fault`` has ended it."""
        is_refused = fault is not None and fault.leaves_bytes_alone
        return not self._is_late and (is_refused or not self._asked)

    def move(self, bulk: BulkLink) -> Fault | None:
        """All items, until a piece of them is not done. Raises LINK_ERRORS."""
        fault: Fault | None = None
        for piece in self._pieces:
            if not self._free:
                fault = self._finish(bulk)
            if fault is None and self._left_s() <= 0:
                fault = OUT_OF_TIME
            if fault is not None:
                break
            self._ask(bulk, self._free.pop(), piece)
        while self._asked:
            fault = self._finish(bulk) or fault
        return fault

    def _ask(self, bulk: BulkLink, slot: int, piece: list[int]) -> None:
        items = self._in_slot(slot, piece)
        kind = BulkKind.LOAD
        if self._transfer.direction is Direction.PUT:
            kind = BulkKind.STORE
            for position, item in zip(piece, items, strict=True):
                _copy(self._memory, self._transfer.items[position], self._bounce.buffer, item)
        timeout_ms = timeout_ms_of(self._left_s())
        region_id = self._link.region_id
        request = pack_region_request(kind, region_id, items, timeout_ms=timeout_ms, caller=self._caller)
        self._asked.append((slot, piece))
        with contextlib.suppress(ConnectionError):  # a piece before may have been refused: that is there to be read
            bulk.send(request, left_s=self._left_s)

    def _finish(self, bulk: BulkLink) -> Fault | None:
        """Take the answer about the piece that was asked for first."""
        slot, piece = self._asked[0]
        bulk.receive_status(left_s=self._left_s)
        outcomes = decode_outcomes(bulk.receive_bytes(len(piece), left_s=self._left_s), count=len(piece))
        if self._transfer.direction is Direction.GET:
            for position, item, outcome in zip(piece, self._in_slot(slot, piece), outcomes, strict=True):
                if outcome is Outcome.OK:
                    _copy(self._bounce.buffer, item, self._memory, self._transfer.items[position])
        for position, outcome in zip(piece, outcomes, strict=True):
            self._transfer.outcomes[position] = outcome
        self._asked.popleft()
        late = outcomes.count(Outcome.DEADLINE)
        if late:
            self._is_late = True
            return late_fault(late, len(piece))
        self._free.append(slot)
        return None

    def _in_slot(self, slot: int, piece: Sequence[int]) -> list[L3Item]:
        """The items one behind the other in a slot."""
        items: list[L3Item] = []
        for position in piece:
            item = self._transfer.items[position]
            items.append(L3Item(item.key, slot, item.size_bytes))
            slot += item.size_bytes
        return items

    def _left_s(self) -> float:
        return self._transfer.left_s


def _copy(source: memoryview, source_item: L3Item, target: memoryview, target_item: L3Item) -> None:
    """Without the GIL, unlike a copy between memoryviews."""
    size_bytes = source_item.size_bytes
    with (
        source[source_item.offset : source_item.offset + size_bytes] as source_bytes,
        target[target_item.offset : target_item.offset + size_bytes] as target_bytes,
    ):
        np.copyto(np.frombuffer(target_bytes, np.uint8), np.frombuffer(source_bytes, np.uint8))
