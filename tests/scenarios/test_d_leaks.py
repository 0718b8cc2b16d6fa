"""Leaks: reader slots, memory of the index, streams and copies that were given up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import lmdb
import psutil
import pytest

from hicache.backends import lmdb_layout
from hicache.backends.faulty import Fault, FaultKind
from hicache.backends.lmdb_env import READER_SLOTS, SPARE_READERS
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.store import OBJECTS_MAX
from hicache.errors import HandleError
from hicache.outcome import Outcome
from hicache.slots import SlotPool, slot_of
from hicache.wire.bulk import BulkKind
from tests.backends.payloads import get, key, payload, put
from tests.daemon.client import DESCRIPTOR, Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import CALL_S, Bulk, Memory, object_key, payload_of
from tests.daemon.rig import DaemonProcess, scrape, wait_until
from tests.scenarios.scale import TIMEOUT_S, at_scale

Start = Callable[..., DaemonProcess]
StartThread = Callable[..., ThreadedDaemon]

ROOT = Path(__file__).parents[2]
PAGE = 64 * 1024
KEY = object_key(1)
READERS = 150
TINY_OBJECTS = at_scale(500_000, 10_000_000)
CLIENTS_THAT_DIE = at_scale(64, 1000)
FILLS_THE_TABLE = """
import lmdb, os, sys
is_full = False
while not is_full:  # all live until the table is full, so that no opening clears the slots of those before
    told, tell = os.pipe()
    if os.fork() == 0:
        try:
            environment = lmdb.open(sys.argv[1], readonly=True, max_dbs=3)
            transaction = environment.begin()
        except lmdb.ReadersFullError:
            os.write(tell, b"full")
        else:
            os.write(tell, b"held")
        os.read(0, 1)
    os.close(tell)
    is_full = os.read(told, 4) != b"held"
    os.close(told)
print("full", flush=True)
os.read(0, 1)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LmdbBackend]:
    """A store whose index has next to no room to move in."""
    monkeypatch.setattr(lmdb_layout, "MOVING_BYTES_MIN", 1 << 16)
    backend = LmdbBackend.open(directory, capacity_bytes=16 << 20)
    yield backend
    backend.close()


def kill_readers(directory: Path, *, count: int) -> None:
    """So many processes, one after another, are killed in the middle of a read."""
    program = (
        "import lmdb, os, signal, sys\n"
        "for _ in range(int(sys.argv[2])):\n"
        "    if (child := os.fork()) == 0:\n"
        "        transaction = lmdb.open(sys.argv[1], readonly=True, max_dbs=3).begin()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL\n"
    )
    subprocess.run([sys.executable, "-c", program, str(directory), str(count)], check=True, timeout=60)


def read_at_once(backend: LmdbBackend, threads: int) -> list[Outcome]:
    """What so many threads get that read at the same moment."""
    outcomes: list[Outcome] = []
    together = threading.Barrier(threads)

    def read() -> None:
        together.wait(30)
        outcomes.append(get(backend, key(1), 1000)[0])

    running = [threading.Thread(target=read) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(30)
    return outcomes


def has_slots(backend: LmdbBackend) -> bool:
    """Whether it can read more often at a time than it has slots in hand."""
    with ExitStack() as snapshots:
        try:
            for _ in range(SPARE_READERS + 1):
                snapshots.enter_context(backend._files.env.read())
        except lmdb.ReadersFullError:
            return False
    return True


def test_br_054_200_threads_read_and_killed_readers_cost_neither_slots_nor_space(
    backend: LmdbBackend, directory: Path
) -> None:
    assert put(backend, (key(1), payload(1, 1000))) == [Outcome.OK]
    kill_readers(directory, count=READERS)
    assert read_at_once(backend, 200) == [Outcome.OK] * 200
    size_bytes = (directory / "data.mdb").stat().st_size
    for number in range(2, 600):  # killed readers keep the pages that these free, until the map is full
        assert put(backend, (key(number), payload(2, 1000))) == [Outcome.OK]
        assert backend.delete([key(number)]) == [Outcome.OK]
    assert backend.map_used_bytes() > 0.9 * size_bytes, "the map was full"
    assert (directory / "data.mdb").stat().st_size == size_bytes


def test_br_054_a_reader_table_that_killed_processes_have_filled_is_cleared_when_it_is_met(
    backend: LmdbBackend, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert put(backend, (key(1), payload(1, 1000))) == [Outcome.OK]
    command = [sys.executable, "-c", FILLS_THE_TABLE, str(directory)]
    filling = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert filling.stdout is not None
    assert filling.stdin is not None
    try:
        assert filling.stdout.readline() == b"full\n"
        assert backend.reader_slots() >= READER_SLOTS
        assert not has_slots(backend), "the control: slots of the living are theirs"
    finally:
        os.killpg(filling.pid, signal.SIGKILL)
        filling.wait()
        filling.stdin.close()
        filling.stdout.close()
    wait_until(lambda: has_slots(backend), what="the killed ones are dead")
    assert read_at_once(backend, 200) == [Outcome.OK] * 200
    assert "slots of killed processes" in caplog.text


INDEX_OF_TINY_OBJECTS = """
import gc
import sys
import numpy as np
import psutil
from hicache.backends.key_rows import PackedKeys
from hicache.backends.residents import Residents
index = Residents(stored_bytes=lambda size: size)
before_bytes = psutil.Process().memory_info().rss
for seed in range(int(sys.argv[1]) // 50_000):
    raw = np.random.default_rng(seed).integers(0, 256, size=(50_000, 36), dtype=np.uint8)
    keys = PackedKeys(raw.tobytes(), 36, prefix=b"tenant-of-a-test")
    index.load(keys, np.full(len(keys), 100), np.full(len(keys), 1.0))
del raw, keys
gc.collect()
print(len(index), psutil.Process().memory_info().rss - before_bytes)
"""


@pytest.mark.timeout(TIMEOUT_S)
def test_br_060_the_index_of_tiny_objects_takes_so_much_for_each_and_is_bounded() -> None:
    command = [sys.executable, "-c", INDEX_OF_TINY_OBJECTS, str(TINY_OBJECTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    objects, grown_bytes = map(int, done.stdout.split())
    assert objects == TINY_OBJECTS
    assert 40 < grown_bytes / objects < 200
    assert OBJECTS_MAX * 200 < 4 << 30


def test_br_060_tiny_objects_are_evicted_at_objects_max_however_much_room_there_is(start: Start) -> None:
    daemon = start(objects_max=200)
    with Client(daemon.target) as client:
        for first in range(0, 2000, 100):
            keys = [object_key(number) for number in range(first, first + 100)]
            assert client.put_stream(keys, [payload_of(number, 100) for number in range(100)]) == [Outcome.OK] * 100
            assert client.stats().objects <= 200
        assert client.present([object_key(1999), object_key(0)]) == [True, False]
    samples = scrape(daemon.ready["http"])
    assert samples['hicache_store_removed_objects_total{reason="evicted"}'] >= 1800
    assert samples["hicache_store_used_bytes"] < samples["hicache_store_capacity_bytes"]


@pytest.mark.timeout(TIMEOUT_S)
def test_br_060_clients_that_register_and_die_leave_no_record(start_thread: StartThread) -> None:
    daemon = start_thread()
    with Client(daemon.target) as keeper, Memory(4096) as memory:
        assert keeper.put_stream([object_key(1)], [b"bytes"]) == [Outcome.OK]
        fds_before = psutil.Process().num_fds()
        for number in range(CLIENTS_THAT_DIE):
            client = Client(daemon.target, name=f"victim-{number}", descriptor=DESCRIPTOR | {"revision": str(number)})
            assert client.lookup([object_key(1)], lease_ms=60_000)[1]
            client.attach(memory)
            client.stream.cancel()  # as when its process dies
            client.close()
        samples = partial(scrape, daemon.ready.http)
        wait_until(lambda: samples()["hicache_sessions"] == 1, what="only the keeper's session is left")
        wait_until(lambda: samples()["hicache_regions"] == 0, what="no memory of theirs is mapped")
        wait_until(lambda: samples()["hicache_store_leases"] == 0, what="no lease of theirs is left")
        wait_until(lambda: psutil.Process().num_fds() <= fds_before + 2, what="their descriptors are closed")


def _begin_get(client: Client, timeout_s: float = CALL_S) -> Bulk:
    """A get of 8 MiB of which one piece has come."""
    bulk = client.bulk()
    bulk.request(BulkKind.GET, [KEY], [8 << 20], timeout_s=timeout_s)
    bulk.receive(PAGE)
    return bulk


@pytest.mark.parametrize("way", ["drop", "deadline", "session"])
def test_br_056_a_stream_that_its_client_gives_up_ends_on_the_daemon(start_thread: StartThread, way: str) -> None:
    daemon = start_thread(io_threads=2)
    rounds = 4 if way == "deadline" else 30
    with Client(daemon.target) as keeper:
        keeper.put_stream([KEY], [payload_of(1, 8 << 20)])
        for _ in range(rounds):
            client = keeper if way != "session" else Client(daemon.target)
            bulk = _begin_get(client, timeout_s=0.2 if way == "deadline" else CALL_S)
            if way == "drop":
                bulk.close()
            elif way == "session":
                client.channel.close()
                with pytest.raises(ConnectionError):
                    bulk.receive(8 << 20)
                bulk.close()

        wait_until(lambda: daemon.metric("hicache_calls_active", method="GetStream") == 0, what="no stream is left")
        wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="all bytes are given back")
        wait_until(lambda: daemon.metric("hicache_sessions") == 1, what="the others have ended")
        assert keeper.present([KEY]) == [True]


def test_br_056_given_up_streams_leave_no_memory_and_no_descriptors_behind(
    start: Callable[..., DaemonProcess],
) -> None:
    daemon = start()
    process = psutil.Process(daemon.process.pid)

    def give_up(rounds: int) -> tuple[int, int]:
        for number in range(rounds):
            bulk = _begin_get(keeper)
            if number % 2:
                bulk.connection.shutdown(socket.SHUT_RDWR)
            bulk.close()
        wait_until(lambda: scrape(daemon.ready["http"])["hicache_inflight_bytes"] == 0, what="all bytes are given back")
        return process.memory_info().rss, process.num_fds()

    with Client(daemon.target) as keeper:
        keeper.put_stream([KEY], [payload_of(1, 8 << 20)])
        rss_before, fds_before = give_up(50)
        rss_after, fds_after = give_up(300)
    assert rss_after - rss_before < 64 << 20, "300 leaked objects would be 2400 MiB"
    assert fds_after <= fds_before + 2
    daemon.terminate()
    assert "Traceback" not in daemon.log


@pytest.mark.parametrize("fault", [None, *FaultKind], ids=lambda kind: "none" if kind is None else kind.value)
@pytest.mark.parametrize("way", ["memory", "stream"])
def test_br_057_no_way_to_end_a_call_keeps_room_or_memory(
    start_thread: StartThread, memory: Memory, way: str, fault: FaultKind | None
) -> None:
    daemon = start_thread(call_timeout_s_max=0.5)
    with Client(daemon.target) as client:
        end_calls(daemon, client, memory, way, fault)


def end_calls(daemon: ThreadedDaemon, client: Client, memory: Memory, way: str, fault: FaultKind | None) -> None:
    """A get and a put of what is there and what is not meet the fault; then everything is as before."""
    attachment = client.attach(memory)
    present, absent, new = object_key(1), object_key(2), object_key(3)
    assert client.put_stream([present], [payload_of(1, PAGE)]) == [Outcome.OK]
    for operation in ("get_into", "put"):
        if fault is not None:
            daemon.backend.arm(operation, Fault(fault, delay_s=0.01))
        if way == "memory":
            client.get(attachment.region_id, [present, absent], [0, PAGE], [PAGE] * 2, timeout_s=0.3)
            client.put(attachment.region_id, [new, present], [0, PAGE], [PAGE] * 2, timeout_s=0.3)
        else:
            client.get_stream([present, absent], [PAGE] * 2, timeout_s=0.3)
            client.put_stream([new, present], [payload_of(3, PAGE)] * 2)
        daemon.backend.disarm()
        client.delete([new])
    wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="all bytes are given back")
    wait_until(lambda: daemon.metric("hicache_storage_busy_threads") == 0, what="no thread is at work")
    attachment.half_close()
    assert attachment.is_at_end(within_s=CALL_S), "nobody holds the memory"
    wait_until(lambda: daemon.metric("hicache_regions") == 0, what="it is not mapped any more")
    client.put_stream([new], [payload_of(3, PAGE)])
    assert client.get_stream([new], [PAGE]) == [payload_of(3, PAGE)], "the control"


def test_br_053_killed_processes_leave_nothing_in_shared_memory() -> None:
    code = (
        "import sys\n"
        "from hicache.pools.host_memory import HostMemory\n"
        "memory = HostMemory('hicache-l2', 1 << 20, setting='l2_bytes')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        during = os.listdir("/dev/shm")
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not [name for name in (*during, *os.listdir("/dev/shm")) if "hicache-l2" in name]


def test_br_055_a_second_release_is_refused_and_does_not_touch_the_new_owner() -> None:
    pool = SlotPool(1, name="l2.attn")
    (old,) = pool.acquire(1) or []
    pool.release(old)
    (new,) = pool.acquire(1) or []
    assert slot_of(new) == slot_of(old)
    for misuse in (pool.release, pool.hold):
        with pytest.raises(HandleError, match=r"l2\.attn: handle 0x.* is stale"):
            misuse(old)
    assert pool.holders(new) == 1
    assert pool.holders(old) == 0
    assert pool.free_count == 0
