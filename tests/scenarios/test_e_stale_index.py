"""What is left of a store or an engine that ended, or whose weights changed: counted, found again, or gone."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from hicache.backends.file_calls import FileCalls
from hicache.backends.file_layout import object_path
from hicache.backends.file_store import FileBackend
from hicache.backends.file_writer import WriterFolder, remove_dead_writers
from hicache.outcome import Outcome
from tests.backends.payloads import TENANT, get, key, put
from tests.backends.store_rig import CAPACITY_BYTES, Rig, fill
from tests.backends.tampering import files_under
from tests.backends.test_file_store import files_of
from tests.core.memory_l3 import Objects
from tests.core.small_engine import HYBRID, PAGE, Make, prompt
from tests.core.test_cache_write import DEADLINE_S
from tests.core.test_spec import spec_of
from tests.daemon.client import Client
from tests.daemon.raw_links import object_key, payload_of
from tests.daemon.rig import TOKEN, DaemonProcess, scrape, tenants_file
from tests.scenarios.scale import TIMEOUT_S, at_scale

KILLS, CLIENTS = at_scale(2, 50), at_scale(8, 100)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the store of a test is made."""
    return tmp_path / "store"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """An object store over files."""
    rig = Rig(tmp_path / "store")
    yield rig
    rig.store.close()


def disk_bytes(folder: Path) -> int:
    """What the files below take, as du counts it."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_br_061_a_daemon_that_was_killed_knows_what_it_has_before_it_is_ready_and_keeps_to_its_cap(
    start: Callable[..., DaemonProcess], folder: Path, backend: str
) -> None:
    capacity_bytes, page_bytes = 64 << 20, 1 << 20
    settings = {"backend": backend, "capacity_bytes": capacity_bytes, "tenants_file": tenants_file(folder)}

    def put_pages(target: str, numbers: range) -> None:
        with Client(target, token=TOKEN) as client:
            for number in numbers:
                outcomes = client.put_stream([object_key(number)], [payload_of(number, page_bytes)])
                assert outcomes == [Outcome.OK]

    daemon = start(**settings)
    taken_bytes = capacity_bytes if backend == "lmdb" else 0
    overhead_bytes = disk_bytes(folder / "store") - taken_bytes
    put_pages(daemon.target, range(48))  # three quarters
    names = ["hicache_store_used_bytes", "hicache_store_objects", 'hicache_tenant_used_bytes{tenant="alice"}']
    told = scrape(daemon.ready["http"])
    before = [told[name] for name in names]
    assert before[0] >= 48 * page_bytes
    daemon.kill()

    daemon = start(**settings)
    told = scrape(daemon.ready["http"])
    assert [told[name] for name in names] == before
    if backend == "file":
        assert disk_bytes(folder / "store") == pytest.approx(before[0], abs=overhead_bytes + 48 * 4096)
    for numbers in (range(48, 60), range(60, 72)):  # half as much again
        put_pages(daemon.target, numbers)
        assert disk_bytes(folder / "store") <= capacity_bytes + overhead_bytes + 8 * 4096
        assert scrape(daemon.ready["http"])["hicache_store_used_bytes"] <= capacity_bytes
    with Client(daemon.target, token=TOKEN) as client:
        assert client.get_stream([object_key(71)], [page_bytes]) == [payload_of(71, page_bytes)]
        present = client.present([object_key(number) for number in range(72)])
    assert present == sorted(present), "the oldest went first, across the kill"
    assert not present[0]


def test_br_061_a_restart_keeps_usage_tenants_and_the_order_of_use(rig: Rig) -> None:
    fill(rig)
    rig.clock.now_s = 4_000_000_000.0
    rig.store.lookup([key(3)])
    usage, tenants = rig.store.usage(), rig.store.tenant_usage(TENANT)
    rig.store.close()
    rig.open()
    assert rig.store.usage() == usage
    assert rig.store.tenant_usage(TENANT) == tenants
    assert rig.put(90) == [Outcome.OK]
    assert rig.present(3) == [3]
    assert rig.store.usage().stored_bytes <= CAPACITY_BYTES * 9 // 10


def unfinished_in(store: Path) -> list[Path]:
    return [path for path in (store / "unfinished").rglob("*") if path.is_file() and path.suffix != ".alive"]


def store_many(target: str, first: int, stored: threading.Semaphore) -> None:
    """Until the daemon is gone."""
    with contextlib.suppress(grpc.RpcError, OSError), Client(target) as client:
        for number in range(first, first + 1000):
            client.put_stream([object_key(number)], [payload_of(number, 4 << 20)])
            stored.release()


@pytest.mark.timeout(TIMEOUT_S)
def test_br_063_a_daemon_killed_amid_many_stores_removes_what_it_left_tells_how_much_and_counts_the_rest(
    start: Callable[..., DaemonProcess], folder: Path
) -> None:
    settings = {"backend": "file", "capacity_bytes": 1 << 30, "io_threads": 8, "sessions_max": 2 * CLIENTS}
    daemon = start(**settings)
    for kill in range(KILLS):
        stored = threading.Semaphore(0)
        threads = [
            threading.Thread(target=store_many, args=(daemon.target, 1000 * (CLIENTS * kill + client), stored))
            for client in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for _ in range(CLIENTS):
            assert stored.acquire(timeout=60)
        daemon.kill()
        for thread in threads:
            thread.join(60)
        (folder / "store/unfinished/1-dead").mkdir()  # in case that nothing was being written just then
        (folder / "store/unfinished/1-dead/0").write_bytes(bytes(50_000))
        (folder / "store/unfinished/1-dead.alive").touch()
        left = len(unfinished_in(folder / "store"))
        daemon = start(**settings)
        told = scrape(daemon.ready["http"])
        assert told["hicache_file_orphans_removed_total"] == left >= 1
        assert unfinished_in(folder / "store") == []
        slack_bytes = 4096 * (told["hicache_store_objects"] + 300)
        assert disk_bytes(folder / "store/objects") == pytest.approx(told["hicache_store_used_bytes"], abs=slack_bytes)


def test_br_063_unfinished_files_of_dead_writers_go_and_those_of_live_ones_stay(directory: Path) -> None:
    unfinished = directory / "unfinished"
    unfinished.mkdir(parents=True)
    live = WriterFolder(unfinished, FileCalls())
    Path(live.new_path()).write_bytes(b"half an object")
    for number in range(3):
        (unfinished / "4711-dead").mkdir(exist_ok=True)
        (unfinished / "4711-dead" / str(number)).write_bytes(b"half an object")
    (unfinished / "4711-dead.alive").touch()
    (unfinished / "4712-dead.alive").touch()  # killed before it had a folder
    assert remove_dead_writers(unfinished) == 3
    assert [path.name for path in files_under(unfinished) if path.suffix != ".alive"] == ["0"]
    live.close()
    live.close()
    assert list(unfinished.iterdir()) == []


def test_br_063_opening_a_store_removes_orphans_and_counts_them(directory: Path) -> None:
    FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES).close()
    (directory / "unfinished" / "1-dead").mkdir(parents=True)
    (directory / "unfinished" / "1-dead" / "0").write_bytes(bytes(50_000))
    (directory / "unfinished" / "1-dead.alive").touch()
    backend = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES)
    assert backend.orphans_removed == 1
    assert files_of(directory) == []
    assert backend.usage().stored_bytes == 0
    backend.close()


def test_br_066_a_file_of_another_format_is_corrupt_and_dropped(directory: Path) -> None:
    backend = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES)
    put(backend, (key(1), b"ours"))
    with open(object_path(str(directory / "objects"), key(1)), "r+b") as file:
        file.write(b"HICACHE9")
    assert get(backend, key(1), 4)[0] is Outcome.CORRUPT
    assert backend.contains([key(1)]) == [False]
    backend.close()


def test_br_062_engines_of_another_revision_share_nothing(make: Make) -> None:
    objects: Objects = {}
    writer = make(objects=objects, revision="v1")
    writer.serve(prompt(4))
    writer.settle()
    assert make(objects=objects, revision="v2").serve(prompt(4)).tokens == 0
    assert make(objects=objects, revision="v1").serve(prompt(4)).tokens == 4 * PAGE


@pytest.mark.parametrize("field", ["model", "revision"])
def test_br_062_another_model_or_another_revision_of_its_weights_is_another_namespace(field: str) -> None:
    assert dataclasses.replace(spec_of(), **{field: "v2"}).namespace != spec_of().namespace


@pytest.mark.parametrize("outcome", [Outcome.NO_SPACE, Outcome.REFUSED, Outcome.UNAVAILABLE, Outcome.IO_ERROR])
def test_br_073_a_flush_that_l3_refuses_says_so_loses_nothing_and_can_be_done_again(
    outcome: Outcome, make: Make
) -> None:
    engine = make(objects={}, write_policy="write_back")
    assert engine.l3 is not None
    engine.serve(prompt(4))
    engine.l3.fault = lambda operation, key: outcome if operation == "put" else None
    assert not engine.cache.flush(timeout_s=DEADLINE_S)
    assert engine.l3.objects == {}
    assert engine.cache.stats.tokens_lost == {}
    assert engine.serve(prompt(4)).tokens == 4 * PAGE
    engine.l3.fault = lambda operation, key: None
    assert engine.cache.flush(timeout_s=DEADLINE_S)
    assert len(engine.l3.objects) == 4 * len(HYBRID)


def test_br_073_a_flush_and_a_close_end_at_their_deadline_whatever_l3_does(make: Make) -> None:
    engine = make(objects={}, write_policy="write_back")
    assert engine.l3 is not None
    engine.serve(prompt(4))
    engine.l3.gates["put"].clear()
    assert not engine.cache.flush(timeout_s=0.05)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(engine.cache.close, flush_timeout_s=0.05).result(DEADLINE_S)
    assert engine.l3.objects == {}
