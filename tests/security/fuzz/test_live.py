"""A running daemon meets bytes that are nearly right on each of its sockets."""

from __future__ import annotations

from random import Random

from tests.security.fuzz.live import attacked
from tests.security.fuzz.mutation import mutated

RUNS = 40


def test_a_daemon_serves_on_whatever_is_sent_to_its_sockets() -> None:
    random = Random(20)
    with attacked() as victim:
        for target in victim.targets():
            for seed in target.seeds:
                target.run(seed)
            for _ in range(RUNS):
                target.run(mutated(random, target.seeds))
            victim.check()
