"""Objects on the same node for a client whose memory cannot be shared: they pass through memory that can be."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
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
from hicache.wire.bulk import BulkKind

SLOT_BYTES_MIN = 8 << 20  # several objects at a time: a request costs hicached some 0.2 ms; two stay in the last cache
SLOTS = 4  # for two calls at a time; further ones go through streams
SLOTS_PER_CALL = 2  # one is copied while hicached fills or empties the other


class Bounce:
    """Implements SharedMemory: a sealed memfd of SLOTS equal slots, all its pages there. Thread-safe."""

    def __init__(self, *, object_bytes_max: int) -> None:
        """A slot holds an object of ``object_bytes_max``. Raises OSError where there is no memory for it."""
        pages = -(-max(object_bytes_max, SLOT_BYTES_MIN) // mmap.PAGESIZE)
        self.slot_bytes = pages * mmap.PAGESIZE
        self.size_bytes = SLOTS * self.slot_bytes
        self.fd: int | None = os.memfd_create("hicache-bounce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, self.size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.buffer = memoryview(mmap.mmap(self.fd, self.size_bytes))
        except BaseException:
            os.close(self.fd)
            raise
        self._lock = threading.Lock()
        self._free = list(range(0, self.size_bytes, self.slot_bytes))

    def take(self, count: int) -> list[int]:
        """Where up to so many slots begin; none when all are in use. Each is to be given back once."""
        with self._lock:
            taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, slot: int) -> None:
        """The end of its use: hicached does not touch it any more."""
        with self._lock:
            self._free.append(slot)

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
    """Move the bytes through slots of ``bounce``, and what does not fit into them through a stream.

    Returns the fault that ended it. hicached never touches ``memory``, so nothing in it is ever in doubt. What may be
    is a slot: then it is used again when hicached has let go of the region, and the link, which drains, takes no call.
    """
    slots = bounce.take(SLOTS_PER_CALL)
    if slots:
        passage = _Passage(session, link, bounce, memory, transfer, slots)
        fault = passage.move()
        if fault is not None:
            return fault
    return through_stream(session, memory, transfer)


class _Passage:
    """One call. A piece of its items is asked for in one slot while the piece in another one is copied."""

    def __init__(
        self,
        session: Session,
        link: MemoryLink,
        bounce: Bounce,
        memory: memoryview,
        transfer: Transfer,
        slots: list[int],
    ) -> None:
        self._session = session
        self._link = link
        self._bounce = bounce
        self._memory = memory
        self._transfer = transfer
        self._free = slots
        self._asked: deque[tuple[int, list[int]]] = deque()  # slot, positions of its items

    def move(self) -> Fault | None:
        """All items that fit into a slot, until one of their pieces is not done."""
        fault: Fault | None = None
        is_over = False
        try:
            with self._session.bulk.borrow(left_s=self._left_s) as bulk:
                fault = self._move_pieces(bulk)
            is_over = True
        except LINK_ERRORS as error:
            fault = fault_of_link(error)
            is_over = fault.leaves_bytes_alone
        finally:
            self._let_go(is_over=is_over)
        return fault

    def _move_pieces(self, bulk: BulkLink) -> Fault | None:
        fault: Fault | None = None
        for piece in self._pieces():
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

    def _pieces(self) -> Iterator[list[int]]:
        transfer, slot_bytes = self._transfer, self._bounce.slot_bytes
        fitting = [position for position in transfer.pending if transfer.items[position].size_bytes <= slot_bytes]
        limits = self._session.limits
        limits = replace(limits, batch_bytes_max=min(limits.batch_bytes_max, slot_bytes))
        return item_batches(transfer.items, fitting, limits=limits)

    def _ask(self, bulk: BulkLink, slot: int, piece: list[int]) -> None:
        items = self._in_slot(slot, piece)
        kind = BulkKind.LOAD
        if self._transfer.direction is Direction.PUT:
            kind = BulkKind.STORE
            for position, item in zip(piece, items, strict=True):
                _copy(self._memory, self._transfer.items[position], self._bounce.buffer, item)
        request = pack_region_request(kind, self._link.region_id, items, timeout_ms=timeout_ms_of(self._left_s()))
        self._asked.append((slot, piece))
        bulk.send(request, left_s=self._left_s)

    def _finish(self, bulk: BulkLink) -> Fault | None:
        """The answer about the piece that was asked for first. A fault where hicached may still touch its slot."""
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
            self._doubt(slot)
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

    def _let_go(self, *, is_over: bool) -> None:
        for slot in self._free:
            self._bounce.give_back(slot)
        for slot, _ in self._asked:
            if is_over:
                self._bounce.give_back(slot)
            else:
                self._doubt(slot)

    def _doubt(self, slot: int) -> None:
        self._link.doubt(0, partial(self._bounce.give_back, slot))

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
