"""Objects over the bulk socket, for a client that cannot share its memory with hicached."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.checksum import payload_hasher
from hicache.client.batch import decode_outcome, decode_outcomes, item_batches, timeout_ms_of
from hicache.client.bulk_link import LINK_ERRORS, BulkLink, fault_of_link
from hicache.client.fault import OUT_OF_TIME, Fault
from hicache.client.session import Session
from hicache.client.transfer import Direction, Transfer
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire.bulk import (
    BULK_CHECKSUM,
    BULK_OBJECT,
    BULK_PIECE_BYTES,
    BulkKind,
    pack_numbers,
    pack_request,
)
from hicache.wire.protocol import pack_keys


class Nonsense(Exception):
    """What comes makes no sense: no object without an outcome can trust it."""


def through_stream(session: Session, memory: memoryview, transfer: Transfer) -> Fault | None:
    """Move the bytes over a connection of the session, batch after batch, until all are done or one is cut short.

    Returns the fault that ended it. hicached never touches ``memory`` here, and this thread is the only one that
    writes to it, so nothing is ever in doubt: when this returns, the bytes are the caller's.
    """
    for batch in item_batches(transfer.items, transfer.pending, limits=session.limits):
        if transfer.left_s <= 0:
            return OUT_OF_TIME
        items = [transfer.items[position] for position in batch]
        outcomes: list[Outcome | None] = [None] * len(items)
        fault = _move(session, memory, items, outcomes, transfer)
        for position, outcome in zip(batch, outcomes, strict=True):
            transfer.outcomes[position] = outcome
        if fault is not None:
            return fault
    return None


def _move(
    session: Session, memory: memoryview, items: Sequence[L3Item], outcomes: list[Outcome | None], transfer: Transfer
) -> Fault | None:
    """Fills in the outcomes of what is decided."""
    try:
        with session.bulk.borrow(left_s=lambda: transfer.left_s) as link:
            stream = ObjectStream(link, memory, items, transfer, caller=session.caller())
            if transfer.direction is Direction.GET:
                stream.get(outcomes)
            else:
                stream.put(outcomes)
    except LINK_ERRORS as error:
        return fault_of_link(error)
    except Nonsense:
        outcomes[:] = [Outcome.IO_ERROR if outcome is None else outcome for outcome in outcomes]
    return None


class ObjectStream:
    """One call about a batch. Every object is hashed where it lies in ``memory``, a piece at a time.

    An object that was got is OK when exactly its range was filled and the bytes that now lie there match the checksum.
    Whatever else happens to it makes it an error of its own, and never touches another object.
    """

    def __init__(
        self, link: BulkLink, memory: memoryview, items: Sequence[L3Item], transfer: Transfer, *, caller: bytes = b""
    ) -> None:
        """``caller``: see ``Session.caller``."""
        self._link = link
        self._caller = caller
        self._memory = memory
        self._items = items
        self._transfer = transfer
        self._checksum = memoryview(bytearray(BULK_CHECKSUM.size))

    def get(self, outcomes: list[Outcome | None]) -> None:
        """Fills in ``outcomes`` one by one. Raises what links raise, and Nonsense."""
        self._request(BulkKind.GET)
        for _ in self._items:
            index, raw_outcome = BULK_OBJECT.unpack(self._receive_bytes(BULK_OBJECT.size))
            if index >= len(self._items) or outcomes[index] is not None:
                raise Nonsense
            outcome = decode_outcome(raw_outcome)
            if outcome is Outcome.OK:
                outcome = self._receive_payload(self._items[index])
            elif outcome.is_ok:
                outcome = Outcome.IO_ERROR
            outcomes[index] = outcome

    def put(self, outcomes: list[Outcome | None]) -> None:
        """Sends what hicached does not have yet: a present object costs one key, not its bytes. Raises as ``get``."""
        self._request(BulkKind.PUT)
        known = decode_outcomes(self._receive_bytes(len(self._items)), count=len(self._items))
        wanted = [index for index, outcome in enumerate(known) if outcome is Outcome.OK]
        for index, outcome in enumerate(known):
            outcomes[index] = None if outcome is Outcome.OK else outcome
        for index in wanted:
            self._send_payload(self._items[index])
        self._link.receive_status(left_s=self._left_s)
        stored = decode_outcomes(self._receive_bytes(len(self._items)), count=len(self._items))
        for index in wanted:
            outcomes[index] = stored[index]

    def _request(self, kind: BulkKind) -> None:
        keys, key_bytes = pack_keys([item.key for item in self._items])
        timeout_ms = timeout_ms_of(self._left_s())
        header = pack_request(kind, key_bytes, len(self._items), timeout_ms=timeout_ms, caller=self._caller)
        sizes = pack_numbers([item.size_bytes for item in self._items])
        self._link.send(b"".join((header, keys, sizes)), left_s=self._left_s)
        self._link.receive_status(left_s=self._left_s)

    def _receive_payload(self, item: L3Item) -> Outcome:
        hasher = payload_hasher(item.key)
        for start in range(0, item.size_bytes, BULK_PIECE_BYTES):
            end = min(start + BULK_PIECE_BYTES, item.size_bytes)
            with self._memory[item.offset + start : item.offset + end] as piece:
                if end == item.size_bytes:
                    self._receive(piece, self._checksum)
                else:
                    self._receive(piece)
                hasher.update(piece)
        is_right = BULK_CHECKSUM.pack(hasher.intdigest()) == self._checksum
        return Outcome.OK if is_right else Outcome.IO_ERROR

    def _send_payload(self, item: L3Item) -> None:
        hasher = payload_hasher(item.key)
        for start in range(0, item.size_bytes, BULK_PIECE_BYTES):
            end = min(start + BULK_PIECE_BYTES, item.size_bytes)
            with self._memory[item.offset + start : item.offset + end] as piece:
                hasher.update(piece)
                self._link.send(piece, left_s=self._left_s)
        self._link.send(BULK_CHECKSUM.pack(hasher.intdigest()), left_s=self._left_s)

    def _receive(self, *parts: memoryview) -> None:
        self._link.receive(*parts, left_s=self._left_s)

    def _receive_bytes(self, size_bytes: int) -> bytes:
        return self._link.receive_bytes(size_bytes, left_s=self._left_s)

    def _left_s(self) -> float:
        return self._transfer.left_s
