"""No space, at every single call that needs some: an error result, a store and a daemon that live, no space lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench.crash_medium import count_medium
from hicache.backends.base import GetItem, PutItem
from hicache.backends.open import open_store
from hicache.backends.store import ObjectStore
from hicache.errors import HiCacheError
from hicache.outcome import Outcome
from tests.backends.payloads import key, payload
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import DaemonProcess, scrape
from tests.faults.full_disk import NEVER, FullDisk

MIB = 1 << 20
CAPACITY_BYTES = 8 * MIB
SIZES_BYTES = (100, 70_001, MIB)  # one chunk, two, and many
CALLS_MAX = 400  # far more than any of these scenarios makes
BEFORE = 90  # the first number of the objects that are there before
WAYS = {"once": lambda number: range(number, number + 1), "from then on": lambda number: range(number, NEVER)}


@cache
def content_of(number: int) -> bytes:
    """Made once: these tests put the same few objects again and again."""
    return payload(number, SIZES_BYTES[number % len(SIZES_BYTES)])


def opened(backend: str, folder: Path) -> ObjectStore:
    store = open_store(
        f"{backend}://{folder}/store",
        capacity_bytes=CAPACITY_BYTES,
        object_bytes_max=4 * MIB,
        free_space_floor_bytes=0,
    )
    assert isinstance(store, ObjectStore)
    return store


class Expected:
    """What must be in the store by what it said."""

    def __init__(self, store: ObjectStore) -> None:
        self.present: dict[bytes, bytes] = {}
        self.put(store, range(BEFORE, BEFORE + len(SIZES_BYTES)))

    def put(self, store: ObjectStore, numbers: range) -> None:
        objects = [(key(number), content_of(number)) for number in numbers]
        items = [PutItem(name, memoryview(content)) for name, content in objects]
        for (name, content), outcome in zip(objects, store.put(items), strict=True):
            assert outcome in (Outcome.OK, Outcome.NO_SPACE, Outcome.IO_ERROR)
            if outcome is Outcome.OK:
                self.present[name] = content

    def delete(self, store: ObjectStore, name: bytes) -> None:
        (outcome,) = store.delete([name])
        assert outcome in (Outcome.OK, Outcome.ABSENT, Outcome.IO_ERROR)
        if outcome is not Outcome.IO_ERROR:  # absent: it had made room before
            del self.present[name]

    def check(self, store: ObjectStore) -> None:
        """Every acknowledged object is whole unless it made room; what is not there takes no space."""
        evicted = 0
        for name, content in self.present.items():
            found = bytearray(len(content))
            (outcome,) = store.get_into([GetItem(name, memoryview(found))])
            assert outcome in (Outcome.OK, Outcome.ABSENT)
            assert outcome is Outcome.ABSENT or found == content
            evicted += outcome is Outcome.ABSENT
        assert evicted <= store.stats().evictions
        assert store.usage().objects == len(self.present) - evicted


def disturb(store: ObjectStore, expected: Expected) -> None:
    """Everything that writes to an open store."""
    expected.put(store, range(3))
    expected.delete(store, key(BEFORE))
    expected.put(store, range(3, 6))
    expected.delete(store, key(BEFORE + 2))
    store.persist_recency()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_no_space_at_any_call_is_an_outcome_and_takes_none(backend: str, way: str, tmp_path: Path) -> None:
    for number in range(CALLS_MAX):
        folder = tmp_path / str(number)
        store = opened(backend, folder)
        expected = Expected(store)
        with FullDisk(folder, WAYS[way](number)).in_place() as disk:
            disturb(store, expected)
            expected.check(store)
        expected.put(store, range(6, 9))
        expected.check(store)
        store.close()
        store = opened(backend, folder)
        usage = store.usage()
        store.close()
        counted = count_medium(backend, folder / "store")
        assert (counted.objects, counted.stored_bytes) == (usage.objects, usage.stored_bytes)
        assert counted.orphans == ()
        shutil.rmtree(folder)
        if disk.calls <= number:
            assert number > 10, "this counted calls"
            return
    raise AssertionError(f"more than {CALLS_MAX} calls")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_a_daemon_that_finds_no_space_says_so_or_serves_and_the_next_one_has_everything(backend: str, way: str) -> None:
    """Sockets, lock, ready file, marker, and whatever else is written in a start and a stop."""
    with TemporaryDirectory(prefix="hfd-") as name:
        folder = Path(name)
        settings = {"backend": backend, "capacity_bytes": CAPACITY_BYTES, "object_bytes_max": 4 * MIB}
        for number in range(CALLS_MAX):
            with FullDisk(folder, WAYS[way](number)).in_place() as disk, contextlib.suppress(HiCacheError):
                ThreadedDaemon(folder, **settings).stop()
            daemon = ThreadedDaemon(folder, **settings)
            with Client(daemon.target) as client:
                key_of_all = [object_key(1)]
                assert client.put_stream(key_of_all, [payload_of(1, MIB)])[0].is_ok
                assert client.get_stream(key_of_all, [MIB]) == [payload_of(1, MIB)]
            daemon.stop()
            assert {path.name for path in folder.iterdir()} == {"s.sock.lock", "store"}
            if disk.calls <= number:
                assert number > 3, "this counted calls"
                return
    raise AssertionError(f"more than {CALLS_MAX} calls")


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 40 MiB of its own, where that can be had."""
    with TemporaryDirectory(prefix="hsd-") as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def fill(disk: Path, *, left_bytes: int) -> None:
    """Take all space but so much."""
    stat = os.statvfs(disk)
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - left_bytes)


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_a_disk_that_others_fill_stops_no_daemon(backend: str, small_disk: Path) -> None:
    count = 30
    with TemporaryDirectory(prefix="hsd-") as name, contextlib.ExitStack() as running:
        folder = Path(name)

        def start() -> DaemonProcess:
            daemon = DaemonProcess(
                folder,
                backend=backend,
                path=small_disk / "store",
                capacity_bytes=CAPACITY_BYTES,
                object_bytes_max=4 * MIB,
            )
            running.callback(daemon.close)
            return daemon.wait_ready()

        daemon = start()
        with Client(daemon.target) as client, Memory(MIB) as memory:
            region = client.attach(memory).region_id

            def put_one(number: int) -> Outcome:
                memory.bytes[:] = payload_of(number, MIB)
                return client.put(region, [object_key(number)], [0], [MIB])[0]

            assert [put_one(number) for number in range(4)] == [Outcome.OK] * 4
            fill(small_disk, left_bytes=2 * MIB)
            assert [put_one(number) for number in range(4, count)] == [Outcome.OK] * (count - 4), "others make room"
            assert client.delete([object_key(count - 1)]) == [Outcome.OK]
            assert scrape(daemon.ready["http"])["hicache_storage_errors_total"] == 0
        daemon.terminate()
        daemon = start()  # on a disk that is still full
        with Client(daemon.target) as client:
            assert client.present([object_key(number) for number in (count - 2, count - 1)]) == [True, False]
            assert client.get_stream([object_key(count - 2)], [MIB]) == [payload_of(count - 2, MIB)]
            used_bytes = scrape(daemon.ready["http"])["hicache_store_used_bytes"]
        counted = count_medium(backend, small_disk / "store")
        assert (counted.stored_bytes, counted.orphans) == (used_bytes, ())
