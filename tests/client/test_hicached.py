"""The client and hicached itself: the L3 contract on every way of moving bytes, and what the daemon's faults cost."""

from __future__ import annotations

import dataclasses
import itertools
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hicache.client import ClientState, DaemonL3
from hicache.l3 import L3, L3Item
from hicache.outcome import Outcome
from tests.client.conftest import ClientFactory
from tests.client.contract import MEMORY_BYTES, L3Contract
from tests.client.hicached import HicachedProcess, token_of
from tests.client.memory import SmallMemory, UnshareableMemory
from tests.client.support import QUICK, SPEC, Answer, get, key, payload, put, wait_until
from tests.client.test_processes import seconds_per_call

SIZE = 5000
PATIENT = dataclasses.replace(QUICK, ping_timeout_s=2.0, connect_timeout_s=5.0)


@pytest.fixture(scope="module")
def hicached() -> Iterator[HicachedProcess]:
    """One daemon for the module. Tests are kept apart by tenants, which are what keeps engines apart."""
    with TemporaryDirectory(prefix="hic") as folder:
        process = HicachedProcess(Path(folder), has_tenants=True, tcp=True)
        process.start()
        yield process
        process.end()


@pytest.fixture(scope="module")
def tokens() -> Iterator[str]:
    return map(token_of, itertools.count())


@pytest.fixture
def token(tokens: Iterator[str]) -> str:
    """The token of a tenant that has stored nothing yet."""
    return next(tokens)


class HicachedContract(L3Contract):
    """Fixtures for clients of the real daemon."""

    bulk = "memory"

    @pytest.fixture
    def contract_memory(self) -> Iterator[SmallMemory]:
        memory = SmallMemory(MEMORY_BYTES)
        yield memory
        memory.close()

    @pytest.fixture
    def l3(self, hicached: HicachedProcess, token: str, contract_memory: SmallMemory) -> Iterator[DaemonL3]:
        client = self.connect(hicached, token, contract_memory)
        assert client.status().bulk == self.bulk
        yield client
        client.close()

    @pytest.fixture
    def other_l3(self, hicached: HicachedProcess, token: str, contract_memory: SmallMemory) -> Iterator[L3]:
        client = self.connect(hicached, token, contract_memory)
        yield client
        client.close()

    def connect(self, hicached: HicachedProcess, token: str, memory: SmallMemory) -> DaemonL3:
        client = DaemonL3(self.address(hicached), spec=SPEC, memory=memory, token=token, settings=PATIENT)
        assert client.wait_ready(timeout_s=10), client.status()
        return client

    def address(self, hicached: HicachedProcess) -> str:
        return hicached.address


class TestHicachedThroughRegisteredMemory(HicachedContract):
    pass


class TestHicachedThroughABounceBuffer(HicachedContract):
    bulk = "bounce"

    @pytest.fixture
    def contract_memory(self) -> Iterator[SmallMemory]:
        memory = UnshareableMemory(MEMORY_BYTES)
        yield memory
        memory.close()


class TestHicachedThroughStreams(HicachedContract):
    bulk = "stream"

    @pytest.fixture
    def contract_memory(self) -> Iterator[SmallMemory]:
        memory = SmallMemory(MEMORY_BYTES, is_sealed=False)
        yield memory
        memory.close()


class TestHicachedOverTcp(HicachedContract):
    bulk = "stream"

    def address(self, hicached: HicachedProcess) -> str:
        return hicached.tcp_address


def test_a_bulk_socket_out_of_reach_is_no_session_since_what_is_looked_up_could_never_come(
    folder: Path, new_client: ClientFactory
) -> None:
    hicached = HicachedProcess(folder)
    hicached.start()
    out_of_reach = folder / "elsewhere"
    (folder / "hicached.sock.bulk").rename(out_of_reach)
    memory = UnshareableMemory(MEMORY_BYTES)
    client = new_client(hicached.address, memory=memory)
    wait_until(lambda: client.status().state is ClientState.UNAVAILABLE, what="the refusal")
    assert "the bulk socket of hicached cannot be reached" in client.status().reason
    assert client.lookup([key(1)], timeout_s=5) == [Outcome.UNAVAILABLE]
    watcher = new_client(hicached.address, memory=None)
    assert watcher.wait_ready(timeout_s=10), "who moves no objects needs no bulk socket"
    assert watcher.lookup([key(1)], timeout_s=5) == [Outcome.ABSENT]
    out_of_reach.rename(folder / "hicached.sock.bulk")
    assert client.wait_ready(timeout_s=10)
    assert put(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    client.close()
    memory.close()
    hicached.end()


def test_memory_and_streams_name_the_same_objects(hicached: HicachedProcess, token: str, memory: SmallMemory) -> None:
    local = DaemonL3(hicached.address, spec=SPEC, memory=memory, token=token, settings=PATIENT)
    remote = DaemonL3(hicached.tcp_address, spec=SPEC, memory=memory, token=token, settings=PATIENT)
    assert local.wait_ready(timeout_s=10)
    assert remote.wait_ready(timeout_s=10)
    for number, (source, target) in enumerate(((local, remote), (remote, local))):
        memory.buffer[:SIZE] = payload(number, SIZE)
        assert put(source, [L3Item(key(number), 0, SIZE)]) == [Outcome.OK]
        assert put(target, [L3Item(key(number), 0, SIZE)]) == [Outcome.EXISTS]
        assert get(target, [L3Item(key(number), SIZE, SIZE)]) == [Outcome.OK]
        assert memory.buffer[SIZE : 2 * SIZE] == payload(number, SIZE)
    local.close()
    remote.close()


def test_another_tenant_finds_nothing_and_its_owner_does(
    hicached: HicachedProcess, tokens: Iterator[str], memory: SmallMemory
) -> None:
    owner, stranger = (
        DaemonL3(hicached.address, spec=SPEC, memory=memory, token=next(tokens), settings=PATIENT) for _ in range(2)
    )
    assert owner.wait_ready(timeout_s=10)
    assert stranger.wait_ready(timeout_s=10)
    assert put(owner, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    assert stranger.lookup([key(1)], timeout_s=10) == [Outcome.ABSENT]
    assert get(stranger, [L3Item(key(1), 0, SIZE)]) == [Outcome.ABSENT]
    assert owner.lookup([key(1)], timeout_s=10) == [Outcome.OK]
    owner.close()
    stranger.close()


def test_memory_without_a_seal_goes_through_streams_and_says_why(hicached: HicachedProcess, token: str) -> None:
    memory = SmallMemory(is_sealed=False)
    client = DaemonL3(hicached.address, spec=SPEC, memory=memory, token=token, settings=PATIENT)
    assert client.wait_ready(timeout_s=10)
    status = client.status()
    assert status.bulk == "stream"
    assert "F_SEAL_SHRINK" in status.bulk_reason
    assert put(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    client.close()
    memory.close()


def test_a_wrong_token_is_refused_and_a_probe_says_so(hicached: HicachedProcess, new_client: ClientFactory) -> None:
    client = new_client(hicached.address, token="nobody has this token", settings=PATIENT)
    report = client.probe(timeout_s=5)
    assert (report.is_ok, report.code, report.is_lasting) == (False, "BAD_TOKEN", True)
    wait_until(lambda: client.status().refusal == "BAD_TOKEN")


def test_a_key_hash_that_is_not_safe_among_tenants_is_refused(
    hicached: HicachedProcess, token: str, new_client: ClientFactory
) -> None:
    spec = dataclasses.replace(SPEC, key_hash="xxh3_128")
    report = new_client(hicached.address, token=token, spec=spec, settings=PATIENT).probe(timeout_s=5)
    assert (report.is_ok, report.code, report.is_lasting) == (False, "KEY_HASH_NOT_ALLOWED", True)


# A daemon for each test, to be killed


@pytest.fixture
def own_hicached(folder: Path) -> Iterator[HicachedProcess]:
    process = HicachedProcess(folder)
    process.start()
    yield process
    process.end()


@pytest.fixture
def own_client(own_hicached: HicachedProcess, new_client: ClientFactory) -> DaemonL3:
    client = new_client(own_hicached.address, settings=PATIENT)
    assert client.wait_ready(timeout_s=10)
    return client


def test_br_038_what_a_killed_hicached_had_acknowledged_is_served_again_without_a_restart_of_the_engine(
    own_hicached: HicachedProcess, own_client: DaemonL3, memory: SmallMemory
) -> None:
    memory.buffer[:SIZE] = payload(1, SIZE)
    assert put(own_client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    store_id = own_client.status().store_id
    own_hicached.signal(signal.SIGKILL)
    wait_until(lambda: own_client.status().state is ClientState.UNAVAILABLE)
    assert seconds_per_call(own_client) < 0.001
    own_hicached.start()
    wait_until(lambda: own_client.wait_ready(timeout_s=0), timeout_s=5, what="finding hicached again")
    assert get(own_client, [L3Item(key(1), SIZE, SIZE)]) == [Outcome.OK]
    assert memory.buffer[SIZE : 2 * SIZE] == payload(1, SIZE)
    assert own_client.status().store_id == store_id


def test_a_stopped_hicached_holds_only_what_is_in_doubt_and_comes_back_by_itself(
    own_hicached: HicachedProcess, own_client: DaemonL3
) -> None:
    assert put(own_client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    own_hicached.signal(signal.SIGSTOP)
    stuck = Answer()
    own_client.get([L3Item(key(1), 0, SIZE)], timeout_s=0.2, done=stuck)
    wait_until(lambda: own_client.status().state is ClientState.UNAVAILABLE)
    assert seconds_per_call(own_client) < 0.001
    assert not stuck.is_there
    own_hicached.signal(signal.SIGCONT)
    assert stuck.wait() == [Outcome.DEADLINE]
    wait_until(lambda: own_client.wait_ready(timeout_s=0), timeout_s=10, what="finding hicached again")
    assert get(own_client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]


def test_a_hicached_killed_in_the_middle_of_transfers_gives_every_item_back_once(
    own_hicached: HicachedProcess, own_client: DaemonL3
) -> None:
    is_over = threading.Event()
    answers: list[Answer] = []

    def store_on_and_on(thread: int) -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            answer = Answer()
            answers.append(answer)
            item = L3Item(key(thread * 1_000_000 + number), thread * SIZE, SIZE)
            own_client.put([item], timeout_s=5, done=answer)
            answer.wait()

    threads = [threading.Thread(target=store_on_and_on, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) > 100)
    own_hicached.signal(signal.SIGKILL)
    wait_until(lambda: own_client.status().state is ClientState.UNAVAILABLE)
    is_over.set()
    for thread in threads:
        thread.join()
    assert {len(answer.calls) for answer in answers} == {1}
    assert own_client.status().items_in_doubt == 0


def test_hicached_that_stops_in_good_order_lets_go_of_the_memory(
    own_hicached: HicachedProcess, own_client: DaemonL3
) -> None:
    assert put(own_client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    started_s = time.monotonic()
    own_hicached.signal(signal.SIGTERM)
    wait_until(lambda: own_client.status().state is ClientState.UNAVAILABLE)
    own_client.close()
    assert time.monotonic() - started_s < 5
    assert own_client.status().items_in_doubt == 0


IDLE_CLIENT = """
import sys, time
from hicache.client import DaemonL3
from tests.client.memory import SmallMemory
from tests.client.support import SPEC

client = DaemonL3(sys.argv[1], spec=SPEC, memory=SmallMemory(), token=sys.argv[2])
assert client.wait_ready(timeout_s=30), client.status()
print(client.status().bulk, flush=True)
time.sleep(600)
"""


def session_count(hicached: HicachedProcess) -> int:
    with urllib.request.urlopen(f"http://{hicached.http_address}/metrics", timeout=10) as answer:
        found = re.search(r"^hicache_sessions (\d+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.timeout(120)
def test_stopped_clients_lose_their_sessions_after_the_keepalive_and_a_live_one_does_not(
    folder: Path, memory: SmallMemory
) -> None:
    hicached = HicachedProcess(folder, has_tenants=True, tcp=True, http="127.0.0.1:0", session_keepalive_s=5)
    hicached.start()
    addresses = (hicached.address, hicached.tcp_address)
    clients = [
        subprocess.Popen([sys.executable, "-c", IDLE_CLIENT, address, token_of(0)], stdout=subprocess.PIPE, text=True)
        for address in addresses
    ]
    live = DaemonL3(hicached.address, spec=SPEC, memory=memory, token=token_of(0))
    try:
        assert live.wait_ready(timeout_s=10)
        assert [client.stdout.readline().strip() for client in clients if client.stdout] == ["memory", "stream"]
        assert session_count(hicached) == 3
        for client in clients:
            client.send_signal(signal.SIGSTOP)
        # 5 s of silence and 10 s without an answer; gRPC's own bound of 60 s would be far beyond
        wait_until(lambda: session_count(hicached) == 1, timeout_s=30, what="the end of the stopped clients' sessions")
        assert live.status().sessions_opened == 1
    finally:
        live.close()
        for client in clients:
            client.kill()
            client.communicate()
        hicached.end()
