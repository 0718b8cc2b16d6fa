"""Moves rows of an engine's own host memory to and from L3 in the background: what a tier below that memory needs.

The engine asks and polls from one thread, which never waits; calls to L3 run in lanes of this store, and each has a
deadline. A row is in use from ``load`` or ``store`` until its job is among the ``finished``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hicache.errors import ConfigError
from hicache.l3 import L3, L3Item
from hicache.lane import Lane
from hicache.notices import Notices
from hicache.outcome import Outcome

LOAD_LANES = 2  # as many as a client passes through its buffer at a time
DRAIN_NOTICE_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Deadlines and bounds of a tier."""

    lookup_timeout_s: float = 0.25  # a request waits for no longer to learn what L3 has; then it has nothing
    load_timeout_s: float = 5.0  # from the request for a load; rows that are not there then are computed
    store_timeout_s: float = 30.0  # for so long at most the engine keeps rows for the sake of L3
    queued_stores_max: int = 64  # jobs; one more is dropped at once

    def __post_init__(self) -> None:
        value: object  # an operator's, whatever it is
        for name in ("lookup_timeout_s", "load_timeout_s", "store_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 3600:
                raise ConfigError(name, value, "seconds above 0, at most 3600")
        name = "queued_stores_max"
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(name, value, "jobs, at least 1")


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that touches none of its rows any more."""

    number: int
    is_load: bool
    keys: tuple[bytes, ...]
    outcomes: tuple[Outcome, ...]
    seconds: float  # since it was submitted

    @property
    def is_ok(self) -> bool:
        """Whether every row has arrived where it should."""
        return all(outcome.is_ok for outcome in self.outcomes)

    @property
    def arrived(self) -> tuple[bytes, ...]:
        """Keys of the rows that have."""
        return tuple(key for key, outcome in zip(self.keys, self.outcomes, strict=True) if outcome.is_ok)


class _Phase(Enum):
    QUEUED = 0
    RUNNING = 1
    ENDED = 2


@dataclass(slots=True)
class _Job:
    number: int
    is_load: bool
    keys: tuple[bytes, ...]
    items: tuple[L3Item, ...]
    owner: str
    begun_s: float
    deadline_s: float
    phase: _Phase = _Phase.QUEUED


@dataclass(slots=True)
class _Probe:
    """What one request knows of one key: nothing yet, or an answer that holds for the rest of its life."""

    deadline_s: float
    is_there: bool | None = None


@dataclass(slots=True)
class RowCounts:
    """Since start."""

    lookups: Counter[str] = field(default_factory=Counter)  # keys by "hit", "miss", "late", or the fault of L3
    loads: Counter[str] = field(default_factory=Counter)  # rows by outcome
    stores: Counter[str] = field(default_factory=Counter)  # rows by outcome; "dropped" never left the queue
    bytes_loaded: int = 0
    bytes_stored: int = 0


class RowStore:
    """Owns ``l3``. ``row_bytes`` of every ``row_stride_bytes`` of the memory are kept, from the row's beginning.

    ``find``, ``flush``, ``forget``, ``load``, ``store`` and ``finished`` are for one thread and never block.
    """

    def __init__(
        self,
        l3: L3,
        *,
        row_bytes: int,
        row_stride_bytes: int,
        settings: RowSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._l3 = l3
        self._row_bytes = row_bytes
        self._row_stride_bytes = row_stride_bytes
        self._settings = settings or RowSettings()
        self._clock = clock
        self._notices = Notices(_log, clock=clock)
        self._changed = threading.Condition()
        self._counts = RowCounts()
        self._probes: dict[str, dict[bytes, _Probe]] = {}  # by request, by key
        self._unasked: list[tuple[bytes, _Probe]] = []
        self._open: dict[int, _Job] = {}  # queued or running
        self._finished: deque[Finished] = deque()
        self._lookups = Lane("row-lookups", thread_count=1)
        self._loads = Lane("row-loads", thread_count=LOAD_LANES)
        self._stores = Lane("row-stores", thread_count=1)

    # -- what is there -----------------------------------------------------------------------------------------------

    def find(self, key: bytes, *, owner: str) -> bool | None:
        """Whether L3 has a row, as far as request ``owner`` may count on it; None: ask again, after ``flush``.

        The answer comes within ``lookup_timeout_s``, and is then the same for this request until ``forget``, unless the
        row fails to load: then it is not there for this request any more.
        """
        now_s = self._clock()
        with self._changed:
            probes = self._probes.setdefault(owner, {})
            probe = probes.get(key)
            if probe is None:
                probe = probes[key] = _Probe(now_s + self._settings.lookup_timeout_s)
                self._unasked.append((key, probe))
            elif probe.is_there is None and now_s >= probe.deadline_s:
                probe.is_there = False
                self._counts.lookups["late"] += 1
            return probe.is_there

    def flush(self) -> None:
        """Send what was asked for since the last time, as one batch."""
        with self._changed:
            asked, self._unasked = self._unasked, []
        if asked:
            self._lookups.submit(lambda: self._look_up(asked))

    def forget(self, owner: str) -> None:
        """A request has ended; its jobs may go on."""
        with self._changed:
            self._probes.pop(owner, None)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def load(self, number: int, keys: Iterable[bytes], rows: Iterable[int], *, owner: str) -> None:
        """Begin to bring rows from L3."""
        self._submit(self._job(number, keys, rows, owner, timeout_s=self._settings.load_timeout_s, is_load=True))

    def store(self, number: int, keys: Iterable[bytes], rows: Iterable[int]) -> None:
        """Begin to keep rows in L3. Where too many wait already, the job has ended when this returns."""
        job = self._job(number, keys, rows, "", timeout_s=self._settings.store_timeout_s, is_load=False)
        with self._changed:
            waiting = sum(not each.is_load and each.phase is _Phase.QUEUED for each in self._open.values())
        if waiting >= self._settings.queued_stores_max:
            self._notices.warning(
                "stores", "L3 is slower than the engine: %d stores wait, one more is dropped", waiting
            )
            self._end(job, [Outcome.CANCELLED] * len(job.keys))
            return
        self._submit(job)

    def finished(self) -> list[Finished]:
        """Jobs that ended since the last call. One that waits in the queue at its deadline ends now."""
        now_s = self._clock()
        with self._changed:
            late = [job for job in self._open.values() if job.phase is _Phase.QUEUED and now_s >= job.deadline_s]
            for job in late:
                self._end_locked(job, [Outcome.DEADLINE] * len(job.keys))
            ended, self._finished = list(self._finished), deque()
        return ended

    def drain(self) -> None:
        """Return when no job is open: those in the queue are cancelled, those that run end at their deadlines.

        Waits as long as it takes: rows of a job that runs must not be used for anything else.
        """
        with self._changed:
            for job in [job for job in self._open.values() if job.phase is _Phase.QUEUED]:
                self._end_locked(job, [Outcome.CANCELLED] * len(job.keys))
            while not self._changed.wait_for(lambda: not self._open, DRAIN_NOTICE_S):
                self._notices.error("drain", "waiting for %d transfers with L3 to end", len(self._open))

    def close(self) -> None:
        """End all jobs and disconnect: the memory is not touched any more. Idempotent."""
        self.drain()
        for lane in (self._lookups, self._loads, self._stores):
            lane.stop()
        self._l3.close()
        for lane in (self._lookups, self._loads, self._stores):
            lane.join(timeout_s=self._settings.lookup_timeout_s + 1.0)

    @property
    def counts(self) -> RowCounts:
        """A copy of what was counted since start."""
        with self._changed:
            counts = self._counts
            return RowCounts(
                Counter(counts.lookups),
                Counter(counts.loads),
                Counter(counts.stores),
                counts.bytes_loaded,
                counts.bytes_stored,
            )

    # -- in the lanes ------------------------------------------------------------------------------------------------

    def _look_up(self, asked: Sequence[tuple[bytes, _Probe]]) -> None:
        left_s = min(probe.deadline_s for _, probe in asked) - self._clock()
        keys = list(dict.fromkeys(key for key, _ in asked))
        outcomes = self._asked_of_l3(keys, left_s)
        answers = dict(zip(keys, outcomes, strict=True))
        with self._changed:
            for key, probe in asked:
                if probe.is_there is None:
                    outcome = answers[key]
                    probe.is_there = outcome is Outcome.OK
                    self._counts.lookups[_LOOKUPS.get(outcome, outcome.name.lower())] += 1

    def _asked_of_l3(self, keys: list[bytes], left_s: float) -> list[Outcome]:
        if left_s <= 0:
            return [Outcome.DEADLINE] * len(keys)
        try:
            return self._l3.lookup(keys, timeout_s=left_s)
        except BaseException:  # a mistake of ours must not leave requests without an answer
            _log.exception("a lookup in L3 failed on this side")
            return [Outcome.IO_ERROR] * len(keys)

    def _run(self, job: _Job) -> None:
        with self._changed:
            if job.phase is not _Phase.QUEUED:
                return
            job.phase = _Phase.RUNNING
        try:
            left_s = job.deadline_s - self._clock()
            if left_s <= 0:
                self._end(job, [Outcome.DEADLINE] * len(job.items))
            elif job.is_load:
                self._l3.get(job.items, timeout_s=left_s, done=lambda outcomes: self._end(job, outcomes))
            else:
                self._put(job, left_s)
        except BaseException:  # likewise; L3 touches the memory in calls of its own only, which have ended
            _log.exception("a transfer with L3 failed on this side")
            self._end(job, [Outcome.IO_ERROR] * len(job.items))

    def _put(self, job: _Job, left_s: float) -> None:
        """Rows that L3 has already cost a lookup and no copy."""
        known = self._l3.lookup(job.keys, timeout_s=left_s)
        outcomes: list[Outcome] = [Outcome.EXISTS if each is Outcome.OK else each for each in known]
        absent = [position for position, outcome in enumerate(known) if outcome is Outcome.ABSENT]
        if not absent:
            self._end(job, outcomes)
            return

        def done(put: list[Outcome]) -> None:
            for position, outcome in zip(absent, put, strict=True):
                outcomes[position] = outcome
            self._end(job, outcomes)

        left_s = max(0.001, job.deadline_s - self._clock())
        self._l3.put([job.items[position] for position in absent], timeout_s=left_s, done=done)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _job(
        self, number: int, keys: Iterable[bytes], rows: Iterable[int], owner: str, *, timeout_s: float, is_load: bool
    ) -> _Job:
        now_s = self._clock()
        keys = tuple(keys)
        items = tuple(
            L3Item(key, int(row) * self._row_stride_bytes, self._row_bytes) for key, row in zip(keys, rows, strict=True)
        )
        return _Job(number, is_load, keys, items, owner, now_s, now_s + timeout_s)

    def _submit(self, job: _Job) -> None:
        with self._changed:
            assert job.number not in self._open, f"job {job.number} is open already"
            self._open[job.number] = job
        lane = self._loads if job.is_load else self._stores
        if not lane.submit(lambda: self._run(job)):
            self._end(job, [Outcome.CANCELLED] * len(job.items))

    def _end(self, job: _Job, outcomes: Sequence[Outcome]) -> None:
        with self._changed:
            self._end_locked(job, outcomes)

    def _end_locked(self, job: _Job, outcomes: Sequence[Outcome]) -> None:
        if job.phase is _Phase.ENDED:
            return
        job.phase = _Phase.ENDED
        self._open.pop(job.number, None)
        ended = Finished(job.number, job.is_load, job.keys, tuple(outcomes), self._clock() - job.begun_s)
        self._finished.append(ended)
        self._count(ended)
        probes = self._probes.get(job.owner, {}) if job.is_load else {}
        for key, outcome in zip(job.keys, outcomes, strict=True):
            if not outcome.is_ok and key in probes:
                probes[key].is_there = False
        self._changed.notify_all()

    def _count(self, ended: Finished) -> None:
        counts = self._counts
        by_outcome = Counter(outcome.name.lower() for outcome in ended.outcomes)
        if ended.is_load:
            counts.loads.update(by_outcome)
            counts.bytes_loaded += len(ended.arrived) * self._row_bytes
        else:
            by_outcome["dropped"] = by_outcome.pop("cancelled", 0)
            counts.stores.update(+by_outcome)
            counts.bytes_stored += by_outcome["ok"] * self._row_bytes


_LOOKUPS = {Outcome.OK: "hit", Outcome.ABSENT: "miss", Outcome.DEADLINE: "late"}
