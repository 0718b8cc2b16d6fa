"""Disks, maps and stores that are full: what has to go, and what it costs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.daemon.config import load_config
from hicache.outcome import Outcome
from tests.backends.payloads import key
from tests.backends.small_files import run_limited
from tests.backends.store_rig import CAPACITY_BYTES, KIB, MIB, Rig, fill


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """An object store over files."""
    rig = Rig(tmp_path / "store")
    yield rig
    rig.store.close()


@pytest.mark.parametrize("are_large_old", [True, False])
def test_br_087_mixed_sizes_free_what_is_needed_within_one_object(rig: Rig, are_large_old: bool) -> None:
    large = 512 * KIB - 4 * KIB

    def put_large() -> None:
        for number in range(1000, 1007):
            assert rig.put(number, size=large) == [Outcome.OK]

    def put_small() -> None:
        for number in range(30):
            assert rig.put(number) == [Outcome.OK]

    for step in (put_large, put_small) if are_large_old else (put_small, put_large):
        step()
    rig.put(2000)
    assert rig.store.stats().evictions == 0
    rig.put(2001, size=large)
    stored = rig.store.usage().stored_bytes
    one_object = 512 * KIB if are_large_old else 64 * KIB
    assert CAPACITY_BYTES * 8 // 10 - one_object < stored <= CAPACITY_BYTES * 8 // 10


def test_br_087_an_object_that_cannot_be_deleted_does_not_hold_up_the_others(rig: Rig) -> None:
    fill(rig)
    stuck = frozenset({key(0)})
    rig.faulty.arm("delete", Fault(FaultKind.EIO, keys=stuck))
    assert rig.put(90) == [Outcome.OK]
    assert rig.store.usage().stored_bytes == CAPACITY_BYTES * 8 // 10
    assert rig.present(*range(13)) == [0, 12]
    assert rig.store.stats().eviction_failures == 1
    rig.put(*range(100, 150))
    assert rig.store.stats().eviction_failures <= 2
    assert rig.get(0) is Outcome.OK  # still there, and still known


def test_br_082_a_daemon_without_settings_has_a_cap_and_leaves_the_medium_room(tmp_path: Path) -> None:
    config = load_config(None, {"socket": str(tmp_path / "s.sock")})
    assert 0 < config.capacity_bytes <= 64 << 30
    assert 0 < config.free_space_floor_bytes < config.capacity_bytes
    assert 0 < config.low_watermark < config.high_watermark <= 1


def test_br_082_endless_unique_objects_stay_below_the_cap(rig: Rig) -> None:
    for number in range(0, 1000, 5):  # ten times the capacity
        assert rig.put(*range(number, number + 5)) == [Outcome.OK] * 5
        assert rig.store.usage().stored_bytes <= CAPACITY_BYTES * 9 // 10
    assert rig.present(999) == [999]


def test_br_082_at_the_free_space_floor_the_store_shrinks_and_then_refuses(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(rig, 10)
    floor = 1 << 40
    free = floor + 64 * KIB  # what the rest of the machine leaves
    used_then = rig.files.usage().stored_bytes
    rig.store._evictor._floor_bytes = floor
    monkeypatch.setattr(rig.faulty, "free_bytes", lambda: free + used_then - rig.files.usage().stored_bytes)
    assert rig.put(50) == [Outcome.OK]
    assert rig.put(51) == [Outcome.OK]
    assert rig.store.stats().evictions == 1  # the second one needed the place of another
    free = floor - 100 * MIB
    assert rig.put(52) == [Outcome.NO_SPACE]
    assert rig.get(52) is Outcome.ABSENT


ROOT = Path(__file__).parents[2]


def test_br_086_a_map_that_cannot_get_its_space_is_a_config_error_and_no_signal(tmp_path: Path) -> None:
    body = f"""
for _ in range(2):
    try:
        open_backend("lmdb://{tmp_path}", capacity_bytes=64 << 20)
    except ConfigError as error:
        print(error)
backend = open_backend("lmdb://{tmp_path}", capacity_bytes=4 << 20)
print(put(backend, (key(1), payload(1, 1 << 20))), backend.usage().objects)
backend.close()
"""
    lines = run_limited(32 << 20, body).splitlines()
    assert lines[0].startswith("capacity_bytes = 67108864: expected a capacity that fits")
    assert lines[1] == lines[0] or lines[1].startswith("capacity_bytes = 67108864")
    assert lines[2] == "[<Outcome.OK: 0>] 1"


FULL_DISK = """
import os, sys
from pathlib import Path
from hicache.backends.open import open_backend
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import key, payload, put, get
scheme, root = sys.argv[1], Path(sys.argv[2])
try:
    open_backend(f"{scheme}://{root}/store", capacity_bytes=1 << 30)
except ConfigError as error:
    print("refused", error.setting)
backend = open_backend(f"{scheme}://{root}/store", capacity_bytes=24 << 20)
fd = os.open(root / "filler", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(fd, bytes(1 << 20))
except OSError as error:
    print("disk full", error.errno)
outcomes = [put(backend, (key(number), payload(number, 1 << 20)))[0] for number in range(40)]
print("stored", outcomes.count(Outcome.OK), "refused", outcomes.count(Outcome.NO_SPACE))
stored = [number for number, outcome in enumerate(outcomes) if outcome is Outcome.OK]
print("intact", all(get(backend, key(n), 1 << 20) == (Outcome.OK, payload(n, 1 << 20)) for n in stored))
print("deleted", backend.delete([key(n) for n in stored]).count(Outcome.OK) == len(stored))
survivor = stored[:1] or [1000]
put(backend, (key(survivor[0]), payload(survivor[0], 1 << 20)))
backend.close()
backend = open_backend(f"{scheme}://{root}/store", capacity_bytes=24 << 20)
print("reopened", backend.usage().objects == len(stored[:1]))
os.close(fd)
os.unlink(root / "filler")
print("again", put(backend, (key(99), b"works"))[0].name)
backend.close()
"""


@pytest.mark.parametrize(("scheme", "stored"), [("lmdb", range(24, 25)), ("file", range(1))])
def test_br_086_a_disk_that_others_fill_costs_puts_and_nothing_else(tmp_path: Path, scheme: str, stored: range) -> None:
    """On a tmpfs of 64 MiB of its own; needs user namespaces, or root."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1)")
    flags = "-m" if os.geteuid() == 0 else "-Urm"
    script = f'mount -t tmpfs -o size=64m tmpfs "{tmp_path}" || exit 77; exec "$@"'
    command = ["unshare", flags, "sh", "-c", script, "sh", sys.executable, "-c", FULL_DISK, scheme, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no tmpfs can be mounted here")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["refused capacity_bytes", "disk full 28"]
    assert int(lines[2].split()[1]) in stored
    assert lines[3:] == ["intact True", "deleted True", "reopened True", "again OK"]
