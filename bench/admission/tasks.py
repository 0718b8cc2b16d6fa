"""What a run consists of: independent tasks on traces, in as many processes as there are cores, and their JSON."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.admission.blocks import replay_blocks
from bench.admission.bounds import compute_bounds
from bench.admission.figures import drive_writes_per_day, fairness
from bench.admission.options import Load, PolicyChoice, TierChoice, tier_specs
from bench.admission.policy_cost import policy_cost
from bench.admission.queueing import Queueing
from bench.admission.replay import TierSpec, replay
from bench.admission.study_residency import residency
from bench.admission.timed import load_rule, timed_replay
from bench.admission.traces import Trace
from hicache.costs.model import ModelCosts

Row = dict[str, Any]
_ORPHAN_REFERENCES = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all tasks of a run have in common."""

    costs: ModelCosts
    tiers: tuple[TierChoice, ...] = (TierChoice("L2"),)
    loads: tuple[Load, ...] = ()  # timed runs of each policy and capacity
    queueing: Queueing = field(default_factory=Queueing)
    warm_share: float = 0.0
    drive_bytes: float = 7.68e12
    write_amplification: float = 1.0

    @property
    def studied(self) -> int:
        """The place of the tier whose policies and capacity vary."""
        return next(place for place, tier in enumerate(self.tiers) if tier.capacity_tokens is None)


class Task(Protocol):
    """Something to work out about one trace."""

    @property
    def trace_number(self) -> int: ...

    def run(self, trace: Trace) -> Row:
        """What goes into the JSON."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTask:
    """A policy at a capacity: what is found and written, then what requests wait under each load."""

    setup: Setup
    trace_number: int
    policy: PolicyChoice
    capacity_tokens: int | None
    gpu_groups: int = 1

    def run(self, trace: Trace) -> Row:
        """A row of ``runs``."""
        setup, policy = self.setup, self.policy
        specs = tier_specs(setup.tiers, policy, self.capacity_tokens, trace.block_tokens)
        rule = load_rule(policy.read, setup.costs, trace.block_tokens)
        result = replay(trace, specs, load=rule, costs=setup.costs, warm_share=setup.warm_share)
        pages = [spec.capacity_pages for spec in specs]
        row: Row = {
            "trace": trace.name,
            "eviction": policy.eviction,
            "write": policy.write,
            "read": policy.read,
            "capacity_tokens": self.capacity_tokens,
            "capacity_pages": pages[setup.studied],
            "total_pages": None if None in pages else sum(page or 0 for page in pages),
            **result.to_dict(),
            "fairness": fairness(result.by_tenant.values()),
        }
        for tier in row["tiers"]:
            written = tier["bytes_written"] * setup.write_amplification
            tier["drive_writes_per_day"] = drive_writes_per_day(written, result.span_s, setup.drive_bytes)
        return row | self._timed(trace, specs)

    def _timed(self, trace: Trace, specs: Sequence[TierSpec]) -> Row:
        setup = self.setup
        how = replace(setup.queueing, gpu_groups=self.gpu_groups)
        return {
            "queueing": [
                timed_replay(trace, specs, setup.costs, how, load, read=self.policy.read, warm_share=setup.warm_share)
                for load in setup.loads
            ]
        }


@dataclass(frozen=True, slots=True)
class ComputedTask:
    """No cache at all: what requests wait when every prompt is computed."""

    setup: Setup
    trace_number: int
    gpu_groups: int

    def run(self, trace: Trace) -> Row:
        """What timed runs are compared with."""
        setup, how = self.setup, replace(self.setup.queueing, gpu_groups=self.gpu_groups)
        loads = [timed_replay(trace, (), setup.costs, how, load, warm_share=setup.warm_share) for load in setup.loads]
        return {"trace": trace.name, "queueing": loads}


@dataclass(frozen=True, slots=True)
class PolicyCostTask:
    """What a policy's own decisions take, on an idle core or not: a figure of this machine."""

    trace_number: int
    policy: PolicyChoice
    capacity_tokens: int | None

    def run(self, trace: Trace) -> Row:
        """A row of ``policy_cost``."""
        studied = (TierChoice("cache"),)
        (spec,) = tier_specs(studied, self.policy, self.capacity_tokens, trace.block_tokens)
        names = {"trace": trace.name, "eviction": self.policy.eviction, "write": self.policy.write}
        return names | policy_cost(trace, spec)


@dataclass(frozen=True, slots=True)
class OrphanTask:
    """The same eviction without the rule that children go first: blocks that are there, and of no use.

    Of as many requests as have ``_ORPHAN_REFERENCES`` blocks: each is looked at, which takes microseconds.
    """

    trace_number: int
    eviction: str
    capacity_pages: int

    def run(self, trace: Trace) -> Row:
        """A row of ``orphans``."""
        result = replay_blocks(_begin_of(trace, _ORPHAN_REFERENCES), self.capacity_pages, self.eviction)
        return {
            "trace": trace.name,
            "eviction": self.eviction,
            "capacity_pages": self.capacity_pages,
            "orphan_share": result.orphan_share,
            "token_hit_share": result.usable_tokens / result.input_tokens,
        }


def _begin_of(trace: Trace, references: int) -> Trace:
    """The first requests, with so many blocks or a few more."""
    ends = itertools.accumulate(len(request.blocks) for request in trace.requests)
    count = next((number for number, end in enumerate(ends, start=1) if end >= references), len(trace.requests))
    return replace(trace, requests=trace.requests[:count])


@dataclass(frozen=True, slots=True)
class TtlTask:
    """A cache with room for everything that keeps nothing longer than a time after its last use."""

    trace_number: int
    ttls_s: tuple[float, ...]

    def run(self, trace: Trace) -> Row:
        """A curve of ``ttl``."""
        return {"trace": trace.name, "points": residency(trace, self.ttls_s)}


@dataclass(frozen=True, slots=True)
class BoundsTask:
    """What no policy can beat with so many pages, in the costs of the run; ``solve``: by linear program too."""

    setup: Setup
    trace_number: int
    capacity_pages: int
    solve: bool

    def run(self, trace: Trace) -> Row:
        """A row of ``bounds``."""
        return compute_bounds(trace, self.capacity_pages, self.setup.costs.prefill_s, solve=self.solve)


_traces: Sequence[Trace] = ()  # of a worker, which got them when it was forked


def _run(task: Task) -> Row:
    gc.disable()  # looking for what a replay has dropped takes a fifth of its time
    row = task.run(_traces[task.trace_number])
    gc.collect()  # trees and policies know each other: they would pile up from task to task
    return row


def run_all(
    traces: Sequence[Trace],
    tasks: Sequence[Task],
    console: Console,
    processes: int,
    *,
    title: str = "replays",
    done: Callable[[int, Row], None] | None = None,
) -> list[Row]:
    """What each task has found, in order. ``done`` is told of each, with its number, as soon as it has.

    If one fails its error is raised when those under way have ended; the others are not begun.
    """
    global _traces  # noqa: PLW0603 - forked workers share the traces so, without a copy
    _traces = traces
    gc.freeze()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows: dict[int, Row] = {}

    def note(future: Future[Row]) -> None:
        number = numbers[future]
        if number not in rows and not future.cancelled() and future.exception() is None:
            rows[number] = future.result()
            progress.advance(bar)
            if done is not None:
                done(number, rows[number])

    try:
        with (
            Progress(*columns, console=console, transient=True) as progress,
            ProcessPoolExecutor(min(processes, len(tasks)), mp_context=get_context("fork")) as pool,
        ):
            bar = progress.add_task(title, total=len(tasks))
            numbers = {pool.submit(_run, task): number for number, task in enumerate(tasks)}
            try:
                for future in as_completed(numbers):
                    note(future)
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)  # what is under way is finished, and counts
                for future in numbers:
                    note(future)
                raise
    finally:
        _traces = ()
        gc.unfreeze()
    return [rows[number] for number in range(len(tasks))]
