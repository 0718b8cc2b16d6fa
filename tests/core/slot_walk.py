"""A random life of an engine that owns its slots, step by step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hicache.spec import PagedGroup
from tests.core.checked_eviction import EVICTIONS
from tests.core.checked_read import declined_requests
from tests.core.setup import Setup
from tests.core.simulated_executor import Fault, no_fault
from tests.core.slot_world import Life, SlotWorld
from tests.core.walk import FAULTS, failing_items
from tests.core.world import WRITES

LIVES_MAX = 6


class SlotWalk:
    """``rng`` decides about the engine, and then about each step; it may be replaced between steps."""

    def __init__(self, rng: random.Random, *, checks: bool = True) -> None:
        self.rng = rng
        setup = Setup.draw(rng)
        policy = "write_through" if setup.policy == "write_back" else setup.policy
        self.setup = replace(setup, policy=policy, l2=setup.l2 or (6,) * len(setup.groups))
        self.one_numbering = rng.random() < 0.4
        l1 = rng.choice((4, 8, 12, 30))
        self.world = SlotWorld(
            self.setup.groups,
            l1=(l1 * (2 if self.one_numbering else 1),) * len(self.setup.groups),
            l2=self.setup.l2,
            one_numbering=self.one_numbering,
            job_items_max=self.setup.job_items_max,
            policy=WRITES[policy],
            eviction=EVICTIONS[self.setup.eviction],
            lacks=self.setup.lacks,
            has_l3=rng.random() < 0.75,
            ranks=self.setup.ranks,
            prefetch_l2_share=self.setup.prefetch_l2_share,
            store_l2_share=self.setup.store_l2_share,
            read_policy=self.setup.read_policy,
        )
        self.world.fetch_s, self.world.token_s = self.setup.fetch_s, self.setup.token_s
        self.is_faulty = rng.random() < 0.5
        self.is_deadly = rng.random() < 0.2
        self.trunks = [self.tokens(24) for _ in range(2)]
        self.steps = 0
        self.checks = checks

    def step(self) -> None:
        self.do(self.rng.choices(list(MOVES), list(MOVES.values()))[0])

    def wind_up(self) -> None:
        self.world.wind_up()

    def do(self, move: Callable[[SlotWalk], None]) -> None:
        self.steps += 1
        move(self)
        if self.checks:
            self.world.check()

    @property
    def reached(self) -> Counter[str]:
        """What has happened so far, by name."""
        reached = self.world.reached + Counter(
            [f"ranks.{self.setup.ranks}", f"policy.{self.setup.policy}", f"eviction.{self.setup.eviction}"]
        )
        reached["one numbering"] += self.one_numbering
        reached["window"] += any(isinstance(g, PagedGroup) and bool(g.window_tokens) for g in self.setup.groups)
        for stats in self.world.lives:
            reached += Counter({f"tokens.{source}": count for source, count in stats.tokens_by_source.items()})
            reached += Counter({f"dropped.{reason}": count for reason, count in stats.prefetch_dropped.items()})
            reached += Counter({f"declined.{reason}": count for reason, count in stats.prefetch_declined.items()})
            reached += Counter(stats.skipped)
            for name, count in stats.objects.items():
                leg, outcome = name.split(".")
                is_fault = outcome in {fault.name.lower() for fault in FAULTS[:-1]}
                reached[f"{leg}.fault" if is_fault else name] += count
        return reached

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(count)]

    def prompt(self) -> list[int]:
        """Shares a beginning with others."""
        return self.rng.choice(self.trunks)[: self.rng.randrange(25)] + self.tokens(self.rng.randrange(5))

    def fault(self, *, share: float = 1.0) -> Fault:
        if not self.is_faulty or self.rng.random() >= share:
            return no_fault
        return failing_items(self.rng.getrandbits(8) & self.rng.getrandbits(8), self.rng.choice(FAULTS))

    def some_life(self) -> Life | None:
        return self.rng.choice(self.world.alive) if self.world.alive else None

    def own(self) -> int:
        return self.rng.choice((0, 0, 0, 1, 2, 4, 7))


# -- moves -----------------------------------------------------------------------------------------------------------


def start(walk: SlotWalk) -> None:
    if len(walk.world.alive) < LIVES_MAX:
        life = walk.world.start(walk.prompt(), own=walk.own())
        if walk.rng.random() < 0.7:
            walk.world.prefetch_life(life)


def prefetch(walk: SlotWalk) -> None:
    if life := walk.some_life():
        walk.world.prefetch_life(life)


def usable(walk: SlotWalk) -> None:
    if life := walk.some_life():
        walk.world.usable(life)


def load(walk: SlotWalk) -> None:
    """What was promised, or what is usable, or as long as may be, which may not be there."""
    if life := walk.some_life():
        if walk.rng.random() < 0.1:
            pages = life.record.restorable_pages
        else:
            pages = life.promised[0] if life.promised and walk.rng.random() < 0.6 else walk.world.usable(life)
        walk.world.begin_load(life, pages)


def compute(walk: SlotWalk) -> None:
    """A step, and what it has computed is saved."""
    if (life := walk.some_life()) is None:
        return
    before = life.computed
    is_told = walk.rng.random() < 0.8
    states = walk.rng.random() < 0.6
    has_computed = walk.world.compute_pages(life, walk.rng.randrange(1, 5), states=states, tells=is_told)
    if has_computed and walk.rng.random() < 0.8:
        first = 0 if walk.rng.random() < 0.6 else before
        walk.world.save(life, [part for part in sorted(life.parts) if part[0] >= first])


def save(walk: SlotWalk) -> None:
    """Any part of what there is, or all but the attention of the last page."""
    if (life := walk.some_life()) and life.load is None:
        share = walk.rng.choice((0.5, 0.9, 1.0))
        full = walk.world.slots.index.rule.full_mask if walk.rng.random() < 0.3 else 0
        last = life.computed - 1
        parts = [(page, group) for page, group in sorted(life.parts) if page < last or not full >> group & 1]
        walk.world.save(life, [part for part in parts if walk.rng.random() < share])


def compute_save_and_end(walk: SlotWalk) -> None:
    """As most requests do: their slots are free when they end, and copies are under way."""
    if (life := walk.some_life()) and life.load is None:
        walk.world.compute_pages(life, 24, states=True, tells=True)
        walk.world.save(life, sorted(life.parts))
        walk.world.end(life)


def append(walk: SlotWalk) -> None:
    if (life := walk.some_life()) and life.load is None:
        walk.world.append_tokens(life, walk.tokens(walk.rng.randrange(4)))


def give_back_what_has_left_the_window(walk: SlotWalk) -> None:
    if (life := walk.some_life()) and life.load is None:
        walk.world.drop_window(life)


def preempt(walk: SlotWalk) -> None:
    if life := walk.some_life():
        walk.world.preempt(life, walk.own())


def end(walk: SlotWalk) -> None:
    if life := walk.some_life():
        walk.world.end(life)


def another_engine_stores(walk: SlotWalk) -> None:
    if walk.world.config.has_l3:
        walk.world.fill_l3(walk.prompt())


def restore_what_another_engine_stored(walk: SlotWalk) -> None:
    """A request that takes its time: without faults it gets all, if its plan had room."""
    world = walk.world
    if not world.config.has_l3 or len(world.alive) >= LIVES_MAX:
        return
    tokens = [*walk.prompt(), 0]
    world.fill_l3(tokens)
    dropped = world.slots.stats.prefetch_dropped.total() + declined_requests(world.slots.stats)
    life = world.start(tokens, own=walk.own())
    world.prefetch_life(life)
    world.run_all()
    usable = world.usable(life)
    is_cut = world.slots.stats.prefetch_dropped.total() + declined_requests(world.slots.stats) > dropped
    if not is_cut and not world.slots.stats.ranks_lost:
        prefetch = life.record.prefetch
        if prefetch is not None and (prefetch.target_pages or life.record.restorable_pages == life.computed):
            assert usable == life.record.restorable_pages, "L3 has all of it, and it was not brought"
            world.reached["restored.whole"] += usable > life.computed
    world.begin_load(life, usable)


def time_passes(walk: SlotWalk) -> None:
    walk.world.now_s += walk.rng.choice((1.0, 10.0, 40.0))
    walk.world.slots.tell_time(walk.world.now_s)
    walk.world.executor.collect()


def a_task_is_done(walk: SlotWalk) -> None:
    walk.world.run(walk.rng.randrange(1000), walk.fault(share=0.6))


def all_tasks_are_done(walk: SlotWalk) -> None:
    walk.world.run_all()


def l3_forgets(walk: SlotWalk) -> None:
    if walk.is_faulty:
        walk.world.forget_in_l3(walk.rng.randrange(1000))


def a_rank_dies(walk: SlotWalk) -> None:
    if walk.is_deadly:
        walk.world.lose_rank(walk.rng.randrange(1000))


def restart(walk: SlotWalk) -> None:
    walk.world.restart()


MOVES: dict[Callable[[SlotWalk], None], float] = {  # and how often
    a_task_is_done: 30,
    start: 12,
    prefetch: 3,
    usable: 5,
    load: 12,
    compute: 12,
    save: 4,
    compute_save_and_end: 8,
    append: 3,
    give_back_what_has_left_the_window: 2,
    preempt: 2,
    end: 4,
    another_engine_stores: 1,
    restore_what_another_engine_stored: 4,
    time_passes: 2,
    all_tasks_are_done: 2,
    l3_forgets: 1,
    a_rank_dies: 0.5,
    restart: 0.3,
}


def walk_of(seed: int, *, checks: bool = True) -> SlotWalk:
    return SlotWalk(random.Random(seed), checks=checks)
