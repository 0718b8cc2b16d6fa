"""Executors whose bytes are plain values, so that a test can see at once whether a slot holds what it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hicache.directory import Directory
from hicache.jobs import Completion, CopyItem, CopyJob, CopyKind, FetchJob, Job, LookupJob, StoreJob, TransferItem
from hicache.outcome import Outcome
from hicache.spec import CacheSpec, PagedGroup

EMPTY = "empty state"
CLEAR = "rubbish with empty transient fields"
GARBAGE = "garbage"

Slots = list[dict[int, object]]  # by group: slot -> value
Fault = Callable[[Job, int], Outcome | None]


def no_fault(job: Job, item: int) -> Outcome | None:
    """Every item goes well."""
    return None


def failing(outcome: Outcome, *items: int) -> Fault:
    """These items of a job end with ``outcome``; all items when none are named."""

    def fault(job: Job, item: int) -> Outcome | None:
        return outcome if not items or item in items else None

    return fault


@dataclass(eq=False)
class Rank:
    """The memory of one rank."""

    l1: Slots
    l2: Slots


@dataclass(eq=False)
class Task:
    """One rank's part of a job that has not been answered, and what its sources held when it was emitted."""

    rank: int
    job: Job
    sources: tuple[object, ...]
    outcomes: tuple[Outcome, ...] | None = None  # once the bytes have been moved


class SimulatedExecutor:
    """Every rank has memory of its own; L3 is a dict from (key, group, rank) to value.

    A task may touch its sources and targets at any moment until it is done: targets hold garbage from the first moment
    on, and sources must be unchanged at the last one. What is loaded by layer is there for compute when the load is
    done, but nobody may write where it comes from or goes to until it has arrived. A rank does nothing for the groups
    that its stage lacks, and that goes well. Latents are the same on all ranks: the first one stores them, and all read
    what it has stored.
    """

    def __init__(
        self, spec: CacheSpec, directory: Directory, *, ranks: int = 1, lacks: tuple[frozenset[int], ...] = ()
    ) -> None:
        self.spec = spec
        self.directory = directory
        self.ranks = [Rank([{} for _ in spec.groups], [{} for _ in spec.groups]) for _ in range(ranks)]
        self.lacks = lacks or (frozenset[int](),) * ranks  # by rank: groups that its stage has no layer of
        self._latents = {
            g for g, group in enumerate(spec.groups) if isinstance(group, PagedGroup) and group.planes == 1
        }
        self.l3: dict[tuple[bytes, int, int], object] = {}
        self.once_in_l3: set[tuple[bytes, int, int]] = set()
        self.lookups_failed = 0  # or were not answered by a lost rank
        self.left = list(range(ranks))  # ranks that are not lost
        self.take_time: Callable[[Job], None] = lambda job: None
        self.waiting: list[Task] = []
        self.done: list[Task] = []
        self.in_flight: list[tuple[int, tuple[CopyItem, ...]]] = []  # by rank, what was loaded by layer

    @property
    def l1(self) -> Slots:
        """L1 of the first rank."""
        return self.ranks[0].l1

    @property
    def l2(self) -> Slots:
        """L2 of the first rank."""
        return self.ranks[0].l2

    def compute(self, group: int, slot: int, value: object) -> None:
        """The model writes into a slot of L1, on every rank."""
        if isinstance(self.spec.groups[group], PagedGroup):  # what it has been given is complete: states are not
            taken = {(item.group, item.target) for _, items in self.in_flight for item in items}
            assert (group, slot) not in taken, "a page is written to that is in flight"
        for rank in self.ranks:
            rank.l1[group][slot] = value

    def put_l3(self, key: bytes, group: int, value: object) -> None:
        """Another engine has stored an object, on every rank."""
        for rank in range(len(self.ranks)):
            if (home := self.home(rank, group)) is not None:
                self._put(key, group, home, value)

    def has_in_l3(self, key: bytes, group: int) -> bool:
        """Whether L3 has all of an object, of all ranks."""
        homes = {self.home(rank, group) for rank in range(len(self.ranks))}
        return all(home is None or (key, group, home) in self.l3 for home in homes)

    def had_in_l3(self, key: bytes, group: int) -> bool:
        """Whether L3 has ever had all of it."""
        homes = {self.home(rank, group) for rank in range(len(self.ranks))}
        return all(home is None or (key, group, home) in self.once_in_l3 for home in homes)

    def is_on(self, rank: int, group: int) -> bool:
        """Whether the stage of ``rank`` has layers of ``group``."""
        return group not in self.lacks[rank]

    def home(self, rank: int, group: int) -> int | None:
        """The rank under whose name L3 has what ``rank`` reads of a group; None where it has no layer of that."""
        if not self.is_on(rank, group):
            return None
        return min(r for r in range(len(self.ranks)) if self.is_on(r, group)) if group in self._latents else rank

    def _put(self, key: bytes, group: int, home: int, value: object) -> None:
        self.l3.setdefault((key, group, home), value)
        self.once_in_l3.add((key, group, home))

    def drop_l3(self, key: bytes, group: int) -> None:
        """L3 has evicted an object, on every rank."""
        for rank in range(len(self.ranks)):
            self.l3.pop((key, group, rank), None)

    def lose_rank(self, rank: int) -> None:
        """A rank is gone with all that it was about to do."""
        self.left.remove(rank)
        self.lookups_failed += any(task.rank == rank and isinstance(task.job, LookupJob) for task in self.waiting)
        self.waiting = [task for task in self.waiting if task.rank != rank]
        self.in_flight = [load for load in self.in_flight if load[0] != rank]

    def collect(self) -> None:
        """Take the jobs that the directory has emitted."""
        for job in self.directory.take_jobs():
            assert job.items, "a job has something to do"
            self.lookups_failed += isinstance(job, LookupJob) and len(self.left) < len(self.ranks)
            for rank in self.left:
                self.waiting.append(Task(rank, job, tuple(self._source(rank, job, item) for item in job.items)))
                self._poison_targets(rank, job)

    def waiting_for(self, kind: type[Job] | CopyKind) -> list[int]:
        """Positions of the waiting tasks of a kind."""
        return [
            position
            for position, task in enumerate(self.waiting)
            if (task.job.kind is kind if isinstance(task.job, CopyJob) else type(task.job) is kind)
        ]

    def run(self, position: int = 0, fault: Fault = no_fault) -> Job:
        """Do one of the waiting tasks, unless that is done already, and tell the directory."""
        task = self.waiting.pop(position)
        outcomes = self._outcomes(task, fault)
        self.done.append(task)
        if isinstance(task.job, CopyJob) and task.job.by_layer:
            self.in_flight.append((task.rank, task.job.items))
        elif isinstance(task.job, CopyJob) and task.job.kind is CopyKind.ARRIVE:
            self.in_flight.remove((task.rank, task.job.items))
        self.take_time(task.job)
        self.directory.complete(Completion(task.job.job_id, outcomes), rank=task.rank)
        self.collect()
        return task.job

    def move_bytes(self, kind: CopyKind, fault: Fault = no_fault) -> None:
        """Do the waiting copies of one kind, but tell nobody yet: ``run`` does that."""
        self.collect()
        for position in self.waiting_for(kind):
            self._outcomes(self.waiting[position], fault)

    def _outcomes(self, task: Task, fault: Fault) -> tuple[Outcome, ...]:
        if task.outcomes is None:
            items = range(len(task.job.items))
            task.outcomes = tuple(self._do(task, item, fault(task.job, item)) for item in items)
        return task.outcomes

    def run_kind(self, kind: type[Job] | CopyKind, fault: Fault = no_fault) -> int:
        """Do the tasks of one kind, and those of it that follow. Returns how many there were."""
        self.collect()
        count = 0
        while positions := self.waiting_for(kind):
            self.run(positions[0], fault)
            count += 1
        return count

    def run_all(self, fault: Fault = no_fault) -> None:
        """Do everything that is waiting, and what follows from it."""
        self.collect()
        while self.waiting:
            self.run(0, fault)

    def _do(self, task: Task, position: int, fault: Outcome | None) -> Outcome:
        rank, job = self.ranks[task.rank], task.job
        home = self.home(task.rank, job.items[position].group)
        if home is None:
            return Outcome.OK
        if isinstance(job, LookupJob):
            item = job.items[position]
            self.lookups_failed += fault is not None
            return fault or (Outcome.OK if (item.block_key, item.group, home) in self.l3 else Outcome.ABSENT)
        value = self._source(task.rank, job, job.items[position])
        if isinstance(job, FetchJob):
            fetched = job.items[position]
            outcome = fault or (Outcome.ABSENT if value is None else Outcome.OK)
            rank.l2[fetched.group][fetched.slot] = value if outcome.is_ok else GARBAGE
            return outcome
        assert value == task.sources[position], "a source was written to while it was being copied"
        if isinstance(job, StoreJob):
            stored = job.items[position]
            if home == task.rank and fault in (None, Outcome.DEADLINE):  # what came too late has come
                self._put(stored.block_key, stored.group, home, value)
            return fault or Outcome.OK
        target = self._target(rank, job)[job.items[position].group]
        if job.kind is CopyKind.ARRIVE:
            return Outcome.OK
        target[job.items[position].target] = GARBAGE if fault else value
        return fault or Outcome.OK

    def _source(self, rank: int, job: Job, item: object) -> object:
        memory = self.ranks[rank]
        match job:
            case LookupJob():
                return None
            case FetchJob():
                home = self.home(rank, item.group)  # type: ignore[attr-defined]
                return None if home is None else self.l3.get((item.block_key, item.group, home))  # type: ignore[attr-defined]
            case StoreJob():
                return memory.l2[item.group].get(item.slot, GARBAGE)  # type: ignore[attr-defined]
            case CopyJob(kind=CopyKind.RESET):
                return EMPTY
            case CopyJob(kind=CopyKind.CLEAR):
                return CLEAR
            case CopyJob(kind=CopyKind.LOAD | CopyKind.ARRIVE):
                return memory.l2[item.group].get(item.source, GARBAGE)  # type: ignore[attr-defined]
        return memory.l1[item.group].get(item.source, GARBAGE)  # type: ignore[attr-defined]

    def _poison_targets(self, rank: int, job: Job) -> None:
        memory = self.ranks[rank]
        for item in job.items:
            self._check_target(rank, job, item)
            if isinstance(job, FetchJob):
                memory.l2[item.group][item.slot] = GARBAGE  # type: ignore[union-attr]
            elif isinstance(job, CopyJob) and job.kind is not CopyKind.ARRIVE:
                assert isinstance(item, CopyItem)
                self._target(memory, job)[item.group][item.target] = GARBAGE

    def _check_target(self, rank: int, job: Job, item: object) -> None:
        """Nobody writes where a load comes from, or goes to, while that is in flight."""
        if isinstance(item, TransferItem):
            if not isinstance(job, FetchJob):
                return
            is_below, slot = True, item.slot
        elif isinstance(item, CopyItem) and isinstance(job, CopyJob) and job.kind is not CopyKind.ARRIVE:
            is_below, slot = job.kind is CopyKind.BACKUP, item.target
        else:
            return
        for _, loaded in (load for load in self.in_flight if load[0] == rank):
            for moved in loaded:
                assert (moved.group, moved.source if is_below else moved.target) != (item.group, slot), "in flight"

    @staticmethod
    def _target(memory: Rank, job: CopyJob) -> Slots:
        return memory.l2 if job.kind is CopyKind.BACKUP else memory.l1
