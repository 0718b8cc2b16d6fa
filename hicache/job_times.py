"""How long the jobs of a directory take, from being handed out until every rank has answered, by leg and class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hicache.histogram import Histogram
from hicache.jobs import CopyJob, CopyKind, FetchJob, Job, LookupJob
from hicache.spec import CacheSpec, StateGroup

LegClass = tuple[str, str]  # such as ("fetch", "state")
LEGS = (*(kind.value for kind in CopyKind), "lookup", "fetch", "store")


def classes_of(spec: CacheSpec) -> tuple[str, ...]:
    """The class of the objects of each group: ``attention``, ``window`` or ``state``."""
    return tuple(
        "state" if isinstance(group, StateGroup) else "attention" if group.window_tokens is None else "window"
        for group in spec.groups
    )


@dataclass(frozen=True, slots=True)
class JobNumbers:
    """Of one moment: ``begun[x] == seconds[x].count + open[x]``, in objects."""

    begun: Mapping[LegClass, int]
    open: Mapping[LegClass, int]
    seconds: Mapping[LegClass, Histogram]


class JobTimes:
    """Not thread-safe: with the lock of the directory. Objects are counted when their job ends, and those of open jobs
    when somebody reads: a job that is handed out costs nothing but its place here."""

    def __init__(self, spec: CacheSpec) -> None:
        self._classes = classes_of(spec)
        self._seconds: dict[LegClass, Histogram] = {}
        self._jobs: dict[int, tuple[float, Job]] = {}

    def begin(self, job: Job, now_s: float) -> None:
        """A job is handed out."""
        self._jobs[job.job_id] = now_s, job

    def end(self, job_id: int, now_s: float) -> None:
        """Every rank has answered. Nothing for a job that was not handed out."""
        if job_id not in self._jobs:
            return
        begun_at_s, job = self._jobs.pop(job_id)
        for name, count in self._objects_of(job).items():
            self._seconds.setdefault(name, Histogram()).observe(now_s - begun_at_s, count=count)

    def end_all(self, is_open: Callable[[int], bool], now_s: float) -> None:
        """End what is not open any more, such as when a rank was lost."""
        for job_id in [job_id for job_id in self._jobs if not is_open(job_id)]:
            self.end(job_id, now_s)

    def read(self) -> JobNumbers:
        """As it is now. O(objects of open jobs), which the executor bounds."""
        seconds = {name: histogram.copy() for name, histogram in self._seconds.items()}
        still_open: Counter[LegClass] = Counter(dict.fromkeys(seconds, 0))
        for _, job in self._jobs.values():
            still_open.update(self._objects_of(job))
        begun = {name: count + seconds.get(name, Histogram()).count for name, count in still_open.items()}
        return JobNumbers(begun, dict(still_open), seconds)

    def _objects_of(self, job: Job) -> dict[LegClass, int]:
        leg = leg_of(job)
        counts: dict[LegClass, int] = {}
        for item in job.items:
            name = leg, self._classes[item.group]
            counts[name] = counts.get(name, 0) + 1
        return counts


def leg_of(job: Job) -> str:
    """Where it moves objects: see docs/engine.md."""
    if isinstance(job, CopyJob):
        return job.kind.value
    if isinstance(job, LookupJob):
        return "lookup"
    return "fetch" if isinstance(job, FetchJob) else "store"
