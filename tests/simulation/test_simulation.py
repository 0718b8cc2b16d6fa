"""Short forms of what ``python -m tests.simulation`` runs for as long as one likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.tally import Tally
from tests.simulation.world import World

LIVES = 12


def test_lives_of_a_node_end_without_a_wrong_byte_a_leak_or_a_hang() -> None:
    tally = Tally()
    for seed in range(LIVES):
        tally.add(World(seed).run())
    assert tally.from_l3_tokens > 0
    assert tally.daemon_kills + tally.daemon_stops > 0
    assert tally.disk_faults + tally.connections_broken > 0


@pytest.mark.parametrize("seed", [3, 17])
def test_a_seed_replays_exactly(seed: int) -> None:
    first, second = World(seed).run(), World(seed).run()
    assert first == second
    assert first.steps > 1000


@pytest.mark.parametrize(("mutant", "weather", "seed"), MUTANTS, ids=[mutant.__name__ for mutant, *_ in MUTANTS])
def test_a_fault_in_the_code_is_found(mutant: Callable[[], Any], weather: str, seed: int) -> None:
    World(seed, weather=weather).run()  # the same life without the fault
    with mutant(), pytest.raises(BaseException):  # noqa: B017, PT011  # whatever tells it first
        World(seed, weather=weather).run()
