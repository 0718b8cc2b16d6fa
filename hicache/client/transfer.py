"""One get or put of a batch of objects: what became of each item, and who says when their bytes are free again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum

from hicache.client.batch import decode_outcomes, item_batches, pack_region_request, timeout_ms_of, unfit_outcome
from hicache.client.bulk_link import LINK_ERRORS, fault_of_link
from hicache.client.fault import OUT_OF_TIME, Fault, late_fault
from hicache.client.memory_link import MemoryLink
from hicache.client.session import Session, SessionLimits
from hicache.l3 import Done, L3Item
from hicache.outcome import Outcome
from hicache.wire.bulk import BulkKind


class Direction(StrEnum):
    """Which way the bytes go; also the name of the operation in counters."""

    GET = "get"  # L3 -> L2
    PUT = "put"  # L2 -> L3


class Transfer:
    """The items of one call. Made, filled and settled by one thread, then perhaps settled by the memory watch.

    ``done`` is called exactly once, by ``settle``, with the outcomes as they are then.
    """

    def __init__(
        self,
        direction: Direction,
        items: Sequence[L3Item],
        *,
        timeout_s: float,
        done: Done,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.direction = direction
        self.items = items
        self.outcomes: list[Outcome | None] = [None] * len(items)
        self._deadline_s = clock() + timeout_s
        self._clock = clock
        self._done = done

    @property
    def left_s(self) -> float:
        """Time left for the whole call; not above 0 when it is over."""
        return self._deadline_s - self._clock()

    @property
    def pending(self) -> list[int]:
        """Positions of the items without an outcome."""
        return [position for position, outcome in enumerate(self.outcomes) if outcome is None]

    def sort_out_unfit(self, *, limits: SessionLimits, memory_bytes: int) -> None:
        """Give every item that cannot be sent its outcome."""
        for position, item in enumerate(self.items):
            self.outcomes[position] = unfit_outcome(item, limits=limits, memory_bytes=memory_bytes)

    def fail(self, outcome: Outcome) -> None:
        """Give every item that has no outcome yet this one."""
        self.outcomes = [outcome if known is None else known for known in self.outcomes]

    def settle(self) -> None:
        """Tell the caller. Nobody touches the items' bytes any more."""
        self._done([Outcome.IO_ERROR if outcome is None else outcome for outcome in self.outcomes])


def through_memory(session: Session, link: MemoryLink, transfer: Transfer) -> Fault | None:
    """Let hicached move the bytes itself, batch after batch, until all are done or one is not answered.

    Returns the fault that ended it. Unless that ``leaves_bytes_alone``, the bytes of the call are in doubt: hicached
    says DEADLINE of an object while a thread of its own may still be moving it, so that is an answer and doubt at once.
    """
    for batch in item_batches(transfer.items, transfer.pending, limits=session.limits):
        if transfer.left_s <= 0:
            return OUT_OF_TIME
        answer = _ask_to_move(session, link.region_id, [transfer.items[position] for position in batch], transfer)
        if isinstance(answer, Fault):
            return answer
        for position, outcome in zip(batch, answer, strict=True):
            transfer.outcomes[position] = outcome
        late = answer.count(Outcome.DEADLINE)
        if late:
            return late_fault(late, len(batch))
    return None


def _ask_to_move(
    session: Session, region_id: int, items: Sequence[L3Item], transfer: Transfer
) -> list[Outcome] | Fault:
    """One call about a batch. What fails before anything was sent leaves the bytes alone."""
    kind = BulkKind.LOAD if transfer.direction is Direction.GET else BulkKind.STORE
    is_sent = False
    try:
        with session.bulk.borrow(left_s=lambda: transfer.left_s) as bulk:
            timeout_ms = timeout_ms_of(transfer.left_s)
            request = pack_region_request(kind, region_id, items, timeout_ms=timeout_ms, caller=session.caller())
            is_sent = True
            bulk.send(request, left_s=lambda: transfer.left_s)
            bulk.receive_status(left_s=lambda: transfer.left_s)
            packed = bulk.receive_bytes(len(items), left_s=lambda: transfer.left_s)
            return decode_outcomes(packed, count=len(items))
    except LINK_ERRORS as error:
        fault = fault_of_link(error)
        return fault if is_sent else replace(fault, leaves_bytes_alone=True)
