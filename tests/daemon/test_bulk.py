"""The bulk socket: who gets in, what breaks its rules, and that nobody but the one who does suffers."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.checksum import payload_checksum
from hicache.daemon.staging import Staging
from hicache.outcome import Outcome
from hicache.tenancy import physical_key, tenant_digest
from hicache.wire.bulk import (
    BULK_CHECKSUM,
    BULK_CONNECTIONS_PER_SESSION_MAX,
    BULK_HELLO,
    BULK_MAGIC,
    BULK_OBJECT,
    BULK_REGION,
    BULK_REQUEST,
    BulkKind,
    pack_numbers,
)
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Bulk, BulkRefused, Memory, object_key, payload_of
from tests.daemon.rig import wait_until

StartThread = Callable[..., ThreadedDaemon]

MIB = 1 << 20
KEYS = [object_key(number) for number in range(8)]
REGION_KINDS = (BulkKind.LOAD, BulkKind.STORE)


@pytest.fixture
def bystander(bystander: Client, daemon: ThreadedDaemon) -> Iterator[Client]:
    """As for all, and at its end no room is held."""
    yield bystander
    wait_until(lambda: _inflight(daemon) == 0, what="no room is held")


def _inflight(daemon: ThreadedDaemon) -> float:
    return daemon.metric("hicache_inflight_bytes")


class TestHello:
    """The first bytes of a connection."""

    def refused(self, client: Client, said: bytes) -> str:
        bulk = Bulk(client.bulk_address, None)
        bulk.send(said)
        with pytest.raises(BulkRefused) as caught:
            bulk.receive_status()
        bulk.close()
        return str(caught.value)

    def test_a_secret_of_no_session_or_of_one_that_has_ended_is_refused(
        self, daemon: ThreadedDaemon, client: Client, bystander: Client
    ) -> None:
        assert "UNKNOWN_SESSION" in self.refused(client, BULK_HELLO.pack(BULK_MAGIC, b"\1" * 32))
        with Client(daemon.target) as ended:
            pass
        wait_until(lambda: daemon.metric("hicache_sessions") == 2, what="the session has ended")
        assert "UNKNOWN_SESSION" in self.refused(client, BULK_HELLO.pack(BULK_MAGIC, ended.secret))

    def test_something_else_than_a_hello_is_refused(self, client: Client, bystander: Client) -> None:
        assert "no hello" in self.refused(client, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n     ")

    def test_half_a_hello_is_refused_when_its_connection_ends(self, client: Client, bystander: Client) -> None:
        bulk = Bulk(client.bulk_address, None)
        bulk.send(BULK_HELLO.pack(BULK_MAGIC, client.secret)[:20])
        bulk.connection.shutdown(socket.SHUT_WR)
        assert b"20 of 40 bytes" in bulk.connection.recv(1000)
        bulk.close()

    def test_a_hello_that_never_comes_is_given_up(
        self, client: Client, bystander: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.daemon.bulk_socket.HELLO_TIMEOUT_S", 0.1)
        assert "no complete hello" in self.refused(client, b"hic")

    def test_one_connection_too_many_is_refused_and_may_come_when_another_has_gone(
        self, client: Client, bystander: Client
    ) -> None:
        connections = [client.bulk() for _ in range(BULK_CONNECTIONS_PER_SESSION_MAX)]
        with pytest.raises(BulkRefused, match="TOO_MANY_CALLS"):
            client.bulk()
        connections[0].close()

        def is_let_in() -> bool:
            try:
                client.bulk()
            except BulkRefused:
                return False
            return True

        wait_until(is_let_in, what="the place of the one that has gone")

    def test_a_connection_ends_with_its_session(self, daemon: ThreadedDaemon, bystander: Client) -> None:
        client = Client(daemon.target)
        idle, busy = Bulk(client.bulk_address, client.secret), Bulk(client.bulk_address, client.secret)
        busy.begin_put(KEYS[:1], [MIB])
        busy.send(b"x")
        client.close()
        for bulk in (idle, busy):
            assert bulk.is_at_end()
            bulk.close()
        wait_until(lambda: daemon.metric("hicache_calls_active", method="PutStream") == 0, what="its call has ended")


class TestLies:
    """Requests that announce what they do not keep: refused with a reason, and the connection ends."""

    def refused(self, client: Client, said: bytes) -> str:
        bulk = client.bulk()
        bulk.send(said)
        with pytest.raises(BulkRefused) as caught:
            bulk.receive_status()
        return caught.value.code

    @pytest.mark.parametrize(
        ("request_header", "code"),
        [
            (BULK_REQUEST.pack(0, 36, 1, 1000), "BAD_STREAM"),
            (b"\xff" * BULK_REQUEST.size, "BAD_STREAM"),
            (BULK_REQUEST.pack(BulkKind.GET, 0, 1, 1000), "MALFORMED"),
            (BULK_REQUEST.pack(BulkKind.GET, 113, 1, 1000), "MALFORMED"),
            (BULK_REQUEST.pack(BulkKind.PUT, 65_535, 1, 1000), "MALFORMED"),
            (BULK_REQUEST.pack(BulkKind.GET, 36, 2**32 - 1, 1000), "BATCH_TOO_LARGE"),
            (BULK_REQUEST.pack(BulkKind.PUT, 112, 16_385, 1000), "BATCH_TOO_LARGE"),
        ],
        ids=str,
    )
    def test_a_header_that_cannot_be_is_refused_before_anything_is_made_for_it(
        self, client: Client, bystander: Client, request_header: bytes, code: str
    ) -> None:
        assert self.refused(client, request_header) == code

    @pytest.mark.parametrize("kind", [BulkKind.GET, BulkKind.PUT])
    def test_more_payload_than_a_batch_may_have_is_refused(
        self, client: Client, bystander: Client, kind: BulkKind
    ) -> None:
        said = BULK_REQUEST.pack(kind, 36, 8, 1000) + b"".join(KEYS) + pack_numbers([64 * MIB] * 8)
        assert self.refused(client, said) == "BATCH_TOO_LARGE"

    def test_sizes_that_no_object_has_are_outcomes_of_their_own(self, client: Client, bystander: Client) -> None:
        wrong = [0, 64 * MIB + 1, 2**64 - 1]
        expected = [Outcome.BAD_RANGE, Outcome.TOO_LARGE, Outcome.TOO_LARGE, Outcome.OK]
        bulk = client.bulk()
        assert bulk.begin_put(KEYS[:4], [*wrong, 5]) == expected
        bulk.send_object(KEYS[3], b"right")
        assert bulk.end_put(4) == expected
        bulk.request(BulkKind.GET, KEYS[:4], [*wrong, 5])
        got = dict(bulk.receive_object(KEYS, [*wrong, 5]) for _ in range(4))
        assert [got[number] for number in range(4)] == [*expected[:3], b"right"]

    def test_more_bytes_than_were_announced_are_no_request(self, client: Client, bystander: Client) -> None:
        bulk = client.bulk()
        assert bulk.begin_put(KEYS[:1], [4]) == [Outcome.OK]
        bulk.send_object(KEYS[0], b"1234")
        bulk.send(b"5678" * 4)
        assert bulk.end_put(1) == [Outcome.OK]
        with pytest.raises(BulkRefused, match="BAD_STREAM"):
            bulk.receive_status()
        assert client.get_stream(KEYS[:1], [4]) == [b"1234"]

    def test_fewer_bytes_than_were_announced_leave_nothing(self, client: Client, bystander: Client) -> None:
        bulk = client.bulk()
        assert bulk.begin_put(KEYS[:2], [8, 8]) == [Outcome.OK] * 2
        bulk.send_object(KEYS[0], b"12345678")
        bulk.send(b"1234")
        bulk.connection.shutdown(socket.SHUT_WR)
        assert bulk.is_at_end()
        assert client.present(KEYS[1:2]) == [False]

    def test_bytes_that_do_not_match_their_checksum_spoil_that_object_alone(
        self, client: Client, bystander: Client
    ) -> None:
        for wrong in (0, payload_checksum(KEYS[1], b"12345678")):
            bulk = client.bulk()
            assert bulk.begin_put(KEYS[:2], [8, 8])[0] is Outcome.OK
            bulk.send(b"12345678" + BULK_CHECKSUM.pack(wrong))
            if not client.present(KEYS[1:2])[0]:
                bulk.send_object(KEYS[1], b"abcdefgh")
            assert bulk.end_put(2)[0] is Outcome.CORRUPT
        assert client.present(KEYS[:2]) == [False, True]

    def test_half_a_request_is_given_up(
        self, client: Client, bystander: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.daemon.bulk_connection.PATIENCE_S", 0.2)
        for said in (BULK_REQUEST.pack(BulkKind.GET, 36, 2, 1000)[:5], BULK_REQUEST.pack(BulkKind.GET, 36, 2, 1000)):
            assert self.refused(client, said) == "BAD_STREAM"


class TestTime:
    """A slow store, and calls that end before it."""

    def test_keys_that_the_store_hangs_on_are_late_alone(self, daemon: ThreadedDaemon, client: Client) -> None:
        payloads = [payload_of(number, 3 * MIB) for number in range(3)]
        assert client.put_stream(KEYS[:3], payloads) == [Outcome.OK] * 3
        stuck = daemon.backend.arm("get_into", Fault(FaultKind.LATE, keys=frozenset({stored_key(1)})))
        results = client.get_stream(KEYS[:3], [3 * MIB] * 3, timeout_s=1.0)
        assert results[1] is Outcome.DEADLINE
        assert results[0] == payloads[0]
        assert _inflight(daemon) > 0, "a thread still reads into the memory that it stands for"
        stuck.release()
        wait_until(lambda: _inflight(daemon) == 0, what="all room is given back")
        assert client.get_stream(KEYS[:3], [3 * MIB] * 3) == payloads

    def test_a_put_that_the_store_hangs_on_answers_for_each_key(self, daemon: ThreadedDaemon, client: Client) -> None:
        payloads = [payload_of(number, 5 * MIB) for number in range(2)]
        stuck = daemon.backend.arm("put", Fault(FaultKind.LATE, keys=frozenset({stored_key(1)})))
        bulk = client.bulk()
        assert bulk.begin_put(KEYS[:2], [5 * MIB] * 2, timeout_s=1.0) == [Outcome.OK] * 2
        for key, payload in zip(KEYS, payloads, strict=False):
            bulk.send_object(key, payload)
        assert bulk.end_put(2) == [Outcome.OK, Outcome.DEADLINE]
        stuck.release()
        wait_until(lambda: client.present(KEYS[1:2]) == [True], what="the late one is stored all the same")
        wait_until(lambda: _inflight(daemon) == 0, what="all room is given back")

    def test_a_session_that_ends_wakes_a_call_that_waits_for_the_store(
        self, daemon: ThreadedDaemon, bystander: Client
    ) -> None:
        stuck = daemon.backend.arm("get_into", Fault(FaultKind.LATE, times=1))
        client = Client(daemon.target)
        bulk = Bulk(client.bulk_address, client.secret)
        client.put_stream(KEYS[:1], [b"bytes"])
        bulk.request(BulkKind.GET, KEYS[:1], [5])
        assert stuck.entered.wait(20)
        client.close()
        assert bulk.is_at_end()
        bulk.close()
        wait_until(lambda: daemon.metric("hicache_calls_active", method="GetStream") == 0, what="the call has ended")
        stuck.release()

    def test_room_that_does_not_come_in_time_is_a_deadline(self, start_thread: StartThread) -> None:
        daemon = start_thread(object_bytes_max=8 * MIB, session_inflight_bytes_max=8 * MIB, inflight_bytes_max=8 * MIB)
        with Client(daemon.target) as client, Client(daemon.target) as other:
            assert client.put_stream(KEYS[:1], [payload_of(0, 8 * MIB)]) == [Outcome.OK]
            unread = client.bulk()
            unread.request(BulkKind.GET, KEYS[:1], [8 * MIB])
            wait_until(lambda: _inflight(daemon) == 8 * MIB, what="all room is taken")
            assert other.get_stream(KEYS[:1], [8 * MIB], timeout_s=0.3) == [Outcome.DEADLINE]
            unread.close()
            assert other.get_stream(KEYS[:1], [8 * MIB]) == [payload_of(0, 8 * MIB)]


def stored_key(number: int) -> bytes:
    """The name in the store of an object of the default tenant."""
    return physical_key(tenant_digest("default"), KEYS[number])


def test_a_client_that_is_killed_in_the_middle_of_both_ways_leaves_nothing_behind(
    daemon: ThreadedDaemon, client: Client
) -> None:
    client.put_stream(KEYS[:1], [payload_of(0, 16 * MIB)])
    program = (
        "import sys\n"
        "from tests.daemon.client import *\n"
        f"client = Client({daemon.target!r}, name='victim')\n"
        f"up, down = client.bulk(), client.bulk()\n"
        f"up.begin_put([{KEYS[1]!r}], [{MIB}])\n"
        "up.send(bytes(1000))\n"
        f"down.request(BulkKind.GET, [{KEYS[0]!r}], [{16 * MIB}])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    victim = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert victim.stdout is not None
    assert victim.stdout.readline() == b"ready\n"
    wait_until(lambda: _inflight(daemon) >= 16 * MIB + 1000, what="both calls hold room")
    victim.kill()
    victim.communicate()
    wait_until(lambda: _inflight(daemon) == 0, what="all room is given back")
    wait_until(lambda: daemon.metric("hicache_sessions") == 1, what="the session is over")
    assert client.present(KEYS[:2]) == [True, False]


@pytest.mark.parametrize("name", ["hicached-bulk-start-0", "hicached-bulk"])
def test_who_finds_no_thread_is_told_what_to_raise(
    daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with Client(daemon.target) as client:
        monkeypatch.setattr(threading.Thread, "start", start_others)
        with pytest.raises(Exception, match=r"hicached can't start new thread: raise the limit .*pids\.max"):
            client.get_stream([object_key(1)], [10])
        monkeypatch.undo()
        assert client.get_stream([object_key(1)], [10]) == [Outcome.ABSENT]


def test_the_first_answer_to_a_put_says_what_is_there_already(daemon: ThreadedDaemon, client: Client) -> None:
    assert client.put_stream(KEYS[:1], [b"first"]) == [Outcome.OK]
    bulk = client.bulk()
    assert bulk.begin_put(KEYS[:2], [5, 5]) == [Outcome.EXISTS, Outcome.OK]
    bulk.send_object(KEYS[1], b"other")
    assert bulk.end_put(2) == [Outcome.EXISTS, Outcome.OK]
    assert daemon.metric("hicache_transferred_bytes_total", method="PutStream") == 10


def test_many_small_objects_come_in_one_answer(client: Client) -> None:
    keys = [object_key(number) for number in range(400)]
    payloads = [payload_of(number, 1 + number % 700) for number in range(400)]
    assert client.put_stream(keys, payloads) == [Outcome.OK] * 400
    assert client.get_stream(keys, [len(payload) for payload in payloads]) == payloads


def test_a_tcp_client_is_told_the_port_on_its_host(start_thread: StartThread, folder: Path) -> None:
    tenants = folder / "tenants"
    tenants.write_text("alice token-of-alice-1234\n")
    tenants.chmod(0o600)
    daemon = start_thread(listen="127.0.0.1:0", tenants_file=str(tenants))
    with Client(daemon.ready.listen, token="token-of-alice-1234") as client:
        assert client.welcome.bulk_socket == ""
        assert daemon.ready.bulk_listen == f"127.0.0.1:{client.welcome.bulk_port}"
        assert client.put_stream(KEYS[:1], [b"bytes"]) == [Outcome.OK]
        assert client.get_stream(KEYS[:1], [5]) == [b"bytes"]


class TestStaging:
    """Buffers that are lent again."""

    def test_a_buffer_of_the_same_size_is_lent_again(self) -> None:
        staging = Staging(idle_bytes_max=100)
        buffer = staging.lend(60)
        assert staging.lend(60) is not buffer
        staging.give_back(buffer)
        assert staging.idle_bytes == 60
        assert staging.lend(60) is buffer
        assert staging.idle_bytes == 0

    def test_no_more_is_kept_than_the_bound_and_the_size_in_use_wins(self) -> None:
        staging = Staging(idle_bytes_max=100)
        for size in (30, 30, 30, 101, 50, 50, 50):
            staging.give_back(bytearray(size))
            assert staging.idle_bytes <= 100
        assert staging.idle_bytes == 100

    def test_threads_never_share_a_buffer(self) -> None:
        staging = Staging(idle_bytes_max=1000)
        lent: set[int] = set()
        lock = threading.Lock()
        clashes: list[int] = []

        def use() -> None:
            for _ in range(500):
                buffer = staging.lend(10)
                with lock:
                    clashes.extend([id(buffer)] if id(buffer) in lent else [])
                    lent.add(id(buffer))
                with lock:
                    lent.discard(id(buffer))
                staging.give_back(buffer)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert clashes == []


def test_an_answer_without_objects_is_a_status_alone(client: Client, memory: Memory) -> None:
    bulk = client.bulk()
    region = BULK_REGION.pack(client.attach(memory).region_id)
    for kind in BulkKind:
        bulk.send(BULK_REQUEST.pack(kind, 0, 0, 1000) + (region if kind in REGION_KINDS else b""))
        bulk.receive_status()
    bulk.receive_status()
    bulk.request(BulkKind.GET, KEYS[:1], [1])
    assert bulk.receive(BULK_OBJECT.size) == BULK_OBJECT.pack(0, Outcome.ABSENT)
