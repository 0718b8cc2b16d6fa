"""An index that disagrees with the payloads, and how much of a store is read before it serves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.backends.base import Backend
from hicache.backends.file_calls import FileCalls
from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_env import DATA_NAME
from hicache.backends.lmdb_slab import SLAB_NAME, Slab
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.open import open_backend
from hicache.backends.store import ObjectStore
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put, scanned

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
EARLIER, LATER = range(10), range(10, 20)


def content(number: int) -> bytes:
    return payload(number, 200_000 + number)


def put_all(backend: Backend, numbers: range) -> None:
    assert set(put(backend, *[(key(number), content(number)) for number in numbers])) == {Outcome.OK}


def outcomes_of(backend: Backend, numbers: range) -> set[Outcome]:
    """Of gets; what is OK has been compared."""
    found = set()
    for number in numbers:
        outcome, got = get(backend, key(number), len(content(number)))
        assert outcome is not Outcome.OK or got == content(number), f"wrong bytes for {number}"
        found.add(outcome)
    return found


@pytest.mark.parametrize(
    ("rolled_back", "earlier", "later"),
    [
        (SLAB_NAME, {Outcome.ABSENT}, {Outcome.CORRUPT}),  # the index is newer than the payloads
        (DATA_NAME, {Outcome.CORRUPT}, {Outcome.ABSENT}),  # and older
    ],
)
def test_br_081_an_index_of_another_moment_than_the_payloads_gives_misses_and_no_wrong_bytes(
    tmp_path: Path, rolled_back: str, earlier: set[Outcome], later: set[Outcome]
) -> None:
    """The places of the earlier objects were given to the later ones in between."""
    directory = tmp_path / "store"
    backend = LmdbBackend.open(directory, capacity_bytes=4 * MIB)
    put_all(backend, EARLIER)
    assert outcomes_of(backend, EARLIER) == {Outcome.OK}
    backend.close()
    shutil.copy(directory / rolled_back, tmp_path / "copy")
    backend = LmdbBackend.open(directory, capacity_bytes=4 * MIB)
    assert backend.delete([key(number) for number in EARLIER]) == [Outcome.OK] * 10
    put_all(backend, LATER)
    backend.close()
    shutil.copy(tmp_path / "copy", directory / rolled_back)
    backend = LmdbBackend.open(directory, capacity_bytes=4 * MIB)
    assert backend.usage().objects == 10
    assert outcomes_of(backend, EARLIER) == earlier
    assert outcomes_of(backend, LATER) == later
    assert backend.usage().objects == backend.usage().stored_bytes == 0, "what did not verify is gone"
    for numbers in (EARLIER, LATER):
        put_all(backend, numbers)
        assert outcomes_of(backend, numbers) == {Outcome.OK}
        backend.delete([key(number) for number in numbers])
    backend.close()


KILLED_IN_A_CHANGE = """
import contextlib, os, signal, sys
from hicache.backends.lmdb_env import LmdbEnvironment
from hicache.backends.lmdb_store import LmdbBackend
from tests.backends.payloads import key, put
from tests.scenarios.test_f_index import EARLIER, LATER, Path, content, put_all
moment, change, directory = sys.argv[1:]
backend = LmdbBackend.open(Path(directory), capacity_bytes=16 << 20)
put_all(backend, EARLIER)
backend.touch([(key(n), 5.0) for n in EARLIER])
def die(): os.kill(os.getpid(), signal.SIGKILL)
write = LmdbEnvironment.write
@contextlib.contextmanager
def dying(env):
    with write(env) as txn:
        yield txn
        if moment == "before the commit": die()
    die()
LmdbEnvironment.write = dying
if change == "put": put(backend, *[(key(n), content(n)) for n in LATER])
elif change == "delete": backend.delete([key(n) for n in EARLIER])
else: backend.touch([(key(n), 7.0) for n in EARLIER])
"""


@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
@pytest.mark.parametrize("change", ["put", "delete", "touch"])
def test_br_081_a_kill_in_a_change_of_the_index_leaves_all_of_it_or_nothing(
    tmp_path: Path, change: str, moment: str
) -> None:
    command = [sys.executable, "-c", KILLED_IN_A_CHANGE, moment, change, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    backend = LmdbBackend.open(tmp_path / "store", capacity_bytes=16 * MIB)
    is_done = moment == "after the commit"
    assert outcomes_of(backend, EARLIER) == {Outcome.ABSENT if change == "delete" and is_done else Outcome.OK}
    assert outcomes_of(backend, LATER) == {Outcome.OK if change == "put" and is_done else Outcome.ABSENT}
    told = scanned(backend)
    assert {stored.used_at_s for stored in told if change == "touch"} <= {7.0 if is_done else 5.0}
    usage = backend.usage()
    assert usage.objects == len(told)
    assert usage.stored_bytes == sum(backend.stored_bytes(stored.size_bytes) for stored in told)
    backend.delete([stored.key for stored in told])
    assert len(fill_whole(backend)) == 16, "no chunk is lost"
    backend.close()


def fill_whole(backend: Backend) -> list[int]:
    numbers = []
    while put(backend, (key(1000 + len(numbers)), bytes(MIB))) == [Outcome.OK]:
        numbers.append(len(numbers))
    return numbers


class CountedOpens(FileCalls):
    """Counts the files that are opened for reading."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open(self, path: str) -> int:
        self.opened.append(path)
        return super().open(path)

    def open_direct(self, path: str) -> int:
        self.opened.append(path)
        return super().open_direct(path)


@pytest.fixture
def payload_reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Keys whose payloads are read from a slab."""
    reads: list[bytes] = []
    read = Slab.read

    def counted(slab: Slab, name: bytes, target: memoryview, chunk_ids: object) -> int:
        reads.append(name)
        return read(slab, name, target, chunk_ids)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(Slab, "read", counted)
    return reads


def test_br_081_lmdb_is_ready_without_reading_a_payload_and_checks_each_when_it_is_asked_for(
    tmp_path: Path, payload_reads: list[bytes]
) -> None:
    backend = open_backend(f"lmdb://{tmp_path}/store", capacity_bytes=16 * MIB)
    put_all(backend, EARLIER)
    backend.close()
    store = ObjectStore(
        open_backend(f"lmdb://{tmp_path}/store", capacity_bytes=16 * MIB),
        object_bytes_max=MIB,
        free_space_floor_bytes=0,
    )
    assert store.usage().objects == 10
    assert store.lookup([key(number) for number in EARLIER])[0] == [Outcome.OK] * 10
    assert payload_reads == []
    assert get(store, key(3), len(content(3))) == (Outcome.OK, content(3))  # type: ignore[arg-type]  # same calls
    assert payload_reads == [key(3)]
    store.close()


def test_br_081_files_are_ready_without_opening_an_object(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    backend = FileBackend.open(directory, capacity_bytes=16 * MIB)
    put_all(backend, EARLIER)
    backend.close()
    calls = CountedOpens()
    backend = FileBackend.open(directory, capacity_bytes=16 * MIB, calls=calls)
    store = ObjectStore(backend, object_bytes_max=MIB, free_space_floor_bytes=0)
    assert store.usage().objects == 10
    assert store.lookup([key(number) for number in EARLIER])[0] == [Outcome.OK] * 10
    assert calls.opened == []
    assert get(store, key(3), len(content(3))) == (Outcome.OK, content(3))  # type: ignore[arg-type]
    assert len(calls.opened) == 1
    store.close()
