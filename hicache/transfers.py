"""Jobs for L3, cut into bounded batches of objects: where each lies in L2, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from hicache.jobs import FetchJob, LookupItem, LookupJob, StoreJob, TransferItem
from hicache.keys import object_key
from hicache.l3 import L3, Done, L3Item
from hicache.outcome import Outcome
from hicache.pending import PendingJob
from hicache.rank_spec import RankSpec
from hicache.sizing import slot_stride

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
        offset: Callable[[int, int], int],
        batch_keys_max: int,
        batch_bytes_max: int,
        lookup_keys_max: int,
        clock: Callable[[], float],
        fault: Fault,
    ) -> None:
        """``offset(group, slot)`` says where a slot is in L2, and raises IndexError where there is none."""
        self._l3 = l3
        self._offset = offset
        self._reads = _places(rank, only_written=False)
        self._writes = _places(rank, only_written=True)
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
        step = max(1, self._lookup_keys_max // max(1, *(len(places.shards) for places in self._reads.values())))
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
            parts = [self._reads[item.group].shards for item in items]
            keys = [
                object_key(item.block_key, group=item.group, shard=shard)
                for item, of_item in zip(items, parts, strict=True)
                for shard, _, _ in of_item
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

    def _batches(
        self, items: Sequence[TransferItem], places: Mapping[int, _Places], pending: PendingJob
    ) -> Iterator[_Batch]:
        """Batches within the bounds (an item above them goes alone); the objects of one item are in one batch.

        Items without objects are settled as OK, items that name no slot as BAD_RANGE, and are in no batch.
        """
        batch = _Batch([], [], [])
        left_bytes, left_keys = self._batch_bytes_max, self._batch_keys_max
        idle: list[int] = []
        for index, item in enumerate(items):
            try:
                shards, size_bytes = places[item.group]
                placed = self._placed(item, shards) if shards else None
            except (LookupError, ValueError, TypeError) as error:
                self._fault("bad_range", "job %d: %r", pending.job_id, error)
                pending.settle([index], [Outcome.BAD_RANGE])
                continue
            if placed is None:
                idle.append(index)
                continue
            if (size_bytes > left_bytes or len(shards) > left_keys) and batch.objects:
                yield batch
                batch = _Batch([], [], [])
                left_bytes, left_keys = self._batch_bytes_max, self._batch_keys_max
            batch.indices.append(index)
            batch.counts.append(len(shards))
            batch.objects.extend(placed)
            left_bytes -= size_bytes
            left_keys -= len(shards)
        if idle:
            pending.settle(idle, [Outcome.OK] * len(idle))
        if batch.objects:
            yield batch

    def _placed(self, item: TransferItem, shards: tuple[_Place, ...]) -> list[L3Item]:
        start = self._offset(item.group, item.slot)
        placed = []
        for shard, offset, size_bytes in shards:
            key = object_key(item.block_key, group=item.group, shard=shard)
            placed.append(L3Item(key, start + offset, size_bytes))
        return placed


class _Batch(NamedTuple):
    """One call to L3: the objects of some items of a job, item after item."""

    indices: list[int]  # of the items in the job
    counts: list[int]  # objects of each
    objects: list[L3Item]


_Place: TypeAlias = tuple[int, int, int]  # shard, offset within the slot, bytes


class _Places(NamedTuple):
    """The objects that a rank moves of each item of a group."""

    shards: tuple[_Place, ...]
    size_bytes: int  # together


def _places(rank: RankSpec, *, only_written: bool) -> dict[int, _Places]:
    by_group: dict[int, _Places] = {}
    for group, shards in enumerate(rank.shards):
        places = tuple(
            (shard.index, part * slot_stride(shard.size_bytes), shard.size_bytes)
            for part, shard in enumerate(shards)
            if shard.is_written or not only_written
        )
        by_group[group] = _Places(places, sum(size_bytes for _, _, size_bytes in places))
    return by_group


def _checked_outcomes(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """Raises ValueError for a wrong number of outcomes, or something that is none."""
    checked = [Outcome(outcome) for outcome in outcomes]
    if len(checked) != count:
        raise ValueError(f"{len(checked)} outcomes for {count} items")
    return checked


def _joined(outcomes: list[Outcome], counts: Sequence[int]) -> list[Outcome]:
    """One outcome for each item, which has ``counts[i]`` objects in a row: the worst of theirs, or OK."""
    if len(outcomes) == len(counts) and 0 not in counts:
        return outcomes
    joined, start = [], 0
    for count in counts:
        joined.append(max(outcomes[start : start + count], default=Outcome.OK))
        start += count
    return joined
