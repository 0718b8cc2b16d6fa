"""A random life of one engine, step by step, from anything that can be asked for numbers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hicache.jobs import CopyKind, FetchJob, Job, LookupJob
from hicache.outcome import Outcome
from tests.core.live import Live
from tests.core.setup import FETCH_S, Setup
from tests.core.simulated_executor import Fault, no_fault

LIVE_MAX = 6
STEPS_PER_SPEED = 70
FAULTS = (Outcome.IO_ERROR, Outcome.IO_ERROR, Outcome.CORRUPT, Outcome.DEADLINE, Outcome.UNAVAILABLE)


def failing_items(bits: int, outcome: Outcome) -> Fault:
    """The items whose bit is set fail."""
    if not bits:
        return no_fault

    def fault(job: Job, item: int) -> Outcome | None:
        return outcome if bits >> (item + job.job_id) % 8 & 1 else None

    return fault


class Walk:
    """``rng`` decides about the engine, and then about each step; it may be replaced between steps."""

    def __init__(self, rng: random.Random, *, checks: bool = True) -> None:
        self.rng = rng
        self.setup = Setup.draw(rng)
        self.world = self.setup.world()
        self.is_faulty = rng.random() < 0.6
        self.is_deadly = rng.random() < 0.3
        self.trunks = [self.tokens(24) for _ in range(2)]
        self.steps = 0
        self.checks = checks

    def step(self) -> None:
        self.do(self.rng.choices(list(MOVES), list(MOVES.values()))[0])

    def wind_up(self) -> None:
        self.world.wind_up()

    def do(self, move: Callable[[Walk], None]) -> None:
        self.steps += 1
        if self.steps % STEPS_PER_SPEED == 0:  # L3 becomes slower, or faster
            self.world.fetch_s = FETCH_S[self.steps // STEPS_PER_SPEED % len(FETCH_S)]
        move(self)
        if self.checks:
            self.world.check()

    @property
    def reached(self) -> Counter[str]:
        """What has happened so far, by name."""
        reached = self.world.reached + Counter(self.setup.traits)
        for stats in self.world.lives:
            reached += Counter({f"tokens.{source}": count for source, count in stats.tokens_by_source.items()})
            reached += Counter({f"lost.{name}": count for name, count in stats.tokens_lost.items()})
            reached += Counter({f"dropped.{reason}": count for reason, count in stats.prefetch_dropped.items()})
            reached += Counter({f"declined.{reason}": count for reason, count in stats.prefetch_declined.items()})
            reached["thinned"] += stats.snapshots_thinned
            reached["probes"] += stats.prefetch_probes
            for name, count in stats.objects.items():
                leg, outcome = name.split(".")
                is_fault = outcome in {fault.name.lower() for fault in FAULTS[:-1]}  # not what a lost rank leaves
                reached[f"{leg}.fault" if is_fault else name] += count
        return reached

    # -- what is drawn -----------------------------------------------------------------------------------------------

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(count)]

    def prompt(self) -> list[int]:
        """Shares a beginning with others."""
        trunk = self.rng.choice(self.trunks)
        return trunk[: self.rng.randrange(25)] + self.tokens(self.rng.randrange(5))

    def fault(self, *, share: float = 1.0) -> Fault:
        if not self.is_faulty or self.rng.random() >= share:
            return no_fault
        return failing_items(self.rng.getrandbits(8) & self.rng.getrandbits(8), self.rng.choice(FAULTS))

    def some_live(self) -> Live | None:
        return self.rng.choice(self.world.live) if self.world.live else None


# -- moves -----------------------------------------------------------------------------------------------------------


def open_a_request(walk: Walk) -> None:
    """At times for a prompt that another request is alive with."""
    if len(walk.world.live) >= LIVE_MAX:
        return
    twin = walk.some_live() if walk.rng.random() < 0.4 else None
    live = walk.world.open(walk.prompt() if twin is None else list(twin.tokens))
    if walk.rng.random() < 0.7:
        walk.world.prefetch(live)


def prefetch(walk: Walk) -> None:
    if live := walk.some_live():
        walk.world.prefetch(live)


def load(walk: Walk) -> None:
    if live := walk.some_live():
        walk.world.load(live, patient=walk.rng.random() < 0.5)


def compute(walk: Walk) -> None:
    if live := walk.some_live():
        walk.world.compute(
            live,
            pages=walk.rng.randrange(4),
            snapshot=walk.rng.random() < 0.6,
            moves=walk.rng.random() < 0.8,
            donate=walk.rng.random() < 0.1,
            fault=walk.fault(),
            patient=walk.rng.random() < 0.5,
            is_told_late=walk.rng.random() < 0.3,
        )


def compute_to_the_next_stop(walk: Walk) -> None:
    if live := walk.some_live():
        walk.world.compute_to_stop(live, pages=walk.rng.randrange(1, 5), fault=walk.fault())


def append(walk: Walk) -> None:
    if (live := walk.some_live()) and live.record.is_loaded:
        walk.world.append(live, walk.tokens(walk.rng.randrange(4)))


def store_what_is_not_committed(walk: Walk) -> None:
    if live := walk.some_live():
        walk.world.store_uncommitted(live)


def hand_over(walk: Walk) -> None:
    if live := walk.some_live():
        walk.world.hand_over(live)


def release(walk: Walk) -> None:
    if live := walk.some_live():
        walk.world.release(live)


def serve(walk: Walk) -> None:
    walk.world.serve(walk.prompt(), fault=walk.fault(), patient=walk.rng.random() < 0.3)


def another_engine_stores(walk: Walk) -> None:
    walk.world.fill_l3(walk.prompt())


def restore_what_another_engine_stored(walk: Walk) -> None:
    if len(walk.world.live) < LIVE_MAX:
        walk.world.restore_stored([*walk.prompt(), 0])


def two_requests_want_what_another_engine_stored(walk: Walk) -> None:
    """The second one's plan meets the fetches of the first one, which may be aborted, or fail."""
    world, rng = walk.world, walk.rng
    if len(world.live) >= LIVE_MAX:
        return
    prompt = [*walk.tokens(4), *walk.prompt(), 0]
    world.fill_l3(prompt)
    twins = []
    for _ in range(2):
        twins.append(world.open(prompt[: rng.randrange(len(prompt) // 2, len(prompt) + 1)]))
        world.prefetch(twins[-1])
        world.executor.run_kind(LookupJob)
    if rng.random() < 0.4:
        world.release(twins[0])
    if walk.is_faulty and rng.random() < 0.5:
        world.note_fault(fault := walk.fault())
        world.executor.run_kind(FetchJob, fault)


def a_task_is_done(walk: Walk) -> None:
    walk.world.run(walk.rng.randrange(1000), walk.fault(share=0.3))


def all_tasks_are_done(walk: Walk) -> None:
    walk.world.run_all()


def l3_forgets(walk: Walk) -> None:
    if walk.is_faulty:
        walk.world.forget_in_l3(walk.rng.randrange(1000))


def a_rank_dies(walk: Walk) -> None:
    if walk.is_deadly:
        walk.world.lose_rank(walk.rng.randrange(1000))


def restart(walk: Walk) -> None:
    walk.world.restart()


def flush(walk: Walk) -> None:
    """With requests alive, or as before a shutdown."""
    if walk.rng.random() < 0.6:
        for live in list(walk.world.live):
            walk.world.release(live)
    walk.world.flush()


def another_takes_the_place_of_one_that_is_aborted(walk: Walk) -> None:
    """While copies for the first one are still under way."""
    loading = [live for live in walk.world.live if live.record.loading]
    if loading:
        walk.world.release(walk.rng.choice(loading))
        live = walk.world.open([2 + token for token in walk.tokens(25)])  # nothing of it is here: it starts at once
        walk.world.load(live)
        walk.world.executor.run_kind(CopyKind.RESET)
        walk.world.compute(live, pages=12, snapshot=True)


MOVES: dict[Callable[[Walk], None], float] = {  # and how often, in the random walks
    a_task_is_done: 35,
    open_a_request: 11,
    prefetch: 3,
    load: 14,
    compute: 10,
    compute_to_the_next_stop: 9,
    append: 2,
    store_what_is_not_committed: 1,
    hand_over: 2,
    release: 8,
    serve: 1.5,
    another_engine_stores: 1,
    restore_what_another_engine_stored: 3,
    two_requests_want_what_another_engine_stored: 5,
    all_tasks_are_done: 2,
    l3_forgets: 1,
    a_rank_dies: 0.5,
    flush: 1,
    another_takes_the_place_of_one_that_is_aborted: 2,
    restart: 0.3,
}


def walk_of(seed: int, *, checks: bool = True) -> Walk:
    return Walk(random.Random(seed), checks=checks)
