"""A unified L1 beside fixed splits of the same bytes, on load that shifts between many short and few long requests.

The directory and its slot pools are those of production; time is simulated, and copies are done at once.

`python -m bench.hybrid_arena` repeats that with seeds and workloads that the parameters were not chosen with.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hicache.arena import Arena, ArenaLayout, arena_layout, slot_bytes
from hicache.directory import Directory
from hicache.directory_config import DirectoryConfig
from hicache.index import Index
from hicache.jobs import Completion
from hicache.loader import Load
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.request import RequestRecord
from hicache.slots import SlotPool, Slots
from hicache.spec import CacheSpec, PagedGroup, StateField, StateGroup

L1_BYTES = 8 << 30
PREFILL_PAGES_PER_STEP = 32
PATIENCE_STEPS = 40  # a request that has waited so long is refused
PAGES, STATES = 0, 1  # group indices

# Qwen3-Next-80B-A3B on one rank: 12 layers of attention, 36 of gated delta net.
SPEC = CacheSpec(
    "qwen3-next",
    "sizes",
    (
        PagedGroup("attn", tuple(range(12)), heads=2, head_dim=256, dtype="bfloat16"),
        StateGroup(
            "gdn",
            tuple(range(36)),
            (StateField("conv", (3, 8192), "bfloat16"), StateField("temporal", (32, 128, 128), "float32")),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to divide L1 on one workload. Shares are of the bytes of L1, means over time; times are in steps."""

    workload: str
    l1: str  # "unified", or "fixed" with the share of states
    state_share: float | None
    is_best_split: bool  # it serves the largest share of what was offered, among the fixed ones
    served_share: float  # of the short and of the long requests, the mean of both
    short_served: int
    long_served: int
    running_short_max: int
    running_long_max: int
    refused: int
    preempted: int
    waited_steps_mean: float
    tokens_restored: int
    pages_evicted: int
    states_evicted: int
    units_passed: int  # evicted for the other side
    stranded_share: float  # free, and not to be had by the other side
    padding_share: float
    slot_ns: float  # to acquire and release a page


@dataclass(slots=True, eq=False)
class _Request:
    kind: str
    keys: list[bytes]  # of the prompt and of what will be generated
    shared_pages: int  # the beginning that others have, too
    prompt_pages: int
    arrived_step: int
    record: RequestRecord | None = None
    prefill_steps: int = 0
    computed_pages: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """What arrives in each of ``steps`` steps, on average, and how long it is."""

    steps: int
    short_per_step: float = 0.0
    long_per_step: float = 0.0
    output_pages: tuple[int, int] = (4, 12)


WORKLOADS: dict[str, tuple[Phase, ...]] = {
    "short, long, short": (Phase(120, short_per_step=10), Phase(200, long_per_step=0.5), Phase(120, short_per_step=10)),
    "both at once": (Phase(300, short_per_step=5, long_per_step=0.15),),
    "short that grow": (Phase(300, short_per_step=1.5, output_pages=(20, 160)),),
}
# Those above, with seed 1 and 8 GiB, are what ``IN_REACH_SHARE`` was chosen with; nothing was with these.
WORKLOADS_HELD_OUT: dict[str, tuple[Phase, ...]] = {
    "long, then short": (Phase(150, long_per_step=0.5), Phase(150, short_per_step=10)),
    "bursts in turns": (Phase(40, short_per_step=10), Phase(40, long_per_step=0.5)) * 4,
    "long, some short": (Phase(300, short_per_step=1.0, long_per_step=0.3),),
}
FRESH_SEEDS = tuple(range(2, 8))


def offered(phases: Sequence[Phase], *, seed: int = 1) -> Iterator[list[_Request]]:
    """What arrives, by step: short requests share system prompts and go on with earlier ones, long ones documents."""
    rng = random.Random(seed)
    systems = [[_key(rng) for _ in range(4)] for _ in range(8)]
    documents = [[_key(rng) for _ in range(384)] for _ in range(6)]
    conversations: list[list[bytes]] = []
    step = 0
    for phase in phases:
        for _ in range(phase.steps):
            arrived = []
            for kind, rate in (("short", phase.short_per_step), ("long", phase.long_per_step)):
                for _ in range(int(rate) + (rng.random() < rate % 1)):
                    own, shared = rng.randint(2, 8), rng.choice(systems)
                    if kind == "long":
                        own, shared = rng.randint(128, 384), rng.choice(documents)
                    elif conversations and rng.random() < 0.3:
                        shared = rng.choice(conversations[-200:])
                    output = rng.randint(*phase.output_pages)
                    keys = [*shared, *(_key(rng) for _ in range(own + output))]
                    arrived.append(_Request(kind, keys, len(shared), len(shared) + own, step))
                    if kind == "short" and len(keys) < 40:
                        conversations.append(keys)
            yield arrived
            step += 1


def _key(rng: random.Random) -> bytes:
    return rng.getrandbits(128).to_bytes(16, "little")


@dataclass(slots=True)
class _Engine:
    """Serves in the order of arrival, as many at once as L1 has room for; the youngest gives way when it has not."""

    directory: Directory
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=lambda: {"short": 0, "long": 0})
    running_max: dict[str, int] = field(default_factory=lambda: {"short": 0, "long": 0})
    waited_steps: list[int] = field(default_factory=list)
    refused: int = 0
    preempted: int = 0

    def step(self, now: int, arrived: Sequence[_Request]) -> None:
        self.waiting += arrived
        while self.waiting and now - self.waiting[0].arrived_step > PATIENCE_STEPS:
            self.waiting.popleft()
            self.refused += 1
        while self.waiting and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            self.waited_steps.append(now - request.arrived_step)
        for kind in self.running_max:
            count = sum(request.kind == kind for request in self.running)
            self.running_max[kind] = max(self.running_max[kind], count)
        for request in list(self.running):
            if request.record is not None:
                self._advance(request)

    def _admit(self, request: _Request) -> bool:
        """Live states and pages for the whole prompt, or nothing."""
        page_tokens = SPEC.page_tokens
        prompt = request.keys[: request.prompt_pages]
        record = self.directory.open(list(prompt), token_count=request.prompt_pages * page_tokens + 1)
        while (progress := self.directory.load(record)) is Load.STARTED:
            self._finish_jobs()
        if progress is Load.BUSY or not self.directory.extend(record, tokens=request.prompt_pages * page_tokens):
            self.directory.release(record)
            return False
        self._finish_jobs()
        request.record = record
        request.computed_pages = record.loaded_pages or 0
        request.prefill_steps = -(-(request.prompt_pages - request.computed_pages) // PREFILL_PAGES_PER_STEP)
        return True

    def _advance(self, request: _Request) -> None:
        """One step of prefill, or one page of output. Snapshots: where the shared part ends, after the prompt, last."""
        if request.prefill_steps > 1:
            request.prefill_steps -= 1
            return
        if request.computed_pages < request.prompt_pages:
            if request.computed_pages < request.shared_pages:
                self._store(request, request.shared_pages, snapshot=True)
            self._store(request, request.prompt_pages, snapshot=True)
            return
        if not self._extend(request):
            return
        assert request.record is not None
        pages = request.computed_pages + 1
        is_last = pages == len(request.keys)
        key = request.keys[pages - 1 : pages]
        self.directory.append(request.record, key, token_count=pages * SPEC.page_tokens)
        self._store(request, pages, snapshot=is_last)
        if is_last:
            self._end(request)
            self.served[request.kind] += 1

    def _extend(self, request: _Request) -> bool:
        """One more page, if need be of a request that came later. False when it was this one that had to give way."""
        assert request.record is not None
        while not self.directory.extend(request.record, tokens=(request.computed_pages + 1) * SPEC.page_tokens):
            youngest = self.running[-1]
            self._end(youngest)
            self.waiting.appendleft(youngest)
            self.preempted += 1
            if youngest is request:
                return False
        return True

    def _store(self, request: _Request, pages: int, *, snapshot: bool) -> None:
        assert request.record is not None
        tokens = request.computed_pages = pages
        tokens *= SPEC.page_tokens
        self.directory.store(request.record, computed=tokens, state_at=tokens if snapshot else None, state_pending=0)
        self._finish_jobs()

    def _end(self, request: _Request) -> None:
        assert request.record is not None
        self.directory.release(request.record)
        self.running.remove(request)
        request.record, request.computed_pages = None, 0

    def _finish_jobs(self) -> None:
        while jobs := self.directory.take_jobs():
            for job in jobs:
                self.directory.complete(Completion(job.job_id, (Outcome.OK,) * len(job.items)))


def split_of(l1_bytes: int, state_share: float) -> DirectoryConfig:
    """A fixed split: so many states, and pages in what they leave."""
    page_bytes, state_bytes = slot_bytes(SPEC)
    states = max(1, int(l1_bytes * state_share) // state_bytes)
    return DirectoryConfig(l1_slots=((l1_bytes - states * state_bytes) // page_bytes, states), l2_slots=(0, 0))


def unified(l1_bytes: int) -> DirectoryConfig:
    """All bytes for both."""
    layout = arena_layout(SPEC, l1_bytes)
    return DirectoryConfig(l1_slots=layout.slot_counts, l2_slots=(0, 0), l1_arena=layout)


def simulate(
    workload: str, phases: Sequence[Phase], config: DirectoryConfig, *, state_share: float | None, seed: int = 1
) -> Row:
    """Serve a workload. What waits at its end counts as not served."""
    engine = _Engine(Directory(SPEC, config))
    index = engine.directory.index
    count = {"short": 0, "long": 0}
    stranded: list[float] = []
    for step, arrived in enumerate(offered(phases, seed=seed)):
        for request in arrived:
            count[request.kind] += 1
        engine.step(step, arrived)
        stranded.append(_stranded_bytes(index) / L1_BYTES)
    shares = [engine.served[kind] / count[kind] for kind in count if count[kind]]
    by_source = engine.directory.stats.tokens_by_source
    return Row(
        workload=workload,
        l1="unified" if state_share is None else f"fixed, {state_share:.0%} states",
        state_share=state_share,
        is_best_split=False,
        served_share=round(statistics.mean(shares), 4),
        short_served=engine.served["short"],
        long_served=engine.served["long"],
        running_short_max=engine.running_max["short"],
        running_long_max=engine.running_max["long"],
        refused=engine.refused,
        preempted=engine.preempted,
        waited_steps_mean=round(statistics.mean(engine.waited_steps or [0]), 2),
        tokens_restored=by_source["l1"],
        pages_evicted=index.evicted[Tier.L1][PAGES],
        states_evicted=index.evicted[Tier.L1][STATES],
        units_passed=0 if index.arena is None else index.arena.units_passed,
        stranded_share=round(statistics.mean(stranded), 4),
        padding_share=round(_padding_share(config.l1_arena), 4),
        slot_ns=0.0,
    )


def _stranded_bytes(index: Index) -> int:
    """Free bytes that one side cannot give to the other: in a fixed split that is all that is free."""
    if index.arena is not None:
        return index.arena.arena.stranded_bytes
    return sum(pool.free_count * size for pool, size in zip(index.pools[Tier.L1], slot_bytes(SPEC), strict=True))


def _padding_share(layout: ArenaLayout | None) -> float:
    if layout is None:
        return 0.0
    sizes = slot_bytes(SPEC)
    return max(1 - size * count / layout.unit_bytes for size, count in zip(sizes, layout.slots_per_unit, strict=True))


def slot_ns(make: DirectoryConfig, *, batch: int = 64, rounds: int = 300) -> float:
    """Nanoseconds to acquire and release a page, in batches, out of the pool of a directory."""
    layout = make.l1_arena
    pool: Slots = SlotPool(make.l1_slots[PAGES]) if layout is None else Arena(layout, ["pages", "states"]).pools[PAGES]
    start_s = time.perf_counter()
    for _ in range(rounds):
        for handle in pool.acquire(batch) or []:
            pool.release(handle)
    return (time.perf_counter() - start_s) / rounds / batch * 1e9


def measure(*, quick: bool) -> list[Row]:
    """Every workload with the unified L1, and with a grid of fixed splits that is finer around the best one."""
    scale = 0.3 if quick else 1.0
    costs = _slot_costs(unified(L1_BYTES), split_of(L1_BYTES, 0.5))
    rows: list[Row] = []
    for workload, phases in WORKLOADS.items():
        scaled = [replace(phase, steps=int(phase.steps * scale)) for phase in phases]
        rows.append(simulate(workload, scaled, unified(L1_BYTES), state_share=None))
        rows += _fixed_splits(workload, scaled, step=0.2 if quick else 0.1)
    return [replace(row, slot_ns=costs[row.state_share is None]) for row in rows]


def _slot_costs(arena: DirectoryConfig, split: DirectoryConfig) -> dict[bool, float]:
    """The best of interleaved runs, by whether it is the arena."""
    runs = [(is_arena, slot_ns(arena if is_arena else split)) for _ in range(9) for is_arena in (True, False)]
    return {kind: round(min(ns for is_arena, ns in runs if is_arena is kind), 1) for kind in (True, False)}


def _fixed_splits(workload: str, phases: Sequence[Phase], *, step: float) -> list[Row]:
    def run(share: float) -> Row:
        return simulate(workload, phases, split_of(L1_BYTES, share), state_share=share)

    shares = itertools.takewhile(lambda share: share < 0.99, itertools.count(step, step))
    rows = [run(round(share, 3)) for share in shares]
    best = max(rows, key=lambda row: row.served_share).state_share
    assert best is not None
    rows += [run(round(best + offset * step, 3)) for offset in (-0.5, -0.25, 0.25, 0.5) if 0 < best + offset * step < 1]
    best = max(rows, key=lambda row: row.served_share).state_share
    return sorted(
        (replace(row, is_best_split=row.state_share == best) for row in rows), key=lambda row: row.state_share or 0
    )


@dataclass(frozen=True, slots=True)
class FreshRow:
    """A workload with seeds that nothing was chosen with: shares of the offered requests that were served."""

    workload: str
    unified: float  # mean of the seeds
    unified_min: float
    best_split: float  # the one split that is best over all seeds, and what it serves on average
    best_split_served: float
    best_split_of_each: float  # mean of the best one for each seed, which nobody knows beforehand
    wins: int  # seeds with which no split serves more than the unified L1
    ratio_min: float  # unified, as a part of the best split of the same seed


def measure_fresh(workload: str, phases: Sequence[Phase], *, seeds: Sequence[int], shares: Sequence[float]) -> FreshRow:
    """The unified L1 beside fixed splits with these ``shares`` of states."""
    unified_l1 = unified(L1_BYTES)
    served = [simulate(workload, phases, unified_l1, state_share=None, seed=seed).served_share for seed in seeds]
    by_share = {
        share: [
            simulate(workload, phases, split_of(L1_BYTES, share), state_share=share, seed=seed).served_share
            for seed in seeds
        ]
        for share in shares
    }
    best = max(by_share, key=lambda share: sum(by_share[share]))
    best_of_each = [max(row) for row in zip(*by_share.values(), strict=True)]
    ratios = [own / split for own, split in zip(served, best_of_each, strict=True)]
    return FreshRow(
        workload,
        unified=round(statistics.mean(served), 3),
        unified_min=min(served),
        best_split=best,
        best_split_served=round(statistics.mean(by_share[best]), 3),
        best_split_of_each=round(statistics.mean(best_of_each), 3),
        wins=sum(ratio >= 1 for ratio in ratios),
        ratio_min=round(min(ratios), 3),
    )


def main() -> None:
    """Print a row for each workload, old and held out; takes some minutes."""
    shares = [0.1, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9]
    for workload, phases in (WORKLOADS | WORKLOADS_HELD_OUT).items():
        print(measure_fresh(workload, phases, seeds=FRESH_SEEDS, shares=shares), flush=True)


if __name__ == "__main__":
    main()
