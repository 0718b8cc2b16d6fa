"""The directory against a brute-force model, over many steps of everything that can happen to it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.core.checked_eviction import EVICTIONS
from tests.core.live import PAGE
from tests.core.walk import MOVES, Walk, walk_of
from tests.core.world import WRITES

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


LEGS = ("lookup", "fetch", "load", "backup", "store", "confirm", "snapshot", "restore", "reset", "clear")
STAGES = ("opened", "prefetching", "loading", "loaded", "computed", "donated", "awaited")

REACHED = {  # by name, at least so often
    **{f"policy.{name}": 2 for name in WRITES},
    **{f"eviction.{name}": 1 for name in EVICTIONS},
    **{f"ranks.{count}": 4 for count in (1, 2, 3)},
    **{f"tiers.{count}": 2 for count in (1, 2, 3)},
    **{f"states.{count}": 3 for count in (0, 1, 2)},
    **{f"cap.{cap}": 3 for cap in (None, 1, 2, 4)},
    **dict.fromkeys(
        ("l1.fixed", "l1.arena", "double_buffering.True", "layerwise.True", "window", "latent", "no full attention"), 4
    ),
    **dict.fromkeys(("stages", "rank.lost", "clear.fault", "restore.fault", "release.donated", "release.awaited"), 2),
    **{f"{leg}.ok": 10 for leg in LEGS},
    **{f"{leg}.fault": 4 for leg in LEGS if leg not in ("clear", "restore")},
    **{f"release.{stage}": 8 for stage in STAGES if stage not in ("donated", "awaited")},
    **{f"tokens.{source}": 20 * PAGE for source in ("l1", "l2", "l3", "computed")},
    **dict.fromkeys(("lost.l1.attn", "lost.l1.gdn", "thinned", "refused", "donate.ok", "hand_over.ok"), 5),
    **dict.fromkeys(("load.busy", "load.busy.patient", "extend.busy", "extend.busy.patient"), 10),
    **dict.fromkeys(("handover.complete", "restored.whole", "restart", "flush", "l3.forgets", "fetch.shared"), 10),
    "fetch.shared.missed": 1,
    **dict.fromkeys(("read.latency", "read.gpu", "read.always", "read.never"), 2),
    "dropped.faster_computed": 10 * PAGE,
    "declined.faster_computed": 10,
    "declined.unmeasured": 5,
    "probes": 3,
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
