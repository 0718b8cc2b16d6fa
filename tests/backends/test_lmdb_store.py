"""What LMDB needs beyond the contract: a full map, stuck readers, damaged records, power loss."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import lmdb
import msgspec
import pytest

from hicache.backends.base import GetItem
from hicache.backends.lmdb_env import DELETE_RESERVE_BYTES, LmdbEnvironment, Transaction
from hicache.backends.lmdb_layout import CHUNK_BYTES, CHUNK_STORED_BYTES, decode_record
from hicache.backends.lmdb_store import PUT_TRANSACTION_BYTES, LmdbBackend
from hicache.backends.marker import MARKER_NAME, StoreMarker, write_marker
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put
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


def test_br_083_deletes_work_in_a_full_map_that_a_stuck_reader_pins_and_puts_after_it_left(
    backend: LmdbBackend, directory: Path
) -> None:
    stored = fill(backend, range(100))
    with foreign_reader(directory):
        refused = False
        for number in range(1000, 1200):  # each pass moves pages that the reader keeps from being used again
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
    assert put(backend, (key(1), payload(1, MIB))) == [Outcome.OK]
    assert len(fill(backend, range(2, 100))) >= 10


def test_a_delete_in_a_full_map_uses_the_reserve_and_returns_it(
    backend: LmdbBackend, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = fill(backend, range(100))
    size_bytes = (directory / "data.mdb").stat().st_size
    grown: list[int] = []
    grow = LmdbEnvironment._grow

    def count_and_grow(env: LmdbEnvironment, map_bytes: int) -> None:
        grown.append(map_bytes)
        grow(env, map_bytes)

    monkeypatch.setattr(LmdbEnvironment, "_grow", count_and_grow)
    with foreign_reader(directory):
        backend.touch([(key(stored[0]), 1.0)])
        with pytest.raises(lmdb.MapFullError):
            _exhaust(backend)
        for number in stored:
            assert backend.delete([key(number)]) == [Outcome.OK]
    assert grown, "the reserve was not needed"
    assert (directory / "data.mdb").stat().st_size <= size_bytes + DELETE_RESERVE_BYTES
    _remove_junk(backend)
    assert put(backend, (key(1), payload(1, MIB))) == [Outcome.OK]


def _remove_junk(backend: LmdbBackend) -> None:
    env = backend._env

    def remove(txn: Transaction) -> None:
        with txn.cursor(env.index) as cursor:
            while cursor.set_range(b"junk") and bytes(cursor.key()).startswith(b"junk"):
                txn.delete(bytes(cursor.key()), db=env.index)

    env.write_with_reserve(remove)


def _exhaust(backend: LmdbBackend) -> None:
    """Use every page of the map: first large runs, then single pages, none of which the reader lets go."""
    env = backend._env
    for size in (CHUNK_BYTES, 3000):
        for number in range(100_000):
            try:
                with env.write() as txn:
                    for offset in range(8):
                        txn.put(f"junk {size} {number % 50} {offset}".encode(), bytes(size), db=env.index)
            except lmdb.MapFullError:
                if size == 3000:
                    raise
                break


def test_br_080_an_object_with_a_missing_chunk_is_dropped_and_counted_once(
    backend: LmdbBackend, directory: Path
) -> None:
    put(backend, (key(1), payload(1, MIB)))
    with backend._env.write() as txn, txn.cursor(backend._env.chunks) as cursor:
        assert cursor.first()
        txn.delete(bytes(cursor.key()), db=backend._env.chunks)
    assert get(backend, key(1), MIB)[0] is Outcome.CORRUPT
    assert get(backend, key(1), MIB)[0] is Outcome.ABSENT
    assert backend.usage().stored_bytes == 0
    assert put(backend, (key(1), payload(1, MIB))) == [Outcome.OK]


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
    with backend._env.write() as txn:
        txn.put(key(1), b"no record", db=backend._env.index)
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
from hicache.backends import lmdb_open, lmdb_store
from hicache.errors import BackendError
how, directory = sys.argv[1], Path(sys.argv[2])
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def no_memory(*_): raise MemoryError
if how == "killed before the map is opened":
    lmdb_open.LmdbEnvironment = die
elif how == "killed while the index is read":
    lmdb_open.decode_record = die
elif how == "no memory for the index":
    lmdb_open.decode_record = no_memory
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
    told = sorted(backend.scan(), key=lambda stored: stored.key)
    backend.close()
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_scan_batch", None)
        assert sorted(backend.scan(), key=lambda stored: stored.key) == told
    assert sorted(backend.scan(), key=lambda stored: stored.key) == told, "the second one reads"
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
    told = {stored.key: stored.used_at_s for stored in backend.scan()}
    assert set(told) == {"put": {key(1), key(2)}, "delete": set(), "touch": {key(1)}}[change]
    assert (told.get(key(1)) == 5.0) == (change == "touch")
    backend.close()


def test_all_space_is_taken_when_the_store_is_opened(backend: LmdbBackend, directory: Path) -> None:
    for name in ("data.mdb", "lock.mdb"):
        stat = (directory / name).stat()
        assert stat.st_blocks * 512 >= stat.st_size > 0
    assert (directory / "data.mdb").stat().st_size > 16 * MIB


def test_an_object_that_spans_many_transactions_appears_whole(backend: LmdbBackend) -> None:
    size = 3 * PUT_TRANSACTION_BYTES + 12_345
    outcomes = put(backend, (key(1), b"before"), (key(2), payload(2, size)), (key(3), b"after"))
    assert outcomes == [Outcome.OK] * 3
    assert get(backend, key(2), size) == (Outcome.OK, payload(2, size))
    assert get(backend, key(3), 5) == (Outcome.OK, b"after")


def test_chunks_of_deleted_objects_are_written_again_before_new_ones(backend: LmdbBackend) -> None:
    def chunks() -> int:
        with backend._env.read() as txn:
            return int(txn.stat(backend._env.chunks)["entries"])

    put(backend, *[(key(number), payload(number, MIB)) for number in range(4)])
    before = chunks()
    backend.delete([key(0), key(2)])
    put(backend, *[(key(number), payload(number, MIB)) for number in range(10, 12)])
    assert chunks() == before


@pytest.mark.parametrize("capacity_bytes", [0, CHUNK_STORED_BYTES - 1, 1 << 60])
def test_a_capacity_that_no_store_can_have_is_a_config_error(directory: Path, capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        LmdbBackend.open(directory, capacity_bytes=capacity_bytes)


def test_a_get_of_a_large_batch_uses_several_snapshots(backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.backends.lmdb_store.READ_TRANSACTION_BYTES", 2 * MIB)
    objects = [(key(number), payload(number, MIB)) for number in range(7)]
    put(backend, *objects)
    targets = [bytearray(MIB) for _ in objects]
    items = [GetItem(name, memoryview(target)) for (name, _), target in zip(objects, targets, strict=True)]
    assert backend.get_into(items) == [Outcome.OK] * 7
    assert [bytes(target) for target in targets] == [content for _, content in objects]


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


@pytest.mark.parametrize("failing", range(4))
def test_a_put_whose_transaction_fails_leaves_no_trace_and_spoils_no_other(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    size = 2 * PUT_TRANSACTION_BYTES + 5 * MIB // 2
    objects = [(key(1), payload(1, 1000)), (key(2), payload(2, size)), (key(3), payload(3, 1000))]
    with monkeypatch.context() as patch:
        patch.setattr(backend._env, "write", FailingTransactions(backend._env.write, failing))
        outcomes = put(backend, *objects)
    assert set(outcomes) == ({Outcome.OK, Outcome.IO_ERROR} if failing < 3 else {Outcome.OK})
    present = backend.contains([name for name, _ in objects])
    assert present == [outcome is Outcome.OK for outcome in outcomes]
    usage = backend.usage()
    kept = [len(content) for (_, content), is_there in zip(objects, present, strict=True) if is_there]
    assert (usage.objects, usage.payload_bytes) == (len(kept), sum(kept))
    assert usage.stored_bytes == sum(map(backend.stored_bytes, kept))
    assert [outcome.is_ok for outcome in put(backend, *objects)] == [True] * 3
    for name, content in objects:
        assert get(backend, name, len(content)) == (Outcome.OK, content)


def test_errors_of_the_medium_are_outcomes_and_drop_nothing(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, (key(1), b"still there"))
    with monkeypatch.context() as patch:
        patch.setattr(backend._env, "write", FailingTransactions(backend._env.write, 0, 1))
        patch.setattr(backend._env, "read", FailingTransactions(backend._env.read, 0, 1, 2))
        assert backend.delete([key(1)]) == [Outcome.IO_ERROR]
        backend.touch([(key(1), 5.0)])
        target = bytearray(11)
        assert backend.get_into([GetItem(key(1), memoryview(target))]) == [Outcome.OK]  # read before the error
        assert backend.contains([key(1)]) == [False]
        with pytest.raises(BackendError, match="cannot be read"):
            list(backend.scan())
    assert get(backend, key(1), 11) == (Outcome.OK, b"still there")
    assert backend.usage().objects == 1
    assert [stored.used_at_s > 5.0 for stored in backend.scan()] == [True]


def test_a_scan_crosses_the_bounds_of_its_batches(backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.backends.lmdb_store.KEYS_PER_TRANSACTION", 4)
    for count in (0, 1, 4, 5, 8, 9):
        put(backend, *[(key(number), b"x") for number in range(count)])
        assert {stored.key for stored in backend.scan()} == {key(number) for number in range(count)}
