"""The book of jobs: what has been asked of the executors, and what follows when all of them have answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hicache.errors import UsageError
from hicache.jobs import Completion, CopyJob, CopyKind, Job
from hicache.outcome import Outcome
from hicache.stats import DirectoryStats

Outcomes = tuple[Outcome, ...]
Element = TypeVar("Element")

JOBS_PER_BURST_MAX = 64  # so that a prompt of a million tokens does not fill the executor's queues


@dataclass(slots=True)
class _Open:
    items: int
    ranks: set[int]  # that have not answered
    on_done: Callable[[Outcomes], None]
    outcome_if_lost: Outcome
    outcomes: list[Outcome]  # the worst of the answers so far; empty before the first

    def join(self, outcomes: Sequence[Outcome]) -> None:
        if self.outcomes:
            self.outcomes = [max(pair) for pair in zip(self.outcomes, outcomes, strict=True)]
        else:
            self.outcomes = list(outcomes)


class JobBook:
    """Numbers jobs and closes them. A job is done when every rank is; an item is OK when it is on every rank.

    A rank that is lost answers nothing any more, and has nothing: all of its items are UNAVAILABLE. Only the emptying
    of a state is done on those that are left, so that requests can still be answered with nothing.
    """

    def __init__(self, *, ranks: int = 1) -> None:
        self._ranks = set(range(ranks))  # that are not lost
        self._has_lost = False
        self._next_id = 1
        self._open: dict[int, _Open] = {}
        self._outbox: list[Job] = []

    @property
    def open_count(self) -> int:
        """Jobs that have been emitted and not yet been completed."""
        return len(self._open)

    def is_open(self, job_id: int) -> bool:
        """Whether a job has been emitted and not yet been completed."""
        return job_id in self._open

    @property
    def has_lost(self) -> bool:
        """Whether any rank is lost: then nothing is on every rank, and never will be."""
        return self._has_lost

    def emit(self, make: Callable[[int], Job], on_done: Callable[[Outcomes], None]) -> int:
        """Send ``make(job_id)`` to the executors; ``on_done`` runs once, inside of ``complete``, ``lose`` or ``take``.

        Returns the job id.
        """
        job_id = self.number()
        job = make(job_id)
        is_reset = isinstance(job, CopyJob) and job.kind is CopyKind.RESET
        entry = _Open(len(job.items), set(self._ranks), on_done, Outcome.OK if is_reset else Outcome.UNAVAILABLE, [])
        if self._has_lost:
            entry.join([entry.outcome_if_lost] * entry.items)
        self._open[job_id] = entry
        self._outbox.append(job)
        return job_id

    @property
    def has_emitted(self) -> bool:
        """Whether jobs have been emitted since the last ``take``."""
        return bool(self._outbox)

    def number(self) -> int:
        """The next number of the row that jobs are numbered in: after all jobs so far, and before all others."""
        self._next_id += 1
        return self._next_id - 1

    def take(self) -> list[Job]:
        """The jobs emitted since the last call, in order; none when every rank is lost: all jobs end here then."""
        jobs, self._outbox = self._outbox, []
        while jobs and not self._ranks:
            for job in jobs:
                if (entry := self._open.pop(job.job_id, None)) is not None:  # else it ended with the last rank
                    entry.on_done(tuple(entry.outcomes))
            jobs, self._outbox = self._outbox, []
        return jobs

    def complete(self, completion: Completion, *, rank: int = 0) -> None:
        """One rank's answer; that of a lost rank is not heard.

        Raises UsageError for an unknown or finished job, a second answer, or a wrong number of outcomes.
        """
        if rank not in self._ranks:
            return
        entry = self._open.get(completion.job_id)
        if entry is None or rank not in entry.ranks:
            raise UsageError(f"job {completion.job_id} is not open on rank {rank}: completed twice, or never emitted")
        if len(completion.outcomes) != entry.items:
            raise UsageError(
                f"job {completion.job_id} has {entry.items} items, its completion {len(completion.outcomes)}"
            )
        self._answered(completion.job_id, entry, rank, completion.outcomes)

    def lose(self, rank: int) -> None:
        """A rank is gone for good: its part of every open job is answered for it, once. Idempotent."""
        if rank not in self._ranks:
            return
        self._ranks.discard(rank)
        self._has_lost = True
        for job_id, entry in list(self._open.items()):
            if rank in entry.ranks:
                self._answered(job_id, entry, rank, [entry.outcome_if_lost] * entry.items)

    def _answered(self, job_id: int, entry: _Open, rank: int, outcomes: Sequence[Outcome]) -> None:
        entry.join(outcomes)
        entry.ranks.discard(rank)
        if not entry.ranks:
            del self._open[job_id]
            entry.on_done(tuple(entry.outcomes))


class JobSide:
    """A directory as those see it who do its jobs."""

    stats: DirectoryStats
    _jobs: JobBook

    @property
    def open_jobs(self) -> int:
        """Jobs emitted and not yet completed."""
        return self._jobs.open_count

    def is_open(self, job_id: int) -> bool:
        """Whether a job has been emitted and not yet been completed."""
        return self._jobs.is_open(job_id)

    @property
    def has_jobs(self) -> bool:
        """Whether ``take_jobs`` would return any."""
        return self._jobs.has_emitted

    def take_jobs(self) -> list[Job]:
        """The jobs emitted since the last call, in the order in which they may start."""
        return self._jobs.take()

    def complete(self, completion: Completion, *, rank: int = 0) -> None:
        """One rank has finished a job. Raises UsageError when it is not open there."""
        self._jobs.complete(completion, rank=rank)

    def lose_rank(self, rank: int, reason: str) -> None:
        """A rank is gone for good, and with it a part of every page: from now on no prefix is usable. Idempotent.

        What it was doing ends as a fault. Requests go on with what they have, and are otherwise answered with nothing.
        """
        self.stats.ranks_lost.setdefault(rank, reason)
        self._jobs.lose(rank)


def batches(elements: Sequence[Element], size: int) -> Iterator[Sequence[Element]]:
    """Consecutive slices of ``size`` elements, or longer ones, so that there are at most JOBS_PER_BURST_MAX."""
    size = max(size, -(-len(elements) // JOBS_PER_BURST_MAX))
    for start in range(0, len(elements), size):
        yield elements[start : start + size]
