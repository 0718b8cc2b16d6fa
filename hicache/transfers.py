"""Jobs for L3, cut into bounded batches of objects: where each lies in L2, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from hicache.jobs import FetchJob, LookupItem, LookupJob, StoreJob, TransferItem
from hicache.keys import object_key
from hicache.l3 import L3, Done, L3Item
from hicache.outcome import Outcome
from hicache.pending import PendingJob
from hicache.spec import CacheSpec

Fault = Callable[..., None]  # (name, message, *values): counts and logs; the values are whatever the message shows


class _Transfer(Protocol):
    """``L3.get`` or ``L3.put``."""

    def __call__(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None: ...


class Transfers:
    """Moves objects between L2 slots and L3 for one shard. Settles every item of a job; never raises."""

    def __init__(
        self,
        l3: L3,
        spec: CacheSpec,
        *,
        offset: Callable[[int, int], int],
        shard: int,
        batch_keys_max: int,
        batch_bytes_max: int,
        lookup_keys_max: int,
        clock: Callable[[], float],
        fault: Fault,
    ) -> None:
        """``offset(group, slot)`` says where a slot is in L2, and raises IndexError where there is none."""
        self._l3 = l3
        self._object_bytes = spec.object_bytes
        self._shard_count = spec.shard_count
        self._offset = offset
        self._shard = shard
        self._batch_keys_max = batch_keys_max
        self._batch_bytes_max = batch_bytes_max
        self._lookup_keys_max = lookup_keys_max
        self._clock = clock
        self._fault = fault
        self._is_stopped = False

    def fetch(self, job: FetchJob, pending: PendingJob, *, deadline_s: float) -> None:
        """Bring the objects of a job into their slots. Its last items may settle later, from a thread of L3."""
        self._transfer(self._l3.get, "l3.get", job.items, pending, deadline_s)

    def store(self, job: StoreJob, pending: PendingJob, *, deadline_s: float) -> None:
        """Store the objects of a job. Its last items may settle later, from a thread of L3."""
        self._transfer(self._l3.put, "l3.put", job.items, pending, deadline_s)

    def lookup(self, job: LookupJob, pending: PendingJob, *, deadline_s: float) -> None:
        """Ask for the objects of a job in all shards: an item is OK when every shard of it is."""
        step = max(1, self._lookup_keys_max // self._shard_count)
        for start in range(0, len(job.items), step):
            items = job.items[start : start + step]
            pending.settle(range(start, start + len(items)), self._look_up(items, deadline_s))

    def stop(self) -> None:
        """Begin no further batch: what has not begun settles as CANCELLED."""
        self._is_stopped = True

    def _look_up(self, items: Sequence[LookupItem], deadline_s: float) -> list[Outcome]:
        remaining_s = deadline_s - self._clock()
        if remaining_s <= 0 or self._is_stopped:
            return [self._unbegun()] * len(items)
        try:
            keys = [
                object_key(item.block_key, group=item.group, shard=shard)
                for item in items
                for shard in range(self._shard_count)
            ]
            outcomes = _checked_outcomes(self._l3.lookup(keys, timeout_s=remaining_s), len(keys))
        except Exception as error:
            self._fault("l3.lookup", "a lookup in L3 failed: %r", error)
            return [Outcome.IO_ERROR] * len(items)
        firsts = range(0, len(keys), self._shard_count)
        return [_joined(outcomes[first : first + self._shard_count]) for first in firsts]

    def _unbegun(self) -> Outcome:
        return Outcome.CANCELLED if self._is_stopped else Outcome.DEADLINE

    def _transfer(
        self, call: _Transfer, name: str, items: Sequence[TransferItem], pending: PendingJob, deadline_s: float
    ) -> None:
        for indices, batch in self._batches(items, pending):
            remaining_s = deadline_s - self._clock()
            if remaining_s <= 0 or self._is_stopped:
                pending.settle(indices, [self._unbegun()] * len(indices))
                continue
            try:
                call(batch, timeout_s=remaining_s, done=self._done(name, indices, pending))
            except Exception as error:  # L3 promises not to raise; when it does, it has let go of the bytes
                self._fault(name, "a transfer failed: %r", error)
                pending.settle(indices, [Outcome.IO_ERROR] * len(indices))

    def _done(self, name: str, indices: list[int], pending: PendingJob) -> Done:
        def done(outcomes: list[Outcome]) -> None:
            try:
                checked = _checked_outcomes(outcomes, len(indices))
            except Exception as error:
                self._fault(name, "L3 reported nonsense: %r", error)
                checked = [Outcome.IO_ERROR] * len(indices)
            if not pending.settle(indices, checked):
                self._fault(f"{name}.again", "L3 reported a transfer of job %d that was over", pending.job_id)

        return done

    def _batches(self, items: Sequence[TransferItem], pending: PendingJob) -> Iterator[tuple[list[int], list[L3Item]]]:
        """Batches within the bounds (an object above them goes alone), with the items' indices in the job.

        Items that name no slot are settled as BAD_RANGE, and are in no batch.
        """
        indices: list[int] = []
        batch: list[L3Item] = []
        batch_bytes = 0
        for index, item in enumerate(items):
            try:
                placed = self._placed(item)
            except (IndexError, ValueError, TypeError) as error:
                self._fault("bad_range", "job %d: %r", pending.job_id, error)
                pending.settle([index], [Outcome.BAD_RANGE])
                continue
            is_full = len(batch) >= self._batch_keys_max or batch_bytes + placed.size_bytes > self._batch_bytes_max
            if batch and is_full:
                yield indices, batch
                indices, batch, batch_bytes = [], [], 0
            indices.append(index)
            batch.append(placed)
            batch_bytes += placed.size_bytes
        if batch:
            yield indices, batch

    def _placed(self, item: TransferItem) -> L3Item:
        offset = self._offset(item.group, item.slot)
        key = object_key(item.block_key, group=item.group, shard=self._shard)
        return L3Item(key, offset, self._object_bytes[item.group])


def _checked_outcomes(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """Raises ValueError for a wrong number of outcomes, or something that is none."""
    checked = [Outcome(outcome) for outcome in outcomes]
    if len(checked) != count:
        raise ValueError(f"{len(checked)} outcomes for {count} items")
    return checked


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome for all shards of an object: the first that is not OK."""
    return next((outcome for outcome in outcomes if not outcome.is_ok), Outcome.OK)
