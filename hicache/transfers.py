"""Jobs for L3, cut into bounded batches of objects: where each lies in L2, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from hicache.jobs import FetchJob, LookupItem, LookupJob, StoreJob, TransferItem
from hicache.keys import object_key
from hicache.l3 import L3, Done, L3Item
from hicache.outcome import Outcome
from hicache.pending import PendingJob
from hicache.rank_spec import RankSpec, Shard

_Parts: TypeAlias = Sequence[tuple[int, Shard]]  # which of the rank's shards of a group, and where in its slot
Fault = Callable[..., None]  # (name, message, *values): counts and logs; the values are whatever the message shows


class _Transfer(Protocol):
    """``L3.get`` or ``L3.put``."""

    def __call__(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None: ...


class Transfers:
    """Moves the shards of one rank between L2 slots and L3. Settles every item of a job; never raises.

    An item is OK when all shards that the rank reads, or writes, of it are; also when there are none: of a group that
    the rank lacks, and of what another rank stores, whose outcome decides.
    """

    def __init__(
        self,
        l3: L3,
        rank: RankSpec,
        *,
        offset: Callable[[int, int, int], int],
        batch_keys_max: int,
        batch_bytes_max: int,
        lookup_keys_max: int,
        clock: Callable[[], float],
        fault: Fault,
    ) -> None:
        """``offset(group, slot, part)`` says where the rank's ``part``-th shard of a slot is in L2, and raises
        IndexError where there is none.
        """
        self._l3 = l3
        self._offset = offset
        self._reads = [list(enumerate(shards)) for shards in rank.shards]
        self._writes = [[(part, shard) for part, shard in reads if shard.is_written] for reads in self._reads]
        self._batch_keys_max = batch_keys_max
        self._batch_bytes_max = batch_bytes_max
        self._lookup_keys_max = lookup_keys_max
        self._clock = clock
        self._fault = fault
        self._is_stopped = False

    def fetch(self, job: FetchJob, pending: PendingJob, *, deadline_s: float) -> None:
        """Bring the objects of a job into their slots. Its last items may settle later, from a thread of L3."""
        self._transfer(self._l3.get, "l3.get", self._batches(job.items, self._reads, pending), pending, deadline_s)

    def store(self, job: StoreJob, pending: PendingJob, *, deadline_s: float) -> None:
        """Store the objects of a job. Its last items may settle later, from a thread of L3."""
        self._transfer(self._l3.put, "l3.put", self._batches(job.items, self._writes, pending), pending, deadline_s)

    def lookup(self, job: LookupJob, pending: PendingJob, *, deadline_s: float) -> None:
        """Ask for what a fetch of the same items would get: an item is OK when every shard of it is there."""
        step = max(1, self._lookup_keys_max // max(1, *map(len, self._reads)))
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
            parts = [self._reads[item.group] for item in items]
            keys = [
                object_key(item.block_key, group=item.group, shard=shard.index)
                for item, of_item in zip(items, parts, strict=True)
                for _, shard in of_item
            ]
            found = self._l3.lookup(keys, timeout_s=remaining_s) if keys else []
            outcomes = _checked_outcomes(found, len(keys))
        except Exception as error:
            self._fault("l3.lookup", "a lookup in L3 failed: %r", error)
            return [Outcome.IO_ERROR] * len(items)
        return _joined(outcomes, [len(of_item) for of_item in parts])

    def _unbegun(self) -> Outcome:
        return Outcome.CANCELLED if self._is_stopped else Outcome.DEADLINE

    def _transfer(
        self, call: _Transfer, name: str, batches: Iterator[_Batch], pending: PendingJob, deadline_s: float
    ) -> None:
        for batch in batches:
            remaining_s = deadline_s - self._clock()
            if remaining_s <= 0 or self._is_stopped:
                pending.settle(batch.indices, [self._unbegun()] * len(batch.indices))
                continue
            try:
                call(batch.objects, timeout_s=remaining_s, done=self._done(name, batch, pending))
            except Exception as error:  # L3 promises not to raise; when it does, it has let go of the bytes
                self._fault(name, "a transfer failed: %r", error)
                pending.settle(batch.indices, [Outcome.IO_ERROR] * len(batch.indices))

    def _done(self, name: str, batch: _Batch, pending: PendingJob) -> Done:
        def done(outcomes: list[Outcome]) -> None:
            try:
                checked = _joined(_checked_outcomes(outcomes, len(batch.objects)), batch.counts)
            except Exception as error:
                self._fault(name, "L3 reported nonsense: %r", error)
                checked = [Outcome.IO_ERROR] * len(batch.indices)
            if not pending.settle(batch.indices, checked):
                self._fault(f"{name}.again", "L3 reported a transfer of job %d that was over", pending.job_id)

        return done

    def _batches(self, items: Sequence[TransferItem], parts: Sequence[_Parts], pending: PendingJob) -> Iterator[_Batch]:
        """Batches within the bounds (an item above them goes alone); the objects of an item are in one batch.

        ``parts``: the shards to move, by group. Items without any are settled as OK, items that name no slot as
        BAD_RANGE, and are in no batch.
        """
        batch = _Batch()
        for index, item in enumerate(items):
            try:
                placed = self._placed(item, parts)
            except (IndexError, ValueError, TypeError) as error:
                self._fault("bad_range", "job %d: %r", pending.job_id, error)
                pending.settle([index], [Outcome.BAD_RANGE])
                continue
            if not placed:
                pending.settle([index], [Outcome.OK])
                continue
            size_bytes = sum(placed_object.size_bytes for placed_object in placed)
            is_full = (
                len(batch.objects) + len(placed) > self._batch_keys_max
                or batch.size_bytes + size_bytes > self._batch_bytes_max
            )
            if batch.objects and is_full:
                yield batch
                batch = _Batch()
            batch.add(index, placed, size_bytes)
        if batch.objects:
            yield batch

    def _placed(self, item: TransferItem, parts: Sequence[_Parts]) -> list[L3Item]:
        if item.group < 0:
            raise IndexError(f"group {item.group} is negative")
        return [
            L3Item(
                object_key(item.block_key, group=item.group, shard=shard.index),
                self._offset(item.group, item.slot, part),
                shard.size_bytes,
            )
            for part, shard in parts[item.group]
        ]


@dataclass(slots=True)
class _Batch:
    """One call to L3: the objects of some items of a job, item after item."""

    indices: list[int] = field(default_factory=list)  # of the items in the job
    counts: list[int] = field(default_factory=list)  # objects of each
    objects: list[L3Item] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, index: int, placed: list[L3Item], size_bytes: int) -> None:
        self.indices.append(index)
        self.counts.append(len(placed))
        self.objects += placed
        self.size_bytes += size_bytes


def _checked_outcomes(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """Raises ValueError for a wrong number of outcomes, or something that is none."""
    checked = [Outcome(outcome) for outcome in outcomes]
    if len(checked) != count:
        raise ValueError(f"{len(checked)} outcomes for {count} items")
    return checked


def _joined(outcomes: list[Outcome], counts: Sequence[int]) -> list[Outcome]:
    """One outcome for each item, which has ``counts[i]`` objects in a row: the worst of theirs, or OK."""
    joined, start = [], 0
    for count in counts:
        joined.append(max(outcomes[start : start + count], default=Outcome.OK))
        start += count
    return joined
