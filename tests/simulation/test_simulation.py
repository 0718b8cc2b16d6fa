"""Short forms of what ``python -m tests.simulation`` runs for as long as one likes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from hashlib import blake2b

import pytest

from tests.simulation.mutants import LIVES, Life, Mutant
from tests.simulation.tally import Tally
from tests.simulation.world import World

STATEMENTS = 60.0
SEEDS_MAX = 64  # a fault that one life in 16 meets goes unseen by 2 % of searches


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


@pytest.mark.parametrize("life", LIVES, ids=lambda life: f"{life.weather}-{life.seed}{'-ranks' * life.ranks}")
def test_faults_in_the_code_end_lives_that_are_clean_without_them(life: Life) -> None:
    clean: set[int] = set()
    survivors = [mutant.__name__ for mutant in life.mutants if not _is_found(life, mutant, clean)]
    assert not survivors


def _is_found(life: Life, mutant: Mutant, clean: set[int]) -> bool:
    """By the life that is known to meet it, or by one of the next: what a seed draws changes with hicache."""
    for seed in range(life.seed, life.seed + SEEDS_MAX):
        other = replace(life, seed=seed)
        if _ends(other, mutant):
            if seed not in clean:
                other.world().run()
                clean.add(seed)
            return True
    return False


def _ends(life: Life, mutant: Mutant) -> bool:
    with mutant():
        try:
            life.world().run()
        except Exception:  # whatever tells it first
            return True
    return False
