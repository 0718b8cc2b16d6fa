"""Hangs: transfers that break off, ranks that must agree, processes that fork."""

from __future__ import annotations

import ast
import contextlib
import errno
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.client import ClientState, DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.tenancy import tenant_digest
from tests.backends.payloads import get, key, payload, put
from tests.backends.test_file_direct import ColdCalls, open_direct
from tests.client.hicached import HicachedProcess, token_of
from tests.client.memory import SmallMemory
from tests.client.support import QUICK, SPEC
from tests.client.support import get as client_get
from tests.client.support import key as client_key
from tests.client.support import put as client_put
from tests.client.support import wait_until as client_wait
from tests.core.situations import HYBRID, prompt
from tests.core.world import Live, World
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import CALL_S, Memory, object_key, payload_of
from tests.daemon.rig import http_get, wait_until

ROOT = Path(__file__).parents[2]
PAGE = 64 * 1024
KEY = object_key(1)


@contextmanager
def killable_client(daemon: ThreadedDaemon, steps: str) -> Iterator[subprocess.Popen[bytes]]:
    """A client in a process of its own that runs ``steps`` with ``client`` and ``memory``, to be killed."""
    program = (
        "import sys, time\n"
        "from tests.daemon.client import *\n"
        f"client, memory = Client({daemon.target!r}, name='victim'), Memory({16 * PAGE})\n"
        "region = client.attach(memory).region_id\n"
        f"key = {KEY!r}\n"
        f"{steps}\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_br_039_a_put_whose_client_was_killed_leaves_a_key_that_can_be_written(
    daemon: ThreadedDaemon, client: Client
) -> None:
    late = daemon.backend.arm("put", Fault(FaultKind.LATE, times=1))
    with killable_client(daemon, f"client.put(region, [key], [0], [{PAGE}])") as victim:
        wait_until(late.entered.is_set, what="the victim's put is in the backend")
        assert client.present([KEY]) == [False]
        victim.kill()
        victim.wait()
        assert client.present([KEY]) == [False]
        late.release()
        wait_until(lambda: daemon.metric("hicache_regions") == 0, what="the dead client's memory is free")

    assert client.put_stream([KEY], [bytes(PAGE)])[0].is_ok
    assert client.get_stream([KEY], [PAGE]) == [bytes(PAGE)]
    wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="reserved bytes are given back")


def test_br_039_an_upload_that_breaks_off_leaves_a_key_that_can_be_written(
    daemon: ThreadedDaemon, client: Client
) -> None:
    bulk = client.bulk()
    assert bulk.begin_put([KEY], [PAGE]) == [Outcome.OK]
    bulk.send(b"half")
    wait_until(lambda: daemon.metric("hicache_inflight_bytes") == len(b"half"), what="what was sent is held")
    assert client.present([KEY]) == [False]
    bulk.close()

    wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="reserved bytes are given back")
    assert client.present([KEY]) == [False]
    assert client.put_stream([KEY], [b"whole"]) == [Outcome.OK]


def test_br_043_a_client_killed_in_a_transfer_disturbs_nobody_and_can_come_back(
    daemon: ThreadedDaemon, client: Client, memory: Memory
) -> None:
    client.put_stream([KEY, object_key(2)], [payload_of(1, PAGE), payload_of(2, PAGE)])
    others = [Client(daemon.target, name=f"other-{number}") for number in range(3)]
    stuck = daemon.backend.arm(
        "get_into", Fault(FaultKind.LATE, keys=frozenset([tenant_digest(client.welcome.tenant) + KEY]))
    )
    sessions_before = daemon.metric("hicache_sessions")

    with killable_client(daemon, f"client.get(region, [key], [0], [{PAGE}])") as victim:
        wait_until(stuck.entered.is_set, what="the victim's get is in the backend")
        victim.kill()
        victim.wait()
        wait_until(lambda: daemon.metric("hicache_sessions") == sessions_before, what="the dead session has ended")

        assert daemon.metric("hicache_regions") == 1, "a thread still touches the dead client's memory"
        region = client.attach(memory).region_id
        for _ in range(5):
            started = time.monotonic()
            assert http_get(daemon.ready.http, "/healthz", timeout_s=1.0)[0] == 200
            assert time.monotonic() - started < 1.0
            assert client.get(region, [object_key(2)], [0], [PAGE]) == [Outcome.OK]
            assert [other.present([KEY]) for other in others] == [[True]] * 3
        stuck.release()
        wait_until(lambda: daemon.metric("hicache_regions") == 1, what="only the living client's memory is mapped")
        wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="the dead client's bytes are given back")

    steps = f"assert client.get(region, [key], [0], [{PAGE}]) == [Outcome.OK]\nclient.close()"
    with killable_client(daemon, steps) as returned:
        assert returned.wait(CALL_S) == 0
    for other in others:
        other.close()


FORKS = frozenset({"subprocess", "multiprocessing", "pty", "concurrent.futures.process"})
FORKING_CALLS = frozenset({"fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp", "ProcessPoolExecutor"})


def ways_to_fork(source: str) -> list[str]:
    """What in a module may start another process."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in FORKS]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found += [node.module] if node.module.partition(".")[0] in FORKS or node.module in FORKS else []
            found += [alias.name for alias in node.names if alias.name in FORKING_CALLS]
        elif isinstance(node, ast.Attribute) and node.attr in FORKING_CALLS:
            found.append(node.attr)
    return found


def test_br_046_nothing_that_runs_beside_grpc_starts_a_process() -> None:
    sources = [
        path for folder in ("hicache", "daemon", "backends", "kernels") for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    assert len(sources) > 200
    assert {str(path.relative_to(ROOT)): found for path in sources if (found := ways_to_fork(path.read_text()))} == {}
    assert ways_to_fork("import os, subprocess\nos.fork()") == ["subprocess", "fork"], "the control"


ENGINE_THAT_FORKS = """
import multiprocessing, os, subprocess, sys, threading, time, warnings
from tests.core.small_engine import SmallEngine, prompt
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: our point
engine = SmallEngine(address=sys.argv[1])
assert engine.cache.l3.wait_ready(timeout_s=20)
over, served = threading.Event(), []
def serve():
    while not over.is_set():
        served.append(engine.serve(prompt(4, seed=len(served) % 20 + 1)).tokens)
traffic = threading.Thread(target=serve)
traffic.start()
forking = multiprocessing.get_context("fork")
for number in range(int(sys.argv[2])):
    subprocess.run(["true"], check=True, timeout=30)
    child = forking.Process(target=os.getpid)
    child.start()
    child.join(30)
    assert child.exitcode == 0, child.exitcode
deadline = time.monotonic() + 60
while not sum(served) and time.monotonic() < deadline:  # what it forks is done before the first prompt comes again
    time.sleep(0.01)
over.set()
traffic.join(30)
assert not traffic.is_alive()
engine.settle()
engine.close()
print("served", sum(served))
"""


def test_br_046_an_engine_that_forks_and_spawns_under_load_hangs_nowhere(daemon: ThreadedDaemon) -> None:
    command = [sys.executable, "-c", ENGINE_THAT_FORKS, f"unix://{daemon.config.socket}", "25"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 0
    wait_until(lambda: daemon.metric("hicache_regions") == 0, what="its memory is given back: no child has kept it")
    wait_until(lambda: daemon.metric("hicache_sessions") == 0, what="its session has ended")


COLLECTIVES = ("torch.distributed", "all_reduce", "all_gather", "barrier(", "broadcast(")


def test_br_044_the_only_collective_is_entered_once_by_every_rank_at_the_start() -> None:
    sources = {path: path.read_text() for path in ROOT.glob("hicache/**/*.py")}
    assert len(sources) > 150
    used = {str(path.relative_to(ROOT)): sum(map(text.count, COLLECTIVES)) for path, text in sources.items()}
    assert {path: count for path, count in used.items() if count} == {"hicache/connectors/vllm.py": 2}  # one call


@pytest.mark.parametrize("seed", range(2))
def test_br_044_ranks_of_any_speed_act_on_the_same_prefix_whatever_is_aborted(seed: int) -> None:
    rng = random.Random(seed)
    world = World(HYBRID, l1=40, l2=40, ranks=4, prefetch_l2_share=1.0, job_items_max=2)
    prompts = [prompt(8, seed=number) for number in range(6)]
    for tokens in prompts:
        world.fill_l3(tokens)
    for page in world.page_keys(prompts[0]):  # one rank has no entry at all for this one
        world.executor.l3.pop((page, 0, 3))
    world.is_l3_whole = False
    lives: list[Live] = []
    asked: list[set[int]] = [set() for _ in range(4)]
    restored = 0
    for tick in range(5000):
        for task in world.executor.waiting:
            asked[task.rank].add(task.job.job_id)
        if world.executor.waiting and rng.random() < 0.8:
            world.executor.run(rng.randrange(len(world.executor.waiting)))  # of any rank, in any order
        elif len(lives) < 4:
            lives.append(world.open(rng.choice(prompts)))
            world.prefetch(lives[-1])
        else:
            live = lives[rng.randrange(4)]
            world.load(live)
            if live.record.is_loaded or rng.random() < 0.3:  # or it is aborted
                everywhere = 0 if live.tokens == prompts[0] else 8
                assert (live.record.loaded_pages or 0) <= everywhere
                restored += live.record.loaded_pages or 0
                world.release(live)
                lives.remove(live)
        if tick % 50 == 0:
            world.check()
    assert restored > 100, "the control"
    world.run_all()
    assert asked[0] == asked[1] == asked[2] == asked[3]
    for live in lives:
        world.release(live)
    world.wind_up()


@pytest.mark.parametrize("refused", ["open_direct", "read"])
def test_br_050_a_file_system_without_direct_io_is_read_through_its_cache(tmp_path: Path, refused: str) -> None:
    class RefusingCalls(ColdCalls):
        direct = -1

        def open_direct(self, path: str) -> int:
            if refused == "open_direct":
                raise OSError(errno.EINVAL, "Invalid argument")
            self.direct = super().open_direct(path)
            return self.direct

        def read(self, fd: int, targets: list[memoryview], offset: int) -> int:
            if fd == self.direct:
                self.counts["refused"] += 1
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().read(fd, targets, offset)

    calls = RefusingCalls()
    backend = open_direct(tmp_path / "store", calls)
    for number, size in enumerate((3 << 20, 3 * 4096 + 132, 100)):
        assert put(backend, (key(number), payload(number, size))) == [Outcome.OK]
        assert get(backend, key(number), size) == (Outcome.OK, payload(number, size))
    assert calls.counts["refused"] == (3 if refused == "read" else 0)
    backend.close()


class Wire:
    """A way to a TCP address that a test can cut: what is sent then arrives nowhere, and nobody is told."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.is_cut = threading.Event()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while said := source.recv(1 << 16):
                if not self.is_cut.is_set():
                    sink.sendall(said)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        for end in self._ends:
            end.close()


def test_br_038_packets_that_are_dropped_cost_requests_nothing_and_the_way_back_is_found(folder: Path) -> None:
    hicached = HicachedProcess(folder, has_tenants=True, tcp=True, bulk_listen="127.0.0.1:0")
    hicached.start()
    host, _, port = hicached.tcp_address.removeprefix("tcp://").rpartition(":")
    wire, memory = Wire((host, int(port))), SmallMemory()
    address = f"tcp://127.0.0.1:{wire.port}"
    client = DaemonL3(address, spec=SPEC, memory=memory, token=token_of(0), settings=QUICK)
    try:
        assert client.wait_ready(timeout_s=20)
        assert client_put(client, [L3Item(client_key(1), 0, 5000)]) == [Outcome.OK]
        wire.is_cut.set()
        client_wait(lambda: client.status().state is ClientState.UNAVAILABLE, timeout_s=20, what="noticing the silence")
        started_s = time.monotonic()
        for _ in range(200):
            assert client.lookup([client_key(1)], timeout_s=5) == [Outcome.UNAVAILABLE]
        assert (time.monotonic() - started_s) / 200 < 0.01
        wire.is_cut.clear()
        client_wait(lambda: client.wait_ready(timeout_s=0), timeout_s=20, what="finding hicached again")
        assert client.lookup([client_key(1)], timeout_s=5) == [Outcome.OK]
        assert client_get(client, [L3Item(client_key(1), 0, 5000)]) == [Outcome.OK]
    finally:
        client.close()
        memory.close()
        wire.close()
        hicached.end()
