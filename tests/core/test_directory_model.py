"""The directory against a brute-force model, over many steps of everything that can happen to it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from hicache.arena import ArenaLayout
from hicache.jobs import Job
from hicache.outcome import Outcome
from hicache.policies.snapshot import SnapshotPolicy
from hicache.spec import Group
from tests.core.simulated_executor import Fault, no_fault
from tests.core.world import MODELS, PAGE, POLICIES, Live, World, shared

TOKENS = st.lists(st.integers(0, 1), max_size=13)
SNAPSHOT_POLICIES = st.builds(
    SnapshotPolicy,
    chunk_ends=st.booleans(),
    branch_points=st.booleans(),
    ends=st.booleans(),
    prefill_interval_tokens=st.none() | st.sampled_from([PAGE, 3 * PAGE]),
    state_interval_tokens=st.none() | st.sampled_from([PAGE, 3]),
    cap_per_path=st.none() | st.integers(1, 4),
)
FAULTS = st.sampled_from([0, 0, 0]) | st.integers(0, 255)


def faults_of(bits: int) -> Fault:
    """The items whose bit is set fail."""
    if not bits:
        return no_fault

    def fault(job: Job, item: int) -> Outcome | None:
        return Outcome.IO_ERROR if bits >> (item + job.job_id) % 8 & 1 else None

    return fault


class DirectoryMachine(RuleBasedStateMachine):
    """Short runs that hypothesis shrinks to the fewest steps that break something."""

    requests = Bundle("requests")

    @initialize(
        groups=st.sampled_from(MODELS),
        l1=st.tuples(*[st.integers(2, 12)] * 4),
        arena=st.none() | st.tuples(st.integers(4, 12), st.tuples(*[st.integers(1, 4)] * 4)),
        l2=st.none() | st.tuples(*[st.integers(1, 8)] * 4),
        has_l3=st.booleans(),
        ranks=st.integers(1, 2),
        share=st.sampled_from([0.2, 0.5, 1.0]),
        job_items_max=st.sampled_from([1, 2, 16]),
        policy=st.sampled_from(list(POLICIES)),
        snapshot_policy=SNAPSHOT_POLICIES,
        double_buffering=st.booleans(),
    )
    def start(
        self,
        groups: tuple[Group, ...],
        l1: tuple[int, ...],
        arena: tuple[int, tuple[int, ...]] | None,
        l2: tuple[int, ...] | None,
        has_l3: bool,
        ranks: int,
        share: float,
        job_items_max: int,
        policy: str,
        snapshot_policy: SnapshotPolicy,
        double_buffering: bool,
    ) -> None:
        self.world = World(
            groups,
            l1=l1,
            arena=None if arena is None else shared(groups, units=arena[0], slots_per_unit=arena[1]),
            l2=l2 or 0,
            job_items_max=job_items_max,
            has_l3=has_l3 and l2 is not None,
            ranks=ranks,
            prefetch_l2_share=share,
            store_l2_share=share,
            seconds_per_request=25.0,
            policy=POLICIES[policy],
            snapshot_policy=snapshot_policy,
            double_buffering=double_buffering,
        )

    @rule(target=requests, tokens=TOKENS)
    def open(self, tokens: list[int]) -> Live:
        return self.world.open(tokens)

    @rule(live=requests)
    def prefetch(self, live: Live) -> None:
        if live in self.world.live:
            self.world.prefetch(live)

    @rule(live=requests, patient=st.booleans())
    def load(self, live: Live, patient: bool) -> None:
        if live in self.world.live:
            self.world.load(live, patient=patient)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule()
    def flush(self) -> None:
        self.world.directory.flush()
        self.world.executor.collect()

    @rule(live=requests, tokens=st.lists(st.integers(0, 1), max_size=3))
    def append(self, live: Live, tokens: list[int]) -> None:
        if live in self.world.live and live.record.is_loaded:
            self.world.append(live, tokens)

    @rule(
        live=requests,
        pages=st.integers(0, 3),
        snapshot=st.booleans(),
        moves=st.booleans(),
        donate=st.integers(0, 9).map(lambda chance: chance == 0),
        faults=FAULTS,
        patient=st.booleans(),
    )
    def compute(
        self, live: Live, pages: int, snapshot: bool, moves: bool, donate: bool, faults: int, patient: bool
    ) -> None:
        if live in self.world.live:
            self.world.compute(
                live,
                pages=pages,
                snapshot=snapshot,
                moves=moves,
                donate=donate,
                fault=faults_of(faults),
                patient=patient,
            )

    @rule(live=requests, pages=st.integers(1, 4), faults=FAULTS)
    def compute_to_the_next_stop(self, live: Live, pages: int, faults: int) -> None:
        if live in self.world.live:
            self.world.compute_to_stop(live, pages=pages, fault=faults_of(faults))

    @rule(tokens=TOKENS, snapshot=st.booleans(), faults=FAULTS)
    def serve(self, tokens: list[int], snapshot: bool, faults: int) -> None:
        self.world.serve(tokens, snapshot=snapshot, fault=faults_of(faults & faults >> 1))

    @rule(live=requests)
    def hand_over(self, live: Live) -> None:
        self.world.hand_over(live)

    @rule(live=consumes(requests))
    def release(self, live: Live) -> None:
        if live in self.world.live:
            self.world.release(live)

    @rule(tokens=TOKENS)
    def another_engine_stores(self, tokens: list[int]) -> None:
        self.world.fill_l3(tokens)

    @rule(choice=st.integers(0, 100), faults=FAULTS)
    def run_a_task(self, choice: int, faults: int) -> None:
        self.world.run(choice, faults_of(faults))

    @rule()
    def run_all_tasks(self) -> None:
        self.world.run_all()

    @rule(choice=st.integers(0, 1000))
    def l3_forgets(self, choice: int) -> None:
        self.world.forget_in_l3(choice)

    @precondition(lambda self: self.world.config.ranks > 1)
    @rule(choice=st.integers(0, 15))
    def a_rank_dies_at_times(self, choice: int) -> None:
        if choice > 12:
            self.world.lose_rank(choice)

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.wind_up()


DirectoryMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestDirectoryMachine = DirectoryMachine.TestCase


class RandomWalk:
    """Long runs, from a seed; in every other one the groups share L1."""

    def __init__(self, seed: int, *, policy: str = "write_through") -> None:
        self.random = random.Random(seed)
        self.is_faulty = self.random.random() < 0.6
        self.deaths_per_step = 0.01 if self.random.random() < 0.3 else 0.0
        has_l2 = self.random.random() < 0.8
        groups = self.random.choice(MODELS)
        self.world = World(
            groups,
            l1=self.slots(),
            arena=self.arena(groups) if seed % 2 else None,
            l2=self.slots() if has_l2 else 0,
            job_items_max=self.random.choice([1, 2, 16]),
            has_l3=has_l2 and self.random.random() < 0.9,
            ranks=self.random.choice([1, 1, 2, 3]),
            prefetch_l2_share=self.random.choice([0.1, 0.5, 1.0]),
            store_l2_share=self.random.choice([0.1, 0.5, 1.0]),
            seconds_per_request=self.random.choice([0.0, 25.0, 100.0]),
            policy=POLICIES[policy],
            snapshot_policy=SnapshotPolicy(
                chunk_ends=self.random.random() < 0.5,
                prefill_interval_tokens=self.random.choice([None, PAGE, 3 * PAGE]),
                state_interval_tokens=self.random.choice([None, PAGE, 2 * PAGE]),
                cap_per_path=self.random.choice([None, 1, 2, 4]),
            ),
            double_buffering=self.random.random() < 0.5,
        )
        self.trunks = [self.tokens(24) for _ in range(2)]

    def slots(self) -> tuple[int, ...]:
        """As many for all groups, or for each as may be."""
        sizes = [3, 6, 12, 30]
        return (
            (self.random.choice(sizes),) * 4 if self.random.random() < 0.5 else tuple(self.random.choices(sizes, k=4))
        )

    def arena(self, groups: tuple[Group, ...]) -> ArenaLayout:
        per_unit = tuple(self.random.choice([1, 1, 2, 3, 7]) for _ in range(4))
        return shared(groups, units=self.random.choice([5, 8, 16, 40]), slots_per_unit=per_unit)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(count)]

    def prompt(self) -> list[int]:
        """Shares a beginning with others."""
        trunk = self.random.choice(self.trunks)
        return trunk[: self.random.randrange(25)] + self.tokens(self.random.randrange(5))

    def fault(self) -> Fault:
        return faults_of(self.random.getrandbits(8) & self.random.getrandbits(8) if self.is_faulty else 0)

    def step(self) -> None:
        world = self.world
        choice = self.random.random()
        live = self.random.choice(world.live) if world.live else None
        if self.random.random() < self.deaths_per_step:
            world.lose_rank(self.random.randrange(1000))
        if choice < 0.35:
            world.run(self.random.randrange(1000), self.fault() if self.random.random() < 0.3 else no_fault)
        elif live is None or (choice < 0.45 and len(world.live) < 6):
            live = world.open(self.prompt())
            if self.random.random() < 0.7:
                world.prefetch(live)
        elif choice < 0.60:
            world.load(live, patient=choice < 0.52)
        elif choice < 0.70:
            world.compute(
                live,
                pages=self.random.randrange(4),
                snapshot=self.random.random() < 0.6,
                moves=self.random.random() < 0.8,
                donate=self.random.random() < 0.1,
                fault=self.fault(),
                patient=choice < 0.65,
            )
        elif choice < 0.80:
            world.compute_to_stop(live, pages=self.random.randrange(1, 5), fault=self.fault())
        elif choice < 0.82:
            world.hand_over(live)
        elif choice < 0.90:
            world.release(live)
        elif choice < 0.92 and live.record.is_loaded:
            world.append(live, self.tokens(3))
        elif choice < 0.95:
            prompt = self.prompt()
            world.fill_l3(prompt)
            live = world.open([*prompt, 0])
            world.prefetch(live)
            world.run_all()
            world.load(live)
        elif choice < 0.96 and self.is_faulty:
            world.forget_in_l3(self.random.randrange(1000))
        elif choice < 0.98:
            world.run_all()
        elif choice < 0.983:
            world.restart()
        elif choice < 0.986:
            world.directory.flush()
            world.executor.collect()
        else:
            world.serve(self.prompt(), snapshot=True, fault=self.fault())


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("seed", range(20))
def test_a_long_random_life_breaks_nothing_and_leaks_nothing(seed: int, policy: str) -> None:
    walk = RandomWalk(seed, policy=policy)
    for _ in range(300):
        walk.step()
        walk.world.check()
    walk.world.wind_up()


def test_the_random_lives_reach_what_they_are_for() -> None:
    """A positive control: over the seeds every tier is hit, everything fails at times, and nothing is vacuous."""
    served: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    objects: set[str] = set()
    thinned = lost_ranks = 0
    for seed in range(21):
        walk = RandomWalk(seed, policy=list(POLICIES)[seed % 3])
        for _ in range(300):
            walk.step()
        for stats in walk.world.lives:
            served += stats.tokens_by_source
            lost += stats.tokens_lost
            objects |= set(stats.objects)
            thinned += stats.snapshots_thinned
            lost_ranks += len(stats.ranks_lost)
    assert min(served[source] for source in ("l1", "l2", "l3", "computed")) > 5 * PAGE
    assert lost["l1.attn"] > 5 * PAGE
    assert lost_ranks > 0
    legs = ("backup", "store", "fetch", "load", "restore", "snapshot", "reset", "clear")
    assert objects >= {f"{leg}.{outcome}" for leg in legs for outcome in ("ok", "io_error")}
    assert objects >= {"donate.ok", "hand_over.ok"}
    assert thinned > 10
