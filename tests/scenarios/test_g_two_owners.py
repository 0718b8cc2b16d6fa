"""A store that a daemon has open, and a tool beside it, while the map of the store grows and shrinks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner

from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.offline import make_offline, open_offline
from hicache.backends.open import open_backend
from hicache.cli import cli
from hicache.errors import StorageInUse
from hicache.outcome import Outcome
from tests.backends.payloads import fill, get, key, payload, put, scanned
from tests.client.support import wait_until

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
LOOPS = 1000

TOOL = """
import sys
from pathlib import Path
from hicache.backends.offline import open_offline
from hicache.errors import StorageInUse
refused = 0
for _ in range(int(sys.argv[2])):
    try:
        open_offline(Path(sys.argv[1])).close()
        print("opened", flush=True)
    except StorageInUse as error:
        refused += 1
print(refused, flush=True)
"""

READER = """
import sys, threading
import lmdb
env = lmdb.open(sys.argv[1], readonly=True, max_dbs=3)
index = env.open_db(b"index", create=False)
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
reads = resized = records = 0
print("reading", flush=True)
while not stop.is_set():
    try:
        with env.begin() as txn, txn.cursor(index) as cursor:
            records = sum(1 for _ in cursor)
        reads += 1
    except lmdb.MapResizedError:
        env.set_mapsize(0)
        resized += 1
print(reads, resized, records, flush=True)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process with this code, dead at the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def lines_of(started: subprocess.Popen[str]) -> IO[str]:
    assert started.stdout is not None
    return started.stdout


class Churn:
    """Puts, deletes and resizes of a daemon, in turn, until it is stopped. What must be there is checked at the end."""

    def __init__(self, backend: LmdbBackend) -> None:
        self._backend = backend
        self._stop = threading.Event()
        self.rounds = 0
        self._errors: list[BaseException] = []
        self._present: set[int] = set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._round()
        except BaseException as error:
            self._errors.append(error)

    def _round(self) -> None:
        first = 100 * self.rounds
        self._backend.resize(24 * MIB, floor_bytes=0)
        self._present |= set(fill(self._backend, range(first, first + 100)))
        assert len(self._present) == 24
        gone = sorted(self._present)[:14]
        assert self._backend.delete([key(number) for number in gone]) == [Outcome.OK] * 14
        self._present -= set(gone)
        self._backend.resize(12 * MIB, floor_bytes=0)
        self.rounds += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self._errors == []
        require_just(self._backend, self._present)


def require_just(backend: LmdbBackend, numbers: set[int]) -> None:
    """These objects and no others, each read and compared, and the space of no others taken."""
    assert {stored.key for stored in scanned(backend)} == {key(number) for number in numbers}
    for number in numbers:
        assert get(backend, key(number), MIB) == (Outcome.OK, payload(number, MIB))
    assert backend.usage().stored_bytes == len(numbers) * MIB


def test_br_089_a_tool_is_refused_however_often_it_tries_while_the_daemon_resizes(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=12 * MIB)
    churn = Churn(backend)
    with process(TOOL, directory, LOOPS) as tool:
        assert lines_of(tool).readline() == f"{LOOPS}\n", "it was let in"
    churn.stop()
    assert churn.rounds > 0
    backend.close()
    with open_offline_as(directory) as store:  # the positive control: nobody has it any more
        assert store.usage().objects == 10


@contextmanager
def open_offline_as(directory: Path) -> Iterator[object]:
    store = open_offline(directory)
    try:
        yield store
    finally:
        store.close()


def test_br_089_a_daemon_does_not_start_on_what_a_tool_has_open_and_then_finds_all_of_it(directory: Path) -> None:
    store = make_offline(directory, "lmdb", capacity_bytes=12 * MIB)
    assert put(store, (key(1), payload(1, MIB))) == [Outcome.OK]  # type: ignore[arg-type]  # same calls
    code = """
import sys
from hicache.backends.open import open_backend
try:
    open_backend(sys.argv[1], capacity_bytes=24 << 20)
except Exception as error:
    print(type(error).__name__, error)
"""
    with process(code, f"lmdb://{directory}") as other:
        told = lines_of(other).readline()
        assert told.startswith("StorageInUse")
        assert f"pid {os.getpid()} " in told
    store.close()
    backend = open_backend(f"lmdb://{directory}", capacity_bytes=24 * MIB)
    assert get(backend, key(1), MIB) == (Outcome.OK, payload(1, MIB))
    assert len(fill(backend, range(2, 100))) == 23
    backend.close()
    with open_offline_as(directory):
        pass


@pytest.mark.parametrize("words", [["verify"], ["export", "00000000", "--out", "{}/out"]], ids=lambda words: words[0])
def test_br_089_verbs_on_the_directory_of_a_running_store_name_the_process_that_has_it(
    directory: Path, tmp_path: Path, words: list[str]
) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=12 * MIB)
    put(backend, (key(1), payload(1, MIB)))
    done = CliRunner().invoke(cli, [*(word.format(tmp_path) for word in words), "--path", str(directory)])
    assert isinstance(done.exception, StorageInUse)
    assert f"pid {os.getpid()} " in str(done.exception)
    assert get(backend, key(1), MIB) == (Outcome.OK, payload(1, MIB))
    backend.close()
    if words == ["verify"]:  # the positive control
        done = CliRunner().invoke(cli, ["verify", "--path", str(directory), "--json", "-"])
        assert done.exit_code == 0
        assert json.loads(done.stdout)["objects"] == 1


def test_br_089_a_foreign_reader_sees_the_map_grow_and_costs_nothing_but_room(directory: Path) -> None:
    """As mdb_stat and mdb_copy do: read-only, past our lock, one short snapshot after the other."""
    backend = LmdbBackend.open(directory, capacity_bytes=12 * MIB)
    put(backend, (key(0), b"x"))
    backend.delete([key(0)])
    with process(READER, directory) as reader:
        assert lines_of(reader).readline() == "reading\n"
        before_bytes = (directory / "data.mdb").stat().st_size
        churn = Churn(backend)
        wait_until(lambda: churn.rounds >= 5)
        churn.stop()
        assert reader.stdin is not None
        reader.stdin.write("stop\n")
        reader.stdin.flush()
        reads, _, _ = map(int, lines_of(reader).readline().split())
    assert reads > 0
    assert (directory / "data.mdb").stat().st_size > before_bytes
    backend.close()
    backend = LmdbBackend.open(directory, capacity_bytes=12 * MIB)
    assert backend.usage().objects == 10
    backend.close()
