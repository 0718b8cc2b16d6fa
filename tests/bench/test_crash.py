"""bench.crash: what it runs in continuous integration, and that it sees what it is meant to see."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from bench.crash import KILLS_QUICK, plan
from bench.crash_objects import ObjectMaker
from bench.crash_run import CrashPart, Part, Tally
from hicache.backends.file_layout import HEADER_BYTES
from hicache.backends.open import BACKEND_SCHEMES

KILLS = int(os.environ.get("HICACHE_TEST_KILLS", KILLS_QUICK))
SEED = int(os.environ.get("HICACHE_TEST_SEED", Random().randrange(2**32)))
PARTS = plan(BACKEND_SCHEMES, kills=KILLS, is_quick=True)


def run(harness: type[CrashPart], part: Part, *, seed: int) -> Tally:
    with TemporaryDirectory(prefix="hcr-") as folder:
        return harness(part, Path(folder) / "part", seed=seed).run(show=lambda text: None)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_promise_outlives_kills_under_load_in_start_and_in_stop(part: Part) -> None:
    tally = run(CrashPart, part, seed=SEED)
    assert not tally.failures, f"HICACHE_TEST_SEED={SEED}: {tally.failures}"
    assert tally.kills.total() == part.kills
    assert tally.intact
    assert bool(tally.evicted) is part.is_full
    assert bool(tally.protected) is part.is_full


class TestSabotage:
    """The harness finds what a daemon that breaks its promises would leave behind."""

    @pytest.mark.parametrize(
        ("damage", "seen"),
        [
            (lambda store, path: path.unlink(), "is missing, and nothing was evicted"),
            (lambda store, path: _tear(path), "CORRUPT"),
            (lambda store, path: (store / "unfinished" / "0").write_bytes(b"left"), "an orphan"),
            (lambda store, path: path.with_name("aaaa").write_bytes(bytes(5000)), "no whole object"),
        ],
        ids=["a lost object", "a torn object", "an unfinished file", "a file that is no object"],
    )
    def test_damage_between_a_kill_and_the_start_is_a_failure(
        self, damage: Callable[[Path, Path], object], seen: str
    ) -> None:
        class Sabotaged(CrashPart):
            def _check_medium(self) -> None:
                store = self._folder / "store"
                files = [path for path in (store / "objects").rglob("*") if path.is_file()]
                if files and not self.tally.failures:
                    damage(store, max(files, key=lambda path: path.stat().st_size))
                super()._check_medium()

        part = replace(PARTS[0], backend="file", kills=2)
        assert any(seen in failure for failure in run(Sabotaged, part, seed=1).failures)


def _tear(path: Path) -> None:
    """Change the first byte of the payload."""
    stored = bytearray(path.read_bytes())
    stored[HEADER_BYTES] ^= 0xFF
    path.write_bytes(stored)


def test_objects_differ_by_key_and_at_every_position() -> None:
    objects = ObjectMaker(capacity_bytes=64 << 20)
    key, other = objects.key(0, 1), objects.key(1, 1)
    size_bytes = 5_001
    payload = bytearray(size_bytes)
    objects.write(key, memoryview(payload))
    assert objects.is_payload(key, memoryview(payload))
    assert not objects.is_payload(other, memoryview(payload))
    for position in range(0, size_bytes, 97):
        payload[position] ^= 1
        assert not objects.is_payload(key, memoryview(payload))
        payload[position] ^= 1
    assert len({bytes(payload[at : at + 8]) for at in range(0, size_bytes - 8, 8)}) == size_bytes // 8
