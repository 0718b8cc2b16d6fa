"""The directory against a brute-force model, over many steps of everything that can happen to it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.core.walk import MOVES, Walk, walk_of

NUMBERS = st.randoms(use_true_random=False)


class DirectoryMachine(RuleBasedStateMachine):
    """Short walks that hypothesis shrinks to the fewest steps that break something."""

    @initialize(rng=NUMBERS)
    def start(self, rng: random.Random) -> None:
        self.walk = Walk(rng)

    @rule(move=st.sampled_from(list(MOVES)), rng=NUMBERS)
    def step(self, move: Callable[[Walk], None], rng: random.Random) -> None:
        self.walk.rng = rng
        self.walk.do(move)

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            self.walk.world.wind_up()


DirectoryMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestDirectoryMachine = DirectoryMachine.TestCase


@pytest.mark.parametrize("seed", range(60))
def test_a_long_random_life_breaks_nothing_and_leaks_nothing(seed: int) -> None:
    walk = walk_of(seed)
    for _ in range(300):
        walk.step()
    walk.world.wind_up()


def test_the_random_lives_reach_what_they_are_for() -> None:
    pass
