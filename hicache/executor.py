"""The executor of one rank: does the jobs of the directory with the rank's pools and L3, and decides nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import partial

from hicache.copies import Copies, PoolCopies
from hicache.copy_jobs import CopyRun
from hicache.copy_order import CopyOrder, Wait, copy_order_for
from hicache.errors import ConfigError, UsageError
from hicache.jobs import Completion, CopyJob, CopyKind, FetchJob, Job, LookupJob
from hicache.l3 import L3
from hicache.lane import Lane, Task
from hicache.notices import Notices
from hicache.outcome import Outcome
from hicache.pending import PendingJob
from hicache.pools.l1 import L1Pool
from hicache.pools.l2 import L2Pool
from hicache.spec import CacheSpec, RankSpec
from hicache.tracing import tracer
from hicache.transfers import Transfers

_LOG = logging.getLogger(__name__)
_KINDS = ("load", "backup", "lookup", "fetch", "store")  # load: all copies into L1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """Bounds of an executor. Deadlines count from ``submit``: time in a queue is time that the request waited."""

    open_jobs_max: int = (
        1024  # per kind (load, backup, lookup, fetch, store): queued, worked on, or with bytes in doubt
    )
    lookup_threads: int = 2
    fetch_threads: int = 4
    store_threads: int = 2
    batch_keys_max: int = 64  # one call to L3: small enough that a job's first pages do not wait for its last
    batch_bytes_max: int = 64 * 1024 * 1024
    lookup_keys_max: int = 1024
    lookup_timeout_s: float = 2.0
    fetch_timeout_s: float = 10.0
    store_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value <= 0:
                raise ConfigError(f"executor.{limit.name}", value, "more than 0")


class Executor:
    """Completes every job exactly once, whatever happens, and never raises into the engine for a fault.

    SNAPSHOT, RESTORE, RESET, CLEAR and LOAD run in the thread that submits them, so that what this thread computes
    next sees them; BACKUP, and LOAD beside compute, run each in a copy thread after what this thread had asked compute
    to do; jobs for L3 run in threads of their own kind. A LOAD by layer completes when it is enqueued, and ARRIVE when
    all of those before have arrived. Outcomes that are made here: IO_ERROR for a copy or call that raised, BAD_RANGE
    for a slot or group that does not exist, UNAVAILABLE without L3, DEADLINE for what was not begun in time, REFUSED
    when too many jobs of the kind are open, CANCELLED for jobs given up by ``close`` or submitted after it.

    Sources and targets are the executor's from ``submit`` until the completion of the job, or, of a LOAD by layer, of
    ARRIVE.
    """

    def __init__(
        self,
        spec: CacheSpec,
        l1: L1Pool,
        l2: L2Pool | None,
        l3: L3 | None,
        *,
        on_complete: Callable[[Completion], None],
        limits: ExecutorLimits | None = None,
        copies: Copies | str = "auto",
        order: CopyOrder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The pools are those of one rank of ``spec``. ``on_complete`` is called from any thread, also from within
        ``submit`` and ``close``; it should not block.

        ``copies``: a back end by its name (hicache.moves), or what to copy with.

        The executor closes ``l3`` when it is closed: what is in flight ends with it. The pools stay their owner's, who
        closes them later.
        """
        self._limits = limits or ExecutorLimits()
        self._rank = _common_rank(spec, l1, l2)
        self._copies = PoolCopies(l1, l2, setting=copies) if isinstance(copies, str) else copies
        self._order = order or copy_order_for(l1.device)
        self._layers = {layer for group in self._rank.groups if group is not None for layer in group.layers}
        self._l3 = l3
        self._on_complete = on_complete
        self._clock = clock
        self._tracer = tracer()
        self._notices = Notices(_LOG, clock=clock)
        self._faults: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._open: dict[str, set[PendingJob]] = {kind: set() for kind in _KINDS}
        self._completed = 0
        self._is_closing = False
        self._close_lock = threading.Lock()
        self._closed_cleanly: bool | None = None
        self._transfers = None if l3 is None else self._transfers_of(l3, l2)
        self._lanes = self._make_lanes()
        via = "no L3" if l3 is None else f"L3 through {type(l3).__name__}"
        self.description = f"copies: {self._copies.name} on {self._order.name}; {via}"
        _LOG.info("%s; %s", "no L2" if l2 is None else l2.description, self.description)

    def submit(self, job: Job) -> None:
        """Take a job. Raises for no fault, and blocks only for the copies that run in this thread."""
        kind = _kind_of(job)
        pending = PendingJob(job.job_id, len(job.items), kind=kind, clock=self._clock, finish=self._finish)
        refusal = self._admit(pending, is_bounded=not (isinstance(job, CopyJob) and job.kind is CopyKind.ARRIVE))
        if refusal is not None or not job.items:
            pending.settle_rest(refusal or Outcome.OK)
        elif isinstance(job, CopyJob):
            try:
                self._submit_copies(job, pending)
            except BaseException:  # such as KeyboardInterrupt in the engine's thread: the job must not stay open
                pending.settle_rest(Outcome.IO_ERROR)
                raise
        elif self._transfers is None:
            pending.settle_rest(Outcome.UNAVAILABLE)
        else:
            self._lanes[kind].submit(self._transfer_task(self._transfers, job, pending))

    def wait_done(self, job_ids: Collection[int], *, timeout_s: float) -> bool:
        """Wait until these jobs, as far as they were submitted, touch no byte any more. Whether they do not by then."""
        if not job_ids:
            return True
        wanted = set(job_ids)
        with self._lock:
            return self._settled.wait_for(
                lambda: wanted.isdisjoint(pending.job_id for pending in self._all_open()), timeout=timeout_s
            )

    def wait_completed(self, *, beyond: int, timeout_s: float) -> int:
        """Wait, for so long at the most, until more than ``beyond`` jobs have completed since start: how many have."""
        with self._lock:
            self._settled.wait_for(lambda: self._completed > beyond, timeout=timeout_s)
            return self._completed

    def compute_here(self) -> None:
        """The calling thread computes from now on: whichever thread submits a copy, it is ordered against this one."""
        self._order.compute_here()

    def wait_layer(self, layer: int) -> None:
        """What the calling thread asks of its stream from now on comes after all that was loaded of ``layer``, by the
        id that the spec gives it. Returns at once. Raises UsageError for a layer that no group of the rank has.
        """
        if layer not in self._layers:
            raise UsageError(f"layer {layer} is in no group of this rank, whose layers are {sorted(self._layers)}")
        self._order.wait_layer(layer)

    def faults(self) -> dict[str, int]:
        """How often what went wrong since start, by a name such as ``copy.load`` or ``l3.get``. Thread-safe."""
        with self._lock:
            return dict(self._faults)

    def open_jobs(self) -> dict[str, int]:
        """Jobs by kind (load, backup, lookup, fetch, store) that have not completed. Thread-safe."""
        with self._lock:
            return {kind: len(jobs) for kind, jobs in self._open.items()}

    def close(self, *, timeout_s: float = 5.0) -> bool:
        """Give up what has not begun, let what has begun end, and close L3. Idempotent.

        Every open job has completed when it returns. Returns False when after ``timeout_s`` somebody may still touch
        memory of the pools: jobs then complete as CANCELLED all the same, and their slots must not be used again.
        """
        with self._close_lock:
            if self._closed_cleanly is None:
                self._closed_cleanly = self._close(time.monotonic() + timeout_s)
            return self._closed_cleanly

    def _close(self, until_s: float) -> bool:
        with self._lock:
            self._is_closing = True
            waiting = self._all_open()
        if self._transfers is not None:
            self._transfers.stop()
        for pending in waiting:
            pending.give_up_unstarted(Outcome.CANCELLED)
        for lane in self._lanes.values():
            lane.stop()
        l3_closed = self._close_l3(until_s)
        with self._lock:
            self._settled.wait_for(lambda: not self._all_open(), timeout=max(0.0, until_s - time.monotonic()))
            left = self._all_open()
        for pending in left:
            pending.settle_rest(Outcome.CANCELLED)
        if left:
            self._fault("close", "%d jobs had not ended when the executor was closed", len(left))
        joined = [lane.join(timeout_s=max(0.0, until_s - time.monotonic())) for lane in self._lanes.values()]
        return l3_closed and not left and all(joined)

    def _all_open(self) -> list[PendingJob]:
        """Call with the lock held."""
        return [pending for jobs in self._open.values() for pending in jobs]

    def _close_l3(self, until_s: float) -> bool:
        """Close L3 in a thread, since it may hang. Returns whether it has ended."""
        if self._l3 is None:
            return True
        closing = threading.Thread(target=self._try_close, args=(self._l3,), name="hicache-l3-close", daemon=True)
        closing.start()
        closing.join(max(0.0, until_s - time.monotonic()))
        return not closing.is_alive()

    def _try_close(self, l3: L3) -> None:
        try:
            l3.close()
        except Exception as error:
            self._fault("l3.close", "closing L3 failed: %r", error)

    def _transfers_of(self, l3: L3, l2: L2Pool | None) -> Transfers:
        if l2 is None:
            raise ConfigError("l2", None, "a pool when there is an L3, which reads and writes its slots")
        return Transfers(
            l3,
            self._rank,
            offset=l2.offset,
            batch_keys_max=self._limits.batch_keys_max,
            batch_bytes_max=self._limits.batch_bytes_max,
            lookup_keys_max=self._limits.lookup_keys_max,
            clock=self._clock,
            fault=self._fault,
        )

    def _make_lanes(self) -> dict[str, Lane]:
        threads = {"load": 1, "backup": 1}
        if self._l3 is not None:
            limits = self._limits
            threads |= {"lookup": limits.lookup_threads, "fetch": limits.fetch_threads, "store": limits.store_threads}
        return {kind: Lane(kind, thread_count=count) for kind, count in threads.items()}

    def _admit(self, pending: PendingJob, *, is_bounded: bool) -> Outcome | None:
        """Count a job as open. Returns why it is refused, if it is. ARRIVE has no bound of its own: those that are open
        keep further loads out, and one that were refused would give away what is in use.
        """
        with self._lock:
            jobs = self._open[pending.kind]
            is_full = is_bounded and len(jobs) >= self._limits.open_jobs_max
            jobs.add(pending)
            if self._is_closing:
                return Outcome.CANCELLED
            return Outcome.REFUSED if is_full else None

    def _finish(self, pending: PendingJob, completion: Completion) -> None:
        try:
            self._on_complete(completion)
        except Exception as error:
            self._fault("on_complete", "job %d: the listener failed: %r", completion.job_id, error)
        with self._lock:
            self._open[pending.kind].discard(pending)
            self._completed += 1
            self._settled.notify_all()

    def _fault(self, name: str, message: str, *values: object) -> None:
        with self._lock:
            self._faults[name] += 1
        self._notices.warning(name, message, *values)

    def _transfer_task(self, transfers: Transfers, job: Job, pending: PendingJob) -> Task:
        limits = self._limits
        submitted_at_s = self._clock()

        def task() -> None:
            if not pending.start():
                return
            with self._tracer.span(f"hicache.l3.{pending.kind}") as span:
                span.set_attributes({"hicache.objects": len(job.items)})
                move()

        def move() -> None:
            if isinstance(job, LookupJob):
                transfers.lookup(job, pending, deadline_s=submitted_at_s + limits.lookup_timeout_s)
            elif isinstance(job, FetchJob):
                transfers.fetch(job, pending, deadline_s=submitted_at_s + limits.fetch_timeout_s)
            else:
                assert not isinstance(job, CopyJob)
                transfers.store(job, pending, deadline_s=submitted_at_s + limits.store_timeout_s)

        return self._tracer.carried(task)

    def _submit_copies(self, job: CopyJob, pending: PendingJob) -> None:
        if job.kind is CopyKind.BACKUP:
            self._submit_beside(job, pending, self._lanes["backup"])
        elif job.kind is CopyKind.LOAD and job.beside_compute:
            self._submit_beside(job, pending, self._lanes["load"])
        elif job.kind is CopyKind.LOAD:
            self._load(job, pending)
        elif job.kind is CopyKind.ARRIVE:
            self._after_loads(partial(pending.settle, range(len(job.items)), [Outcome.OK] * len(job.items)))
        elif pending.start():  # within L1: in the order of compute itself
            run = self._run_of(job)
            reads = job.kind in (CopyKind.SNAPSHOT, CopyKind.RESTORE)  # else: only slots that no load has been given
            self._order.run_in_compute(run.run, after_loads=reads)
            pending.settle(range(len(job.items)), run.outcomes)

    def _run_of(self, job: CopyJob) -> CopyRun:
        return CopyRun(job, self._rank, self._copies, fault=self._copy_fault)

    def _submit_beside(self, job: CopyJob, pending: PendingJob, lane: Lane) -> None:
        """Copy in the thread of ``lane``, after what this thread has asked compute to do so far."""
        try:
            mark = self._order.mark()
        except Exception as error:
            self._copy_fault(job.kind, error)
            pending.settle_rest(Outcome.IO_ERROR)
            return

        def task() -> None:
            if not pending.start():
                return
            run = self._run_of(job)
            try:
                self._order.run_after(mark, run.run, loads=job.kind is CopyKind.LOAD)
            except Exception as error:
                self._copy_fault(job.kind, error)
                pending.settle_rest(Outcome.IO_ERROR)
            else:
                pending.settle(range(len(job.items)), run.outcomes)

        lane.submit(self._tracer.carried(task))

    def _load(self, job: CopyJob, pending: PendingJob) -> None:
        if not pending.start():
            return
        run = self._run_of(job)
        try:
            order = self._order
            wait = order.run_by_layer(run.by_layer()) if job.by_layer else order.run_before_compute(run.run)
        except Exception as error:
            self._copy_fault(job.kind, error)
            pending.settle_rest(Outcome.IO_ERROR)
            return
        if wait is None or job.by_layer:
            pending.settle(range(len(job.items)), run.outcomes)
        if wait is not None:
            self._after_loads(self._arrival_task(job, pending, wait, run))

    def _after_loads(self, task: Callable[[], object]) -> None:
        """Run ``task`` when all loads before have arrived, or failed to."""
        if not self._lanes["load"].submit(task):
            task()

    def _arrival_task(self, job: CopyJob, pending: PendingJob, wait: Wait, run: CopyRun) -> Task:
        """Complete a load when its bytes have arrived: its sources must stay until then."""

        def task() -> None:
            try:
                wait()
            except Exception as error:  # of one by layer, too: the device is lost then, and with it what computes there
                self._copy_fault(job.kind, error)
                pending.settle_rest(Outcome.IO_ERROR)
            else:
                pending.settle(range(len(job.items)), run.outcomes)

        return task

    def _copy_fault(self, kind: CopyKind, error: Exception) -> None:
        self._fault(f"copy.{kind}", "%s failed: %r", kind.value, error)


def _common_rank(spec: CacheSpec, l1: L1Pool, l2: L2Pool | None) -> RankSpec:
    if l1.spec != spec:
        raise ConfigError("l1.spec", l1.spec.model, "a pool of the same CacheSpec as the executor's")
    if l2 is not None and l2.rank != l1.rank:
        raise ConfigError("l2.rank", l2.rank.rank, f"a pool of the same CacheSpec and rank as L1's, {l1.rank.rank}")
    return l1.rank


def _kind_of(job: Job) -> str:
    if isinstance(job, CopyJob):
        return "backup" if job.kind is CopyKind.BACKUP else "load"
    if isinstance(job, LookupJob):
        return "lookup"
    return "fetch" if isinstance(job, FetchJob) else "store"
