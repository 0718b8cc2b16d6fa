"""What a session holds is freed when it ends, however it ends, and never while a thread still touches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.checksum import payload_checksum
from hicache.errors import BackendError
from hicache.outcome import Outcome
from hicache.tenancy import tenant_digest
from hicache.wire import hicached_pb2 as pb
from hicache.wire.bulk import BULK_CHECKSUM
from hicache.wire.protocol import pack_keys
from tests.daemon.client import Client, refusal_code
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import CALL_S, Memory, object_key, payload_of
from tests.daemon.rig import http_get, scrape, wait_health, wait_until

StartThread = Callable[..., ThreadedDaemon]

PAGE = 64 * 1024
SOON_S = 0.3  # a deadline that is meant to pass
KEY = object_key(1)


def test_a_late_answer_keeps_the_memory_until_its_bytes_have_arrived(daemon: ThreadedDaemon, client: Client) -> None:
    client.put_stream([KEY], [payload_of(1, PAGE)])
    with Memory(PAGE) as memory:
        attachment = client.attach(memory)
        late = daemon.backend.arm("get_into", Fault(FaultKind.LATE, times=1))

        assert client.get(attachment.region_id, [KEY], [0], [PAGE], timeout_s=SOON_S) == [Outcome.DEADLINE]
        attachment.half_close()
        assert not attachment.is_at_end(within_s=SOON_S), "a thread may still write into the memory"
        assert daemon.metric("hicache_regions") == 1
        late.release()

        assert attachment.is_at_end(within_s=CALL_S)
        assert memory.bytes[:] == payload_of(1, PAGE), "the late bytes landed before the end of file, not after"
        wait_until(lambda: daemon.metric("hicache_regions") == 0, what="the region is gone")


def test_a_put_in_progress_keeps_the_memory_too(daemon: ThreadedDaemon, client: Client) -> None:
    with Memory(PAGE) as memory:
        attachment = client.attach(memory)
        late = daemon.backend.arm("put", Fault(FaultKind.LATE, times=1))

        assert client.put(attachment.region_id, [KEY], [0], [PAGE], timeout_s=SOON_S) == [Outcome.DEADLINE]
        attachment.close()
        wait_until(late.entered.is_set, what="the put is in the backend")
        assert daemon.metric("hicache_regions") == 1
        assert daemon.metric("hicache_inflight_bytes") == PAGE
        late.release()

        wait_until(lambda: daemon.metric("hicache_regions") == 0, what="the region is gone")
        assert daemon.metric("hicache_inflight_bytes") == 0


def test_a_detached_idle_region_ends_at_once_and_a_new_one_can_be_attached(client: Client, memory: Memory) -> None:
    for _ in range(20):
        attachment = client.attach(memory)
        attachment.half_close()
        assert attachment.is_at_end(within_s=CALL_S)


def test_anything_said_after_the_hello_detaches(client: Client, memory: Memory) -> None:
    attachment = client.attach(memory)
    attachment.connection.sendall(b"chatter")
    assert attachment.is_at_end(within_s=CALL_S)


def test_the_end_of_a_session_detaches_its_memory(daemon: ThreadedDaemon, memory: Memory) -> None:
    client = Client(daemon.target)
    attachment = client.attach(memory)
    client.stream.cancel()
    assert attachment.is_at_end(within_s=CALL_S)
    client.close()


def test_one_stuck_thread_holds_up_nobody_else(daemon: ThreadedDaemon, client: Client, memory: Memory) -> None:
    keys = [object_key(number) for number in range(10)]
    client.put_stream(keys, [payload_of(number, 100) for number in range(10)])
    region = client.attach(memory).region_id
    stuck = daemon.backend.arm("get_into", Fault(FaultKind.LATE, keys=frozenset([_physical(client, keys[0])])))

    assert client.get(region, keys[:1], [0], [100], timeout_s=SOON_S) == [Outcome.DEADLINE]
    wait_until(stuck.entered.is_set, what="the first get is stuck")
    with Client(daemon.target) as other, Memory(4096) as others_memory:
        others_region = other.attach(others_memory).region_id
        for number in range(1, 10):
            assert other.get(others_region, [keys[number]], [0], [100]) == [Outcome.OK]
            assert others_memory.bytes[:100] == payload_of(number, 100)
    assert http_get(daemon.ready.http, "/healthz") == (200, "ok\n")
    stuck.release()


def test_with_every_thread_stuck_calls_still_end_at_their_deadlines(daemon: ThreadedDaemon, client: Client) -> None:
    client.put_stream([KEY], [b"bytes"])
    stuck = daemon.backend.arm("get_into", Fault(FaultKind.LATE))
    with Memory(PAGE) as memory:
        attachment = client.attach(memory)
        for _ in range(5):  # more than there are threads
            started = time.monotonic()
            assert client.get(attachment.region_id, [KEY], [0], [5], timeout_s=SOON_S) == [Outcome.DEADLINE]
            assert time.monotonic() - started < SOON_S + 1
        assert client.get_stream([KEY], [5], timeout_s=SOON_S) == [Outcome.DEADLINE]
        assert client.present([KEY]) == [True], "lookups do not wait for transfers"

        stuck.release()
        assert client.get(attachment.region_id, [KEY], [0], [5]) == [Outcome.OK]
        wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="all bytes are given back")


def test_work_that_no_thread_has_started_by_the_deadline_never_runs(daemon: ThreadedDaemon, client: Client) -> None:
    first = daemon.backend.arm("put", Fault(FaultKind.LATE))
    with Memory(PAGE) as memory:
        region = client.attach(memory).region_id
        for number in range(5):
            outcomes = client.put(region, [object_key(number)], [0], [8], timeout_s=SOON_S)
            assert outcomes == [Outcome.DEADLINE]
        wait_until(lambda: daemon.metric("hicache_storage_queued_chunks") == 0, what="the queue is empty again")
        first.release()
        wait_until(lambda: daemon.metric("hicache_storage_busy_threads") == 0, what="the stuck puts have ended")
    assert sum(client.present([object_key(number) for number in range(5)])) == daemon.config.io_threads


def test_a_session_has_a_bound_on_calls_at_a_time(daemon: ThreadedDaemon, client: Client) -> None:
    client.put_stream([KEY], [b"12345678"])
    stuck = daemon.backend.arm("delete", Fault(FaultKind.LATE))
    packed, key_bytes = pack_keys([KEY])
    request = pb.KeysRequest(session_secret=client.secret, keys=packed, key_bytes=key_bytes)
    calls = [client.stub.Delete.future(request, timeout=CALL_S) for _ in range(64)]
    wait_until(lambda: daemon.metric("hicache_calls_active", method="Delete") == 64, what="64 calls run")

    with pytest.raises(grpc.RpcError) as caught:
        client.present([KEY])
    assert refusal_code(caught.value) == "TOO_MANY_CALLS"
    with Client(daemon.target) as other:
        assert other.present([object_key(1)]) == [False]
    stuck.release()
    assert {tuple(call.result().outcomes) for call in calls} == {(Outcome.OK,), (Outcome.ABSENT,)}


def test_more_bytes_than_the_budget_wait_for_their_turn(start_thread: StartThread) -> None:
    daemon = start_thread(object_bytes_max=PAGE, session_inflight_bytes_max=PAGE, inflight_bytes_max=2 * PAGE)
    keys = [object_key(number) for number in range(12)]
    peak = [0.0]

    def run(first: int) -> None:
        with Client(daemon.target) as client, Memory(4 * PAGE) as memory:
            region = client.attach(memory).region_id
            mine = keys[first : first + 4]
            assert client.put(region, mine, [n * PAGE for n in range(4)], [PAGE] * 4) == [Outcome.OK] * 4
            peak[0] = max(peak[0], daemon.metric("hicache_inflight_bytes"))
            assert client.put_stream(mine, [bytes(PAGE)] * 4) == [Outcome.EXISTS] * 4

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, (0, 4, 8)))
    assert peak[0] <= 2 * PAGE
    wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="all bytes are given back")


def test_the_end_of_a_session_releases_its_leases(daemon: ThreadedDaemon, client: Client) -> None:
    client.put_stream([KEY], [b"bytes"])
    with Client(daemon.target) as leaver:
        assert leaver.lookup([KEY], lease_ms=60_000)[1] > 0
        assert scrape(daemon.ready.http)["hicache_store_leased_objects"] == 1
    wait_until(lambda: scrape(daemon.ready.http)["hicache_store_leased_objects"] == 0, what="the lease is released")


def test_a_lease_is_renewed_and_released_by_its_own_session_only(daemon: ThreadedDaemon, client: Client) -> None:
    client.put_stream([KEY], [b"bytes"])
    assert client.lookup([KEY]) == ([Outcome.OK], 0)
    _, lease = client.lookup([KEY], lease_ms=60_000)
    with Client(daemon.target) as other:
        assert not other.lease(lease, lease_ms=1000)
        assert not other.lease(lease, lease_ms=0)
    assert client.lease(lease, lease_ms=60_000)
    assert client.lease(lease, lease_ms=0)
    assert not client.lease(lease, lease_ms=60_000), "a released lease does not come back"


def test_a_storage_error_is_an_outcome_and_is_counted(daemon: ThreadedDaemon, client: Client, memory: Memory) -> None:
    region = client.attach(memory).region_id
    daemon.backend.arm("put", Fault(FaultKind.EIO, times=1))
    assert client.put(region, [KEY], [0], [8]) == [Outcome.IO_ERROR]
    daemon.backend.arm("put", Fault(FaultKind.ENOSPC))
    assert client.put_stream([KEY], [b"x"]) == [Outcome.NO_SPACE]
    daemon.backend.disarm()
    assert client.put_stream([KEY], [b"x"]) == [Outcome.OK]
    assert daemon.metric("hicache_items_total", method="Put", outcome="io_error") == 1


def test_an_object_may_come_a_byte_at_a_time(client: Client) -> None:
    payload = payload_of(3, 100)
    bulk = client.bulk()
    assert bulk.begin_put([KEY], [100]) == [Outcome.OK]
    for position in range(100):
        bulk.send(payload[position : position + 1])
    bulk.send(BULK_CHECKSUM.pack(payload_checksum(KEY, payload)))
    assert bulk.end_put(1) == [Outcome.OK]
    assert client.get_stream([KEY], [100]) == [payload]


def _physical(client: Client, key: bytes) -> bytes:
    return tenant_digest(client.welcome.tenant) + key


def test_a_lookup_that_is_stuck_is_answered_at_its_deadline_and_its_late_lease_is_given_back(
    daemon: ThreadedDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put_stream([KEY], [b"bytes"])
    look_up, opened = daemon.store.lookup, threading.Event()

    def slow(keys: Sequence[bytes], *, lease_s: float = 0.0) -> tuple[list[Outcome], int]:
        assert opened.wait(CALL_S)
        return look_up(keys, lease_s=lease_s)

    monkeypatch.setattr(daemon.store, "lookup", slow)
    for _ in range(3):  # one more than there are control threads
        assert client.lookup([KEY], lease_ms=60_000, timeout_s=SOON_S) == ([Outcome.DEADLINE], 0)
    opened.set()
    wait_until(lambda: daemon.store.stats().lookup_hits == 2, what="the stuck lookups have ended")
    wait_until(lambda: daemon.store.stats().holds.leases == 0, what="nobody wants their leases any more")
    assert client.lookup([KEY], lease_ms=60_000)[0] == [Outcome.OK]


def test_a_lookup_that_fails_as_a_whole_is_an_io_error(
    daemon: ThreadedDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BackendError("the medium is gone")

    monkeypatch.setattr(daemon.store, "lookup", broken)
    monkeypatch.setattr(daemon.store, "delete", broken)
    monkeypatch.setattr(daemon.store, "usage", broken)
    assert client.lookup([KEY]) == ([Outcome.IO_ERROR], 0)
    assert client.delete([KEY]) == [Outcome.IO_ERROR]
    with pytest.raises(grpc.RpcError):
        client.stats()
    wait_health(daemon.ready.http, 503)
    assert http_get(daemon.ready.http, "/metrics")[0] == 200
    assert daemon.metric("hicache_storage_errors_total") == 3
