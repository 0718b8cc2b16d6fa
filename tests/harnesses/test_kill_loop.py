"""Harness 5 over real engines and daemons, and harness 1 after it. HICACHE_TEST_KILLS sets how many kills."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from tests.harnesses.kill_loop import KillLoop

KILLS = int(os.environ.get("HICACHE_TEST_KILLS", "3"))
SEED = int(os.environ.get("HICACHE_TEST_SEED", str(Random().randrange(2**32))))


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_engines_and_daemons_are_killed_and_all_agrees_when_the_next_is_ready(backend: str) -> None:
    print(f"HICACHE_TEST_SEED={SEED}")
    with TemporaryDirectory(prefix="hkl-") as folder:
        ended = KillLoop(Path(folder) / "n", backend=backend, seed=SEED).run(KILLS)
    assert ended["served"] > 0
    assert ended["engine"] + ended["both"] >= min(2, KILLS)
