"""What is left when a process that writes to a store is killed with SIGKILL at an arbitrary moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from hicache.backends.base import Backend
from hicache.backends.file_layout import stored_bytes_of
from hicache.backends.open import open_backend
from hicache.errors import StorageInUse
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put, scanned
from tests.backends.tampering import files_under

CAPACITY_BYTES = 48 << 20
KILLS = int(os.environ.get("HICACHE_TEST_KILLS", "3"))


class Survivors:
    """What must be there, by what the killed processes said."""

    def __init__(self) -> None:
        self.objects: dict[bytes, tuple[int, int]] = {}  # number and size

    def hear(self, line: str) -> None:
        match line.split():
            case ["stored", name, number, size]:
                self.objects[bytes.fromhex(name)] = int(number), int(size)
            case ["deleting", name]:
                self.objects.pop(bytes.fromhex(name), None)


@pytest.mark.parametrize("scheme", ["lmdb", "file"])
def test_br_039_br_063_everything_acknowledged_survives_kills_and_nothing_else_is_left(
    scheme: str, tmp_path: Path
) -> None:
    url = f"{scheme}://{tmp_path / 'store'}"
    survivors = Survivors()
    for seed in range(KILLS):
        _run_until_killed(url, seed, survivors, lines=Random(seed).randrange(20, 150))
        backend = open_backend(url, capacity_bytes=CAPACITY_BYTES)
        try:
            _require_intact(backend, survivors)
            _require_exact_usage(backend)
            if scheme == "file":
                _require_no_orphans(tmp_path / "store", backend)
            assert backend.delete([key(-1)]) in ([Outcome.OK], [Outcome.ABSENT])
            assert put(backend, (key(-1), b"the store works")) in ([Outcome.OK], [Outcome.NO_SPACE])
        finally:
            backend.close()


def test_a_store_that_another_process_holds_names_it_until_it_is_killed(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path / 'store'}"
    process = _start(url, seed=1)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("opened")
        with pytest.raises(StorageInUse, match=rf"pid {process.pid} \(.*churn_process"):
            open_backend(url, capacity_bytes=CAPACITY_BYTES)
    finally:
        process.kill()
        process.communicate()
    open_backend(url, capacity_bytes=CAPACITY_BYTES).close()


def _run_until_killed(url: str, seed: int, survivors: Survivors, *, lines: int) -> None:
    process = _start(url, seed)
    try:
        assert process.stdout is not None
        for _ in range(lines):
            line = process.stdout.readline()
            assert line, "the process ended by itself"
            survivors.hear(line)
    finally:
        process.kill()  # in the middle of whatever it does next
    rest, _ = process.communicate()
    for line in rest.splitlines():
        survivors.hear(line)


def _start(url: str, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.backends.churn_process", url, str(CAPACITY_BYTES), str(seed)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)


def _require_intact(backend: Backend, survivors: Survivors) -> None:
    for name, (number, size) in survivors.objects.items():
        outcome, content = get(backend, name, size)
        assert (outcome, content == payload(number, size)) == (Outcome.OK, True), f"object {number} of {size} bytes"


def _require_exact_usage(backend: Backend) -> None:
    """What usage tells is what scan finds, and all of that verifies."""
    told = scanned(backend)
    for stored in told:
        assert get(backend, stored.key, stored.size_bytes)[0] is Outcome.OK
    usage = backend.usage()
    assert usage.objects == len(told)
    assert usage.payload_bytes == sum(stored.size_bytes for stored in told)
    assert usage.stored_bytes == sum(backend.stored_bytes(stored.size_bytes) for stored in told)


def _require_no_orphans(directory: Path, backend: Backend) -> None:
    unfinished = [path for path in files_under(directory / "unfinished") if path.suffix != ".alive"]
    assert unfinished == []
    on_disk = sum(stored_bytes_of(path.stat().st_size - 4096) for path in files_under(directory / "objects"))
    assert on_disk == backend.usage().stored_bytes
