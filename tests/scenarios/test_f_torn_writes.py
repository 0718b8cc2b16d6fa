"""Writes that fail or are cut short, bytes that changed, and many who write the same."""

from __future__ import annotations

import errno
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from hicache.backends.file_settings import FileSettings
from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_env import DATA_NAME
from hicache.backends.lmdb_slab import SLAB_NAME
from hicache.backends.lmdb_store import LmdbBackend
from hicache.outcome import Outcome
from tests.backends.file_faults import BlockingCalls, CountedCalls, FailingCalls
from tests.backends.payloads import fill, get, key, payload, put
from tests.backends.small_files import run_limited
from tests.backends.tampering import files_under
from tests.backends.test_file_store import CAPACITY_BYTES, MIB
from tests.backends.test_lmdb_opening import change_record
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import DaemonProcess, scrape
from tests.daemon.test_faults import KEYS, PAGE


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the store of a test is made."""
    return tmp_path / "store"


@pytest.fixture
def calls() -> FailingCalls:
    return FailingCalls()


@pytest.fixture
def files(directory: Path, calls: FailingCalls) -> Iterator[FileBackend]:
    backend = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES, calls=calls)
    yield backend
    calls.arm("", 0)
    backend.close()


@pytest.fixture
def lmdb_store(directory: Path) -> Iterator[LmdbBackend]:
    backend = LmdbBackend.open(directory, capacity_bytes=16 << 20)
    yield backend
    backend.close()


def test_br_074_a_file_that_cannot_grow_is_no_space_and_leaves_no_trace(tmp_path: Path) -> None:
    body = f"""
backend = open_backend("file://{tmp_path}", capacity_bytes=64 << 20)
print(put(backend, (key(1), payload(1, 3 << 20)), (key(2), payload(2, 1 << 20))))
print(backend.usage().objects, get(backend, key(1), 3 << 20)[0], get(backend, key(2), 1 << 20)[0])
backend.close()
"""
    lines = run_limited(2 << 20, body).splitlines()
    assert lines[0] == "[<Outcome.NO_SPACE: 6>, <Outcome.OK: 0>]"
    assert lines[1] == "1 2 0"
    files = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert len(files) == 1
    assert list((tmp_path / "unfinished").iterdir()) == []


BACKENDS = [FileSettings(), FileSettings(fsync=True), FileSettings(shared=True)]


@pytest.mark.parametrize("settings", BACKENDS, ids=["alone", "fsync", "shared"])
@pytest.mark.parametrize("is_recycled", [False, True], ids=["new", "recycled"])
@pytest.mark.parametrize(
    ("error", "outcome"),
    [(errno.EIO, Outcome.IO_ERROR), (errno.ENOSPC, Outcome.NO_SPACE), (errno.EDQUOT, Outcome.NO_SPACE)],
)
def test_br_074_a_put_that_fails_at_any_call_leaves_no_trace(
    directory: Path, settings: FileSettings, is_recycled: bool, error: int, outcome: Outcome
) -> None:
    calls = CountedCalls()
    content = payload(1, 3 << 20)  # three segments and the header are four writes
    for at in count():
        backend = FileBackend.open(directory / str(at), capacity_bytes=CAPACITY_BYTES, settings=settings, calls=calls)
        if is_recycled:
            put(backend, (key(1), content))
            backend.delete([key(1)])
        calls.made.clear()
        calls.at, calls.error = at, error
        outcomes = put(backend, (key(1), content))
        calls.at = None
        if outcomes == [Outcome.OK]:
            assert at == len(calls.made)
            backend.close()
            break
        _require_no_trace(backend, directory / str(at), outcomes == [outcome], is_recycled)
        assert put(backend, (key(1), content)) == [Outcome.OK]
        assert get(backend, key(1), len(content)) == (Outcome.OK, content)
        backend.close()
        shutil.rmtree(directory / str(at))
    assert at >= 7


def _require_no_trace(backend: FileBackend, directory: Path, is_expected: bool, is_recycled: bool) -> None:
    assert is_expected
    assert backend.usage().objects == backend.usage().stored_bytes == 0
    assert backend.contains([key(1)]) == [False]
    assert files_under(directory / "objects") == []
    left = [path for path in files_under(directory / "unfinished") if path.suffix != ".alive"]
    assert sum(path.stat().st_size for path in left) == backend.spares.total_bytes + 4096 * len(left)


@pytest.mark.parametrize("at", range(4))
def test_br_074_a_short_write_is_completed(files: FileBackend, calls: FailingCalls, at: int) -> None:
    content = payload(1, 3 << 20)
    calls.arm("write", at, is_short=True)
    assert put(files, (key(1), content)) == [Outcome.OK]
    assert get(files, key(1), len(content)) == (Outcome.OK, content)


def test_br_078_an_object_is_absent_until_it_is_complete_and_readers_block_no_writer(directory: Path) -> None:
    calls = BlockingCalls("write")
    backend = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES, calls=calls)
    content = payload(1, 3 * MIB)
    writer = threading.Thread(target=put, args=(backend, (key(1), content)))
    writer.start()
    assert calls.is_midway.wait(timeout=30)
    for _ in range(10):
        assert backend.contains([key(1)]) == [False]
        assert get(backend, key(1), len(content))[0] is Outcome.ABSENT
    calls.go_on.set()
    writer.join(timeout=30)
    assert get(backend, key(1), len(content)) == (Outcome.OK, content)
    backend.close()


Start = Callable[..., DaemonProcess]


def damage(folder: Path, payload: bytes, change: Callable[[bytes], bytes]) -> None:
    """Finds a piece of ``payload`` in the files below ``folder``, and replaces it by ``change(piece)``."""
    piece = payload[1000:3000]
    for path in folder.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(piece)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(change(piece))
            return
    raise AssertionError(f"the payload is in no file below {folder}")


@pytest.mark.parametrize("backend", ["lmdb", "file"])
@pytest.mark.parametrize(
    "change",
    [lambda piece: bytes([piece[0] ^ 1]) + piece[1:], lambda piece: bytes(len(piece))],
    ids=["one bit", "zeroed"],
)
def test_br_076_rotten_bytes_are_a_counted_miss_and_are_removed(
    start: Start, folder: Path, backend: str, change: Callable[[bytes], bytes]
) -> None:
    payloads = [random.Random(number).randbytes(PAGE) for number in range(4)]
    daemon = start(backend=backend)
    with Client(daemon.target) as client:
        assert client.put_stream(KEYS, payloads) == [Outcome.OK] * 4
    daemon.terminate()
    damage(folder / "store", payloads[1], change)

    daemon = start(backend=backend)
    with Client(daemon.target) as client, Memory(4 * PAGE) as memory:
        region = client.attach(memory).region_id
        outcomes = client.get(region, KEYS, [n * PAGE for n in range(4)], [PAGE] * 4)
        assert outcomes == [Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.OK]
        assert scrape(daemon.ready["http"])['hicache_store_removed_objects_total{reason="corrupt"}'] == 1
        assert client.present(KEYS) == [True, False, True, True]
        assert client.put_stream(KEYS[1:2], payloads[1:2]) == [Outcome.OK]
        assert client.get_stream(KEYS[1:2], [PAGE]) == [payloads[1]]


def test_br_076_objects_that_changed_places_are_misses(start: Start, folder: Path) -> None:
    payloads = [random.Random(number).randbytes(PAGE) for number in range(2)]
    daemon = start(backend="file")
    with Client(daemon.target) as client:
        client.put_stream(KEYS[:2], payloads)
    daemon.terminate()
    holding = [
        next(path for path in (folder / "store").rglob("*") if path.is_file() and payload in path.read_bytes())
        for payload in payloads
    ]
    first, second = (path.read_bytes() for path in holding)
    holding[0].write_bytes(second)
    holding[1].write_bytes(first)

    daemon = start(backend="file")
    with Client(daemon.target) as client:
        results = client.get_stream(KEYS[:2], [PAGE] * 2)
        assert not set(results) & {Outcome.OK, *payloads}
        assert client.present(KEYS[:2]) == [False, False]


def test_br_077_many_clients_putting_the_same_pages_all_succeed_and_write_once(daemon: ThreadedDaemon) -> None:
    pages, clients = 50, 12
    keys = [object_key(number) for number in range(pages)]
    size = 4096

    def put_all(seed: int) -> list[Outcome]:
        order = random.Random(seed).sample(range(pages), pages)
        with Client(daemon.target) as client, Memory(pages * size) as memory:
            region = client.attach(memory).region_id
            for number in range(pages):
                memory.bytes[number * size : (number + 1) * size] = payload_of(number, size)
            return client.put(region, [keys[n] for n in order], [n * size for n in order], [size] * pages)

    with ThreadPoolExecutor(clients) as pool:
        outcomes = [outcome for result in pool.map(put_all, range(clients)) for outcome in result]

    assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS}
    assert outcomes.count(Outcome.OK) == pages
    assert scrape(daemon.ready.http)["hicache_store_written_bytes_total"] == pages * size
    assert daemon.metric("hicache_storage_errors_total") == 0
    with Client(daemon.target) as client:
        assert client.get_stream(keys, [size] * pages) == [payload_of(number, size) for number in range(pages)]


def test_br_077_a_key_that_is_twice_in_one_batch_is_stored_once(client: Client, memory: Memory) -> None:
    region = client.attach(memory).region_id
    memory.bytes[:16] = b"first...second.."
    outcomes = client.put(region, [KEYS[0], KEYS[0]], [0, 8], [8, 8])
    assert outcomes == [Outcome.OK, Outcome.EXISTS]
    assert client.put_stream([KEYS[1], KEYS[1]], [b"same", b"same"]) == [Outcome.OK, Outcome.EXISTS]
    assert client.get_stream([KEYS[0]], [8]) == [b"first..."]


@pytest.mark.parametrize("removed", [DATA_NAME, SLAB_NAME])
def test_br_080_a_store_of_which_one_half_is_gone_starts_empty_and_takes_again_all_it_can(
    directory: Path, removed: str
) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=4 * MIB)
    assert len(fill(backend, range(10))) == 4
    before = backend.store_id
    backend.close()
    (directory / removed).unlink()
    for start in range(2):
        backend = LmdbBackend.open(directory, capacity_bytes=4 * MIB)
        assert backend.store_id != before, "its content was lost"
        assert backend.usage().objects == 4 * start
        assert [get(backend, key(number), MIB)[0] for number in range(4)] == [Outcome.ABSENT] * 4
        if start == 0:
            assert len(fill(backend, range(20, 30))) == 4
        assert get(backend, key(20), MIB) == (Outcome.OK, payload(20, MIB))
        assert backend.usage().stored_bytes == 4 * MIB
        backend.close()


def test_br_080_a_damaged_index_record_is_removed_when_the_store_is_opened(directory: Path) -> None:
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    put(backend, (key(1), payload(1, MIB)), (key(2), payload(2, MIB)))
    backend.close()
    change_record(directory, key(1), lambda raw: raw[:9] + bytes([raw[9] ^ 1]) + raw[10:])
    backend = LmdbBackend.open(directory, capacity_bytes=16 * MIB)
    assert backend.contains([key(1), key(2)]) == [False, True]
    assert backend.usage().stored_bytes == backend.stored_bytes(MIB)
    backend.close()


def test_br_080_a_record_damaged_while_the_store_is_open_is_corrupt_and_dropped(lmdb_store: LmdbBackend) -> None:
    put(lmdb_store, (key(1), payload(1, 1000)))
    with lmdb_store._files.env.write() as txn:
        txn.put(key(1), b"no record", db=lmdb_store._files.env.index)
    assert get(lmdb_store, key(1), 1000)[0] is Outcome.CORRUPT
    assert lmdb_store.contains([key(1)]) == [False]
    assert lmdb_store.usage().objects == 0
