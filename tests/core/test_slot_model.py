"""The directory of an engine that owns its slots against a brute-force model, and faults put into it on purpose."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.core.live import PAGE
from tests.core.mutants import Mutant, hunt
from tests.core.slot_mutants import SLOT_MUTANTS
from tests.core.slot_walk import MOVES, SlotWalk, walk_of

NUMBERS = st.randoms(use_true_random=False)


class SlotMachine(RuleBasedStateMachine):
    """Short walks that hypothesis shrinks to the fewest steps that break something."""

    @initialize(rng=NUMBERS)
    def start(self, rng: random.Random) -> None:
        self.walk = SlotWalk(rng)

    @rule(move=st.sampled_from(list(MOVES)), rng=NUMBERS)
    def step(self, move: Callable[[SlotWalk], None], rng: random.Random) -> None:
        self.walk.rng = rng
        self.walk.do(move)

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            self.walk.world.wind_up()


SlotMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestSlotMachine = SlotMachine.TestCase


@pytest.mark.parametrize("seed", range(20))
def test_a_long_random_life_breaks_nothing_and_leaks_nothing(seed: int) -> None:
    walk = walk_of(seed)
    for _ in range(250):
        walk.step()
    walk.world.wind_up()


REACHED = {  # by name, at least so often
    **{f"ranks.{count}": 4 for count in (1, 2, 3)},
    **{f"{leg}.ok": 100 for leg in ("lookup", "confirm", "fetch", "load", "backup", "store")},
    **{f"{leg}.fault": 5 for leg in ("lookup", "confirm", "load", "backup", "store")},
    "fetch.fault": 2,  # most engines with an L3 find in it what they have in L2 as well
    **{f"tokens.{source}": 50 * PAGE for source in ("l1", "l2", "l3", "computed")},
    **{f"end.{stage}": 10 for stage in ("waiting", "loading", "computed")},
    **dict.fromkeys(("one numbering", "window", "policy.write_through_selective"), 3),
    **dict.fromkeys(("rank.lost", "load.waits"), 1),
    **dict.fromkeys(("loaded", "load.gone", "step.waits", "save.free", "restored.whole"), 10),
    **dict.fromkeys(("backup.no_host_capacity", "backup.unreachable", "promise.expired", "preempted", "restart"), 10),
}


def test_the_random_lives_reach_what_they_are_for() -> None:
    """A positive control: every engine is drawn, every tier is hit, everything fails at times, nothing is vacuous."""
    reached: Counter[str] = Counter()
    for seed in range(60):
        walk = walk_of(seed, checks=False)
        for _ in range(200):
            walk.step()
        reached += walk.reached
    too_rare = {name: reached[name] for name, count in REACHED.items() if reached[name] < count}
    assert not too_rare


CHEAPEST = (
    "a step does not wait for the saves that read its slots",
    "a load keeps what it has read for ever",
    "a load takes a window for the engine's own that it has not",
    "what L3 does not have is noted as there",
)


@pytest.mark.parametrize("mutant", [mutant for mutant in SLOT_MUTANTS if mutant.name in CHEAPEST], ids=lambda m: m.name)
def test_a_fault_in_the_directory_is_found_by_walking(mutant: Mutant) -> None:
    assert hunt(mutant, walk_of=walk_of, steps_max=1200) is not None


def test_every_mutant_fits_the_code() -> None:
    for mutant in SLOT_MUTANTS:
        with mutant.applied():
            pass
    assert {mutant.name for mutant in SLOT_MUTANTS} >= set(CHEAPEST)
