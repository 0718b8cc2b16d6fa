"""An executor whose bytes are plain values, so that a test can see at once whether a slot holds what it should."""

from __future__ import annotations

from collections.abc import Callable

from hicache.directory import Directory
from hicache.jobs import Completion, CopyJob, CopyKind, FetchJob, Job, LookupJob, StoreJob
from hicache.outcome import Outcome
from hicache.spec import CacheSpec

EMPTY = "empty state"
GARBAGE = "garbage"

Fault = Callable[[Job, int], Outcome | None]


def no_fault(job: Job, item: int) -> Outcome | None:
    """Every item goes well."""
    return None


class SimulatedExecutor:
    """Memory is a dict from slot to value for each group and tier; L3 is a dict from (key, group) to value."""

    def __init__(self, spec: CacheSpec, directory: Directory) -> None:
        self.directory = directory
        self.l1: list[dict[int, object]] = [{} for _ in spec.groups]
        self.l2: list[dict[int, object]] = [{} for _ in spec.groups]
        self.l3: dict[tuple[bytes, int], object] = {}
        self.waiting: list[Job] = []

    def collect(self) -> None:
        """Take the jobs that the directory has emitted."""
        self.waiting += self.directory.take_jobs()

    def run(self, position: int = 0, fault: Fault = no_fault) -> Job:
        """Do one of the waiting jobs and tell the directory."""
        job = self.waiting.pop(position)
        outcomes = tuple(self._do(job, item, fault(job, item)) for item in range(len(job.items)))
        self.directory.complete(Completion(job.job_id, outcomes))
        self.collect()
        return job

    def run_all(self, fault: Fault = no_fault) -> None:
        """Do everything that is waiting, and what follows from it."""
        self.collect()
        while self.waiting:
            self.run(0, fault)

    def _do(self, job: Job, position: int, fault: Outcome | None) -> Outcome:
        match job:
            case CopyJob(kind=kind, items=items):
                return self._copy(kind, items[position], fault)
            case FetchJob(items=items):
                item = items[position]
                value = self.l3.get((item.block_key, item.group))
                outcome = fault or (Outcome.ABSENT if value is None else Outcome.OK)
                self.l2[item.group][item.slot] = value if outcome.is_ok else GARBAGE
                return outcome
            case StoreJob(items=items):
                item = items[position]
                if fault is None:
                    self.l3.setdefault((item.block_key, item.group), self.l2[item.group][item.slot])
                return fault or Outcome.OK
            case LookupJob(items=items):
                item = items[position]
                return fault or (Outcome.OK if (item.block_key, item.group) in self.l3 else Outcome.ABSENT)
        raise AssertionError(job)

    def _copy(self, kind: CopyKind, item: object, fault: Outcome | None) -> Outcome:
        group, source, target = item.group, item.source, item.target  # type: ignore[attr-defined]
        sources = self.l2 if kind is CopyKind.LOAD else self.l1
        targets = self.l2 if kind is CopyKind.BACKUP else self.l1
        value = EMPTY if kind is CopyKind.RESET else sources[group].get(source, GARBAGE)
        targets[group][target] = GARBAGE if fault else value
        return fault or Outcome.OK
