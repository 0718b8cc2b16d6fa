"""Short forms of what ``python -m tests.simulation`` runs for as long as one likes."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import blake2b

import pytest

from tests.simulation.mutants import LIVES, Life, Mutant
from tests.simulation.tally import Tally
from tests.simulation.world import World

STATEMENTS = 60.0


def test_lives_of_a_node_end_without_a_wrong_byte_a_leak_or_a_hang() -> None:
    tally = Tally()
    for seed in range(4):
        tally.add(World(seed, statements=STATEMENTS * (seed % 2), ranks=seed == 3).run())
    assert tally.from_l3_tokens > 0
    assert tally.daemon_kills + tally.daemon_stops > 0
    assert tally.disk_faults + tally.connections_broken > 0
    assert tally.replicas > 0
    assert min(tally.observed, tally.audits, tally.watched, tally.operated) > 0


def test_a_seed_replays_exactly_in_another_process_and_after_another_life() -> None:
    options = ["--seed", "17", "--lives", "1", "--statements", str(STATEMENTS)]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *options],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    World(3, statements=STATEMENTS).run()
    trace = World(17, statements=STATEMENTS).run().traces[0]
    assert blake2b(trace.encode(), digest_size=6).hexdigest() in other.stdout.split()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("life", LIVES, ids=lambda life: f"{life.weather}-{life.seed}{'-ranks' * life.ranks}")
def test_faults_in_the_code_end_lives_that_are_clean_without_them(life: Life) -> None:
    """Each in one of the first SEEDS_MAX lives: in which, any change of the code may move."""
    clean: set[int] = set()
    survivors = []
    for mutant in life.mutants:
        seed = next((seed for seed in life.seeds if _ends(life, seed, mutant)), None)
        if seed is None:
            survivors.append(mutant.__name__)
        elif seed not in clean:
            life.world(seed).run()
            clean.add(seed)
    assert not survivors


def _ends(life: Life, seed: int, mutant: Mutant) -> bool:
    with mutant():
        try:
            life.world(seed).run()
        except Exception:  # whatever tells it first
            return True
    return False
