"""What LMDB needs beyond the contract: a full map, stuck readers, failing transactions, chunks that are read."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import lmdb
import pytest

from hicache.backends import lmdb_layout, lmdb_store
from hicache.backends.base import GetItem
from hicache.backends.lmdb_env import DELETE_RESERVE_BYTES, SPARE_READERS, LmdbEnvironment, Transaction
from hicache.backends.lmdb_index import Found, Index
from hicache.backends.lmdb_layout import CHUNK_BYTES, ChunkIdArray, decode_record
from hicache.backends.lmdb_slab import SLAB_NAME, Slab
from hicache.backends.lmdb_space import KeyClaims
from hicache.backends.lmdb_store import LmdbBackend
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import fill, get, key, payload, put, scanned

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


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


@pytest.fixture
def small_map(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LmdbBackend]:
    """A store whose index has next to no room to move in."""
    monkeypatch.setattr(lmdb_layout, "MOVING_BYTES_MIN", 1 << 16)
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    yield backend
    backend.close()


def test_an_index_that_takes_nothing_is_told_until_it_does(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)

    def fail(*_: object) -> None:
        raise lmdb.CorruptedError("a page is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "add", fail)
        for number in range(3):
            assert backend.problem() == ""
            assert put(backend, (key(number), b"x")) == [Outcome.IO_ERROR]
        assert backend.problem() == f"{directory} takes no objects: the last 3 could not be written (a page is damaged)"
    assert put(backend, (key(1), b"x")) == [Outcome.OK]
    assert backend.problem() == ""
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


def test_all_space_is_taken_when_the_store_is_opened(backend: LmdbBackend, directory: Path) -> None:
    for name in ("data.mdb", "lock.mdb", SLAB_NAME):
        stat = (directory / name).stat()
        assert stat.st_blocks * 512 >= stat.st_size > 0
    assert (directory / SLAB_NAME).stat().st_size == 16 * MIB


@pytest.mark.parametrize("name", ["data.mdb", SLAB_NAME])
@pytest.mark.parametrize("becomes", ["gone", "empty"])
def test_a_store_that_lost_a_file_starts_empty_and_is_another_one(
    directory: Path, name: str, becomes: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who remembers what was in the one before must not look for it in this one."""
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (key(1), payload(1, MIB)))
    before = backend.store_id
    backend.close()
    if becomes == "gone":
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(b"")
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    try:
        assert f"starts empty: there is no {name}, or nothing in it" in caplog.text
        assert backend.store_id != before
        assert backend.usage().objects == 0
        assert put(backend, (key(1), payload(1, MIB))) == [Outcome.OK]
    finally:
        backend.close()


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


def test_a_get_that_meets_the_end_of_the_store_says_that_it_is_closed(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = Index.find

    def find_and_close(index: Index, keys: Sequence[bytes]) -> list[Found | None]:
        found = find(index, keys)
        backend.close()
        return found

    put(backend, (key(1), payload(1, MIB)))
    monkeypatch.setattr(Index, "find", find_and_close)
    with pytest.raises(BackendError, match="closed"):
        get(backend, key(1), MIB)


def test_a_put_behind_a_stuck_one_of_the_same_key_ends(backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_store, "CLAIM_WAIT_S", 0.0)
    write = Slab.write
    second: list[list[Outcome]] = []

    def put_again(slab: Slab, name: bytes, content: memoryview, chunk_ids: ChunkIdArray) -> int:
        monkeypatch.setattr(Slab, "write", write)
        second.append(put(backend, (key(1), payload(1, MIB))))
        return write(slab, name, content, chunk_ids)

    monkeypatch.setattr(Slab, "write", put_again)
    assert put(backend, (key(1), payload(1, MIB))) == [Outcome.OK]
    assert second == [[Outcome.IO_ERROR]]
    assert get(backend, key(1), MIB) == (Outcome.OK, payload(1, MIB))


@pytest.mark.parametrize("count", [1, 24])
def test_large_batches_come_back_whole_although_threads_share_them(backend: LmdbBackend, count: int) -> None:
    size_bytes = 15 * MIB // count // 7 * 7
    contents = [payload(number, size_bytes) for number in range(count)]
    assert put(backend, *((key(number), content) for number, content in enumerate(contents))) == [Outcome.OK] * count
    targets = [memoryview(bytearray(size_bytes)) for _ in range(count)]
    items = [GetItem(key(number), target) for number, target in enumerate(targets)]
    assert backend.get_into(items) == [Outcome.OK] * count
    assert [bytes(target) for target in targets] == contents
    assert backend.usage().objects == count


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
