"""Opening an LMDB store: damaged records, another boot, interrupted openings, and what the first scan tells."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest

from hicache.backends.lmdb_env import LmdbEnvironment, Transaction
from hicache.backends.lmdb_index import Index
from hicache.backends.lmdb_layout import decode_record
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.marker import MARKER_NAME, StoreMarker, write_marker
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put, scanned
from tests.backends.test_lmdb_contract import open_raw

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def marker_of(directory: Path) -> StoreMarker:
    return msgspec.json.decode((directory / MARKER_NAME).read_bytes(), type=StoreMarker)


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


def change_record(directory: Path, name: bytes, change: object) -> None:
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
    change_record(directory, b"b", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]))
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
