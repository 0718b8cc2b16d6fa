"""What LMDB needs beyond the contract: a full map, stuck readers, damaged records, power loss."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import lmdb
import msgspec
import pytest

from hicache.backends import lmdb_layout
from hicache.backends.base import GetItem
from hicache.backends.lmdb_env import DELETE_RESERVE_BYTES, SPARE_READERS, LmdbEnvironment, Transaction
from hicache.backends.lmdb_index import Found, Index
from hicache.backends.lmdb_layout import CHUNK_BYTES, ChunkIdArray, decode_record
from hicache.backends.lmdb_slab import SLAB_NAME, Slab
from hicache.backends.lmdb_space import KeyClaims
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.marker import MARKER_NAME, StoreMarker, write_marker
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put, scanned
from tests.backends.test_lmdb_contract import open_raw

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(directory: Path) -> Iterator[LmdbBackend]:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    yield backend
    backend.close()


def marker_of(directory: Path) -> StoreMarker:
    return msgspec.json.decode((directory / MARKER_NAME).read_bytes(), type=StoreMarker)


@contextmanager
def foreign_reader(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process with an open snapshot."""
    command = [sys.executable, "-m", "tests.backends.reader_process", str(directory)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("reading")
        yield process
    finally:
        process.kill()
        process.communicate()


def fill(backend: LmdbBackend, numbers: range) -> list[int]:
    """Put objects of 1 MiB until there is no space; returns which were stored."""
    stored = []
    for number in numbers:
        outcome = put(backend, (key(number), payload(number, MIB)))[0]
        if outcome is not Outcome.OK:
            assert outcome is Outcome.NO_SPACE
            break
        stored.append(number)
    return stored


@pytest.fixture
def small_map(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LmdbBackend]:
    """A store whose index has next to no room to move in."""
    monkeypatch.setattr(lmdb_layout, "MOVING_BYTES_MIN", 1 << 16)
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    yield backend
    backend.close()


def test_br_083_deletes_work_in_a_full_map_that_a_stuck_reader_pins_and_puts_after_it_left(
    small_map: LmdbBackend, directory: Path
) -> None:
    backend = small_map
    stored = fill(backend, range(100))
    with foreign_reader(directory):
        refused = False
        for number in range(1000, 3000):  # each pass moves pages that the reader keeps from being used again
            assert backend.delete([key(stored.pop(0))]) == [Outcome.OK]
            if put(backend, (key(number), payload(number, MIB))) == [Outcome.NO_SPACE]:
                refused = True
                break
            stored.append(number)
        assert refused, "the map never became full"
        for number in stored:
            assert get(backend, key(number), MIB) == (Outcome.OK, payload(number, MIB))
        while stored:
            assert backend.delete([key(stored.pop())]) == [Outcome.OK]
        assert backend.usage().stored_bytes == 0
        assert put(backend, (key(1), payload(1, MIB))) == [Outcome.NO_SPACE]
        assert backend.usage().stored_bytes == 0, "what was not stored holds no chunks"
    assert put(backend, (key(1), payload(1, MIB))) == [Outcome.OK]
    assert len(fill(backend, range(2, 100))) == 15


def test_a_delete_in_a_full_map_uses_the_reserve_and_returns_it(
    small_map: LmdbBackend, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = small_map
    stored = fill(backend, range(100))
    size_bytes = (directory / "data.mdb").stat().st_size
    lent: list[int] = []
    lend = LmdbEnvironment._lend

    def count_and_lend(env: LmdbEnvironment, map_bytes: int) -> None:
        lent.append(map_bytes)
        lend(env, map_bytes)

    monkeypatch.setattr(LmdbEnvironment, "_lend", count_and_lend)
    with foreign_reader(directory):
        with pytest.raises(lmdb.MapFullError):
            _exhaust(backend)
        for number in stored:
            assert backend.delete([key(number)]) == [Outcome.OK]
    assert lent, "the reserve was not needed"
    assert (directory / "data.mdb").stat().st_size <= size_bytes + DELETE_RESERVE_BYTES
    assert put(backend, (key(1), payload(1, MIB))) == [Outcome.OK]


def _exhaust(backend: LmdbBackend) -> None:
    """Use every page of the map, none of which the reader lets go."""
    env = backend._files.env
    while True:
        with env.write() as txn:
            txn.put(b"junk", bytes(300), db=env.index)
            txn.delete(b"junk", db=env.index)


def test_br_080_a_damaged_index_record_is_removed_when_the_store_is_opened(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (key(1), payload(1, MIB)), (key(2), payload(2, MIB)))
    backend.close()
    _change_record(directory, key(1), lambda raw: raw[:9] + bytes([raw[9] ^ 1]) + raw[10:])
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert backend.contains([key(1), key(2)]) == [False, True]
    assert backend.usage().stored_bytes == backend.stored_bytes(MIB)
    backend.close()


def test_br_080_a_record_damaged_while_the_store_is_open_is_corrupt_and_dropped(backend: LmdbBackend) -> None:
    put(backend, (key(1), payload(1, 1000)))
    with backend._files.env.write() as txn:
        txn.put(key(1), b"no record", db=backend._files.env.index)
    assert get(backend, key(1), 1000)[0] is Outcome.CORRUPT
    assert backend.contains([key(1)]) == [False]
    assert backend.usage().objects == 0


def test_two_records_that_claim_one_chunk_lose_the_second(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (b"a", payload(1, MIB)), (b"b", payload(2, MIB)))
    backend.close()
    with open_raw(directory) as env, env.begin(write=True) as txn:
        index = env.open_db(b"index", txn=txn)
        first = decode_record(b"a", txn.get(b"a", b"", db=index))
        assert first is not None
        txn.put(b"b", first.encode(b"b"), db=index)
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert backend.contains([b"a", b"b"]) == [True, False]
    assert get(backend, b"a", MIB) == (Outcome.OK, payload(1, MIB))
    assert backend.usage().objects == 1
    backend.close()


def _change_record(directory: Path, name: bytes, change: object) -> None:
    with open_raw(directory) as env, env.begin(write=True) as txn:
        index = env.open_db(b"index", txn=txn)
        raw = txn.get(name, b"", db=index)
        txn.put(name, change(raw), db=index)  # type: ignore[operator]  # a lambda


def test_a_store_left_open_in_an_earlier_boot_starts_empty_with_another_id(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (key(1), payload(1, 1000)))
    running = marker_of(directory)
    backend.close()
    assert not running.is_clean
    write_marker(directory, msgspec.structs.replace(running, boot_id="another boot"))
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert backend.usage().objects == 0
    assert backend.store_id.hex() != running.store_id
    assert put(backend, (key(1), payload(1, 1000))) == [Outcome.OK]
    backend.close()


def test_a_store_closed_in_an_earlier_boot_keeps_its_content(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (key(1), payload(1, 1000)))
    backend.close()
    closed = marker_of(directory)
    assert closed.is_clean
    write_marker(directory, msgspec.structs.replace(closed, boot_id="another boot"))
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert get(backend, key(1), 1000) == (Outcome.OK, payload(1, 1000))
    backend.close()


INTERRUPTED_OPENING = """
import os, resource, signal, sys
from pathlib import Path
from hicache.backends import lmdb_load, lmdb_open, lmdb_store
from hicache.errors import BackendError
how, directory = sys.argv[1], Path(sys.argv[2])
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def no_memory(*_): raise MemoryError
if how == "killed before the map is opened":
    lmdb_open.LmdbEnvironment = die
elif how == "killed while the index is read":
    lmdb_load.record_check = die
elif how == "no memory for the index":
    lmdb_load.record_check = no_memory
elif how == "no address space":
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
try:
    lmdb_store.LmdbBackend.open(directory, capacity_bytes=(2 << 30) if how == "no address space" else (16 << 20))
except BackendError as error:
    print(error)
    sys.exit(9)
"""


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize(
    ("how", "exit_code"),
    [
        ("killed before the map is opened", -9),
        ("killed while the index is read", -9),
        ("no memory for the index", 9),
        ("no address space", 9),
    ],
)
def test_an_opening_that_is_interrupted_again_and_again_changes_nothing(
    directory: Path, how: str, exit_code: int, is_clean: bool
) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (key(1), payload(1, 1000)))
    running = marker_of(directory)
    backend.close()
    if not is_clean:
        write_marker(directory, running)
    before = marker_of(directory)
    assert before.is_clean == is_clean
    for _ in range(4):
        command = [sys.executable, "-c", INTERRUPTED_OPENING, how, str(directory)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == exit_code, done.stderr
        if exit_code == 9:
            assert "nothing stored was touched" in done.stdout
            assert "remove" not in done.stdout, "the store is in order: to empty it is no advice"
    assert marker_of(directory) == before, "a reboot after it costs nothing either"
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert get(backend, key(1), 1000) == (Outcome.OK, payload(1, 1000))
    assert backend.store_id.hex() == before.store_id
    assert not marker_of(directory).is_clean
    backend.close()


def test_a_marker_of_an_earlier_build_with_a_field_more_is_read(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (key(1), payload(1, 1000)))
    backend.close()
    fields = msgspec.json.decode((directory / MARKER_NAME).read_bytes())
    (directory / MARKER_NAME).write_bytes(msgspec.json.encode({**fields, "open_attempts": 3}).ljust(512))
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert backend.usage().objects == 1
    backend.close()


def test_a_file_that_is_no_lmdb_map_is_a_backend_error_that_names_the_way_out(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    backend.close()
    data = directory / "data.mdb"
    garbage = b"garbage" * 10_000
    data.write_bytes(garbage)
    for _ in range(4):
        with pytest.raises(BackendError, match=f"LMDB cannot open .*to give it up and start empty, remove {data}"):
            LmdbBackend.open(directory, capacity_bytes=16 * MIB)
        assert data.read_bytes()[: len(garbage)] == garbage
    data.unlink()
    emptied = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert emptied.store_id != backend.store_id, "the content was lost"
    assert put(emptied, (key(1), b"works")) == [Outcome.OK]
    emptied.close()


def test_a_store_in_which_damaged_records_are_removed_is_in_use_before_that(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (b"a", b"good"), (b"b", b"damaged"))
    backend.close()
    _change_record(directory, b"b", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]))
    seen: list[bool] = []
    write = LmdbEnvironment.write

    def watched(env: LmdbEnvironment) -> AbstractContextManager[Transaction]:
        seen.append(marker_of(directory).is_clean)
        return write(env)

    monkeypatch.setattr(LmdbEnvironment, "write", watched)
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert seen == [False]
    assert backend.contains([b"a", b"b"]) == [True, False]
    backend.close()


def test_a_capacity_that_does_not_fit_never_costs_the_content(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (key(1), payload(1, 1000)))
    backend.close()
    with pytest.raises(ConfigError, match="capacity_bytes"):
        LmdbBackend.open(directory, capacity_bytes=1 << 47)
    assert marker_of(directory).is_clean
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert get(backend, key(1), 1000) == (Outcome.OK, payload(1, 1000))
    backend.close()


def test_the_first_scan_of_an_unchanged_store_reads_no_index_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, *[(key(number), payload(number, 100 + number)) for number in range(5)])
    told = sorted(scanned(backend), key=lambda stored: stored.key)
    backend.close()
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "records", None)
        assert sorted(scanned(backend), key=lambda stored: stored.key) == told
    assert sorted(scanned(backend), key=lambda stored: stored.key) == told, "the second one reads"
    backend.close()


@pytest.mark.parametrize("change", ["put", "delete", "touch"])
def test_the_first_scan_of_a_changed_store_tells_the_change(directory: Path, change: str) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (key(1), b"x"))
    backend.close()
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    if change == "put":
        put(backend, (key(2), b"y"))
    elif change == "delete":
        backend.delete([key(1)])
    else:
        backend.touch([(key(1), 5.0)])
    told = {stored.key: stored.used_at_s for stored in scanned(backend)}
    assert set(told) == {"put": {key(1), key(2)}, "delete": set(), "touch": {key(1)}}[change]
    assert (told.get(key(1)) == 5.0) == (change == "touch")
    backend.close()


def test_all_space_is_taken_when_the_store_is_opened(backend: LmdbBackend, directory: Path) -> None:
    for name in ("data.mdb", "lock.mdb", SLAB_NAME):
        stat = (directory / name).stat()
        assert stat.st_blocks * 512 >= stat.st_size > 0
    assert (directory / SLAB_NAME).stat().st_size == 16 * MIB


def test_chunks_of_deleted_objects_are_written_again_first(backend: LmdbBackend) -> None:
    put(backend, *[(key(number), payload(number, MIB)) for number in range(4)])
    before = chunks_of(backend, key(2))
    backend.delete([key(0)])
    backend.delete([key(2)])
    put(backend, (key(10), payload(10, MIB)))
    assert chunks_of(backend, key(10)) == before


def chunks_of(backend: LmdbBackend, name: bytes) -> list[int]:
    with backend._files.env.read() as txn:
        record = decode_record(name, bytes(txn.get(name, b"", db=backend._files.env.index)))
    assert record is not None
    return record.chunk_ids.tolist()


@pytest.mark.parametrize("capacity_bytes", [0, CHUNK_BYTES - 1, 1 << 60])
def test_a_capacity_that_no_store_can_have_is_a_config_error(directory: Path, capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        LmdbBackend.open(directory, capacity_bytes=capacity_bytes)


def test_an_object_that_is_deleted_and_whose_space_is_filled_again_while_it_is_read_is_read_whole(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = payload(1, 15 * MIB)
    put(backend, (key(1), content))
    find = Index.find

    def find_and_delete(index: Index, keys: Sequence[bytes]) -> list[Found | None]:
        found = find(index, keys)
        assert backend.delete(keys) == [Outcome.OK]
        assert len(fill(backend, range(2, 30))) == 1, "only the space that nobody reads"
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Index, "find", find_and_delete)
        assert get(backend, key(1), len(content)) == (Outcome.OK, content)
    assert get(backend, key(1), len(content))[0] is Outcome.ABSENT
    assert len(fill(backend, range(30, 60))) == 15


def test_a_store_closes_after_the_put_that_is_in_progress(
    backend: LmdbBackend, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the put would go on in chunks that the next process to open the store gives to others."""
    closing = threading.Thread(target=backend.close)
    write, shut, is_shutting = Slab.write, KeyClaims.shut, threading.Event()

    def write_late(slab: Slab, name: bytes, content: memoryview, chunk_ids: ChunkIdArray) -> int:
        closing.start()
        assert is_shutting.wait(20.0)
        return write(slab, name, content, chunk_ids)

    def shut_heard(claims: KeyClaims, *, timeout_s: float) -> bool:
        is_shutting.set()
        return shut(claims, timeout_s=timeout_s)

    monkeypatch.setattr(Slab, "write", write_late)
    monkeypatch.setattr(KeyClaims, "shut", shut_heard)
    assert put(backend, (key(1), payload(1, MIB))) == [Outcome.OK]
    closing.join()
    with pytest.raises(BackendError, match="closed"):
        put(backend, (key(2), payload(2, MIB)))
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert get(backend, key(1), MIB) == (Outcome.OK, payload(1, MIB))
    backend.close()


def test_reads_leave_no_reader_slots_behind(backend: LmdbBackend) -> None:
    put(backend, (key(1), b"x"))
    for _ in range(3):
        threads = [threading.Thread(target=read_often, args=(backend,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert backend._files.env.reader_slots() <= SPARE_READERS


def read_often(backend: LmdbBackend) -> None:
    for _ in range(100):
        assert get(backend, key(1), 1) == (Outcome.OK, b"x")


def test_reader_slots_of_killed_processes_are_free_after_the_next_opening(directory: Path) -> None:
    LmdbBackend.open(directory, capacity_bytes=16 * MIB).close()
    for _ in range(3):
        with foreign_reader(directory):
            pass  # killed while it reads
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert backend._files.env.reader_slots() <= SPARE_READERS
    assert put(backend, (key(1), b"x")) == [Outcome.OK]
    backend.close()


class FailingTransactions:
    """Lets the write, or read, transactions with certain numbers end in an error of the medium."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Transaction]], *failing: int) -> None:
        self.begin = begin
        self.failing = failing
        self.count = 0

    @contextmanager
    def __call__(self) -> Iterator[Transaction]:
        self.count += 1
        with self.begin() as txn:
            yield txn
            if self.count - 1 in self.failing:
                raise lmdb.DiskError("no such luck", 5)


def test_a_put_whose_transaction_fails_leaves_no_trace(backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = [(key(1), payload(1, 1000)), (key(2), payload(2, 5 * MIB)), (key(3), payload(3, 1000))]
    for failing in ("read", "write"):
        with monkeypatch.context() as patch:
            begin = getattr(backend._files.env, failing)
            patch.setattr(backend._files.env, failing, FailingTransactions(begin, 0))
            assert put(backend, *objects) == [Outcome.IO_ERROR] * 3
        assert backend.contains([name for name, _ in objects]) == [False] * 3
        assert (backend.usage().objects, backend.usage().stored_bytes) == (0, 0)
    assert put(backend, *objects) == [Outcome.OK] * 3
    for name, content in objects:
        assert get(backend, name, len(content)) == (Outcome.OK, content)


def test_errors_of_the_medium_are_outcomes_and_drop_nothing(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, (key(1), b"still there"))
    with monkeypatch.context() as patch:
        patch.setattr(backend._files.env, "write", FailingTransactions(backend._files.env.write, 0, 1))
        patch.setattr(backend._files.env, "read", FailingTransactions(backend._files.env.read, 0, 1, 2))
        assert backend.delete([key(1)]) == [Outcome.IO_ERROR]
        backend.touch([(key(1), 5.0)])
        target = bytearray(11)
        assert backend.get_into([GetItem(key(1), memoryview(target))]) == [Outcome.IO_ERROR]
        assert backend.contains([key(1)]) == [False]
        with pytest.raises(BackendError, match="cannot be read"):
            scanned(backend)
    assert get(backend, key(1), 11) == (Outcome.OK, b"still there")
    assert backend.usage().objects == 1
    assert [stored.used_at_s > 5.0 for stored in scanned(backend)] == [True]


def test_a_scan_crosses_the_bounds_of_its_batches(backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.backends.lmdb_index.KEYS_PER_TRANSACTION", 4)
    for count in (0, 1, 4, 5, 8, 9):
        put(backend, *[(key(number), b"x") for number in range(count)])
        assert {stored.key for stored in scanned(backend)} == {key(number) for number in range(count)}


def test_a_larger_capacity_is_used_at_once_and_all_of_it_is_on_the_disk(backend: LmdbBackend, directory: Path) -> None:
    stored = fill(backend, range(40))
    backend.resize(32 * MIB, floor_bytes=0)
    assert backend.usage().capacity_bytes == 32 * MIB
    slab = (directory / SLAB_NAME).stat()
    assert slab.st_blocks * 512 >= slab.st_size == 32 * MIB
    stored += fill(backend, range(100, 140))
    assert len(stored) == 32
    for number in stored:
        assert get(backend, key(number), MIB) == (Outcome.OK, payload(number, MIB))


def test_a_smaller_capacity_moves_what_is_stored_and_gives_the_space_back(
    backend: LmdbBackend, directory: Path
) -> None:
    stored = fill(backend, range(40))
    with pytest.raises(BackendError, match="delete first"):
        backend.resize(8 * MIB, floor_bytes=0)
    assert backend.usage().capacity_bytes == 16 * MIB
    gone, kept = stored[:8], stored[8:]
    backend.delete([key(number) for number in gone])
    backend.resize(8 * MIB, floor_bytes=0)
    assert (directory / SLAB_NAME).stat().st_size == 8 * MIB
    for number in kept:
        assert get(backend, key(number), MIB) == (Outcome.OK, payload(number, MIB))
    assert put(backend, (key(99), b"x")) == [Outcome.NO_SPACE]
    backend.close()
    backend = LmdbBackend.open(directory, capacity_bytes=8 * MIB)
    for number in kept:
        assert get(backend, key(number), MIB) == (Outcome.OK, payload(number, MIB))
    backend.close()


def test_a_store_that_is_read_and_written_meanwhile_is_resized(backend: LmdbBackend) -> None:
    put(backend, *[(key(number), payload(number, MIB)) for number in range(4)])
    stop = threading.Event()
    failures: list[str] = []

    def work(seed: int) -> None:
        number = 1000 * seed
        while not stop.is_set():
            number += 1
            if put(backend, (key(number), payload(number, MIB))) != [Outcome.OK]:
                failures.append(f"put {number}")
            if get(backend, key(number), MIB) != (Outcome.OK, payload(number, MIB)):
                failures.append(f"get {number}")
            if get(backend, key(number % 4), MIB) != (Outcome.OK, payload(number % 4, MIB)):
                failures.append(f"old object in {number}")
            backend.delete([key(number)])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        for capacity_bytes in (32, 7, 20, 7, 16):
            backend.resize(capacity_bytes * MIB, floor_bytes=0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert backend.usage().stored_bytes == 4 * MIB


def test_a_capacity_that_the_disk_does_not_have_is_refused_and_nothing_changes(
    backend: LmdbBackend, directory: Path
) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        backend.resize(1 << 47, floor_bytes=0)
    assert (directory / SLAB_NAME).stat().st_size == 16 * MIB
    assert backend.usage().capacity_bytes == 16 * MIB
    assert len(fill(backend, range(40))) == 16


@pytest.mark.parametrize("full_at", ["slab", "index"])
def test_a_disk_that_is_full_in_the_middle_of_a_resize_leaves_the_old_size(
    backend: LmdbBackend, directory: Path, monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        if full_at == "slab":
            patch.setattr(os, "posix_fallocate", no_space)
        else:
            patch.setattr(LmdbEnvironment, "_enlarge", no_space)
        with pytest.raises((ConfigError, OSError)):
            backend.resize(3 << 30, floor_bytes=0)
    assert (directory / SLAB_NAME).stat().st_size == 16 * MIB
    assert len(fill(backend, range(40))) == 16


def test_an_index_that_cannot_be_read_in_a_resize_leaves_the_old_capacity(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = fill(backend, range(40))
    backend.delete([key(number) for number in stored[:8]])

    def unreadable(_: Index) -> Iterator[object]:
        raise lmdb.Error("unreadable")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "records", unreadable)
        with pytest.raises(BackendError, match="unreadable"):
            backend.resize(8 * MIB, floor_bytes=0)
    assert backend.usage().capacity_bytes == 16 * MIB
    assert len(fill(backend, range(100, 140))) == 8, "all that is free, also behind the smaller capacity"
    backend.resize(32 * MIB, floor_bytes=0)
    assert len(fill(backend, range(200, 240))) == 16


RESIZE_UNTIL_KILLED = """
import sys
from pathlib import Path
from hicache.backends.lmdb_store import LmdbBackend
backend = LmdbBackend.open(Path(sys.argv[1]), capacity_bytes=16 << 20)
print("resizing", flush=True)
while True:
    for mib in (40, 8, 24, 16):
        backend.resize(mib << 20, floor_bytes=0)
"""


def test_a_resize_that_is_killed_leaves_a_store_that_opens_whole(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    fill(backend, range(16))
    backend.delete([key(number) for number in range(0, 16, 2)])
    backend.close()
    kept = range(1, 16, 2)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", RESIZE_UNTIL_KILLED, str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "resizing\n"
        finally:
            process.kill()
            process.communicate()
        backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
        for number in kept:
            assert get(backend, key(number), MIB) == (Outcome.OK, payload(number, MIB))
        assert backend.usage().stored_bytes == 8 * MIB
        backend.close()
