"""The book of jobs: what has been asked of the executors, and what follows when all of them have answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hicache.errors import UsageError
from hicache.jobs import Completion, Job
from hicache.outcome import Outcome

Outcomes = tuple[Outcome, ...]
Element = TypeVar("Element")

JOBS_PER_BURST_MAX = 64  # so that a prompt of a million tokens does not fill the executor's queues


@dataclass(slots=True)
class _Open:
    item_count: int
    ranks_left: int
    on_done: Callable[[Outcomes], None]
    outcomes: list[Outcome] = field(default_factory=list)


class JobBook:
    """Numbers jobs and closes them. A job is done when every rank is; an item is OK when it is on every rank."""

    def __init__(self, *, ranks: int = 1) -> None:
        self._ranks = ranks
        self._next_id = 1
        self._open: dict[int, _Open] = {}
        self._outbox: list[Job] = []

    @property
    def open_count(self) -> int:
        """Jobs that have been emitted and not yet been completed."""
        return len(self._open)

    def emit(self, make: Callable[[int], Job], on_done: Callable[[Outcomes], None], *, one_rank: bool = False) -> int:
        """Send ``make(job_id)`` to the executors; ``on_done`` runs once, inside ``complete``. Returns the job id."""
        job_id = self._next_id
        self._next_id += 1
        job = make(job_id)
        self._open[job_id] = _Open(len(job.items), 1 if one_rank else self._ranks, on_done)
        self._outbox.append(job)
        return job_id

    @property
    def has_emitted(self) -> bool:
        """Whether jobs have been emitted since the last ``take``."""
        return bool(self._outbox)

    def take(self) -> list[Job]:
        """The jobs emitted since the last call, in order."""
        jobs, self._outbox = self._outbox, []
        return jobs

    def complete(self, completion: Completion) -> None:
        """One rank's answer. Raises UsageError for an unknown or finished job, or a wrong number of outcomes."""
        entry = self._open.get(completion.job_id)
        if entry is None:
            raise UsageError(f"job {completion.job_id} is not open: completed twice, or never emitted")
        if len(completion.outcomes) != entry.item_count:
            raise UsageError(
                f"job {completion.job_id} has {entry.item_count} items, its completion {len(completion.outcomes)}"
            )
        if entry.outcomes:
            entry.outcomes = [max(pair) for pair in zip(entry.outcomes, completion.outcomes, strict=True)]
        else:
            entry.outcomes = list(completion.outcomes)
        entry.ranks_left -= 1
        if entry.ranks_left == 0:
            del self._open[completion.job_id]
            entry.on_done(tuple(entry.outcomes))


def batches(elements: Sequence[Element], size: int) -> Iterator[Sequence[Element]]:
    """Consecutive slices of ``size`` elements, or longer ones, so that there are at most JOBS_PER_BURST_MAX."""
    size = max(size, -(-len(elements) // JOBS_PER_BURST_MAX))
    for start in range(0, len(elements), size):
        yield elements[start : start + size]
