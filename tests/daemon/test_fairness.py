"""Nobody takes what belongs to others: room, the event loop, and the way in are shared whatever one client does."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Never, SupportsIndex

import grpc
import pytest

from hicache.daemon.batches import read_keys
from hicache.daemon.budget import ByteBudget, InflightBudgets
from hicache.daemon.config import DaemonConfig
from hicache.daemon.first_messages import FirstMessages
from hicache.daemon.namespaces import read_descriptor
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session
from hicache.daemon.tenants import Tenant
from hicache.daemon.turns import LARGE_BATCH_KEYS, Turns
from hicache.outcome import Outcome
from hicache.wire.bulk import BulkKind
from hicache.wire.hicached_pb2_grpc import HiCachedStub
from hicache.wire.protocol import NAMESPACE_DIGEST_BYTES, channel_options
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import CALL_S, Bulk, BulkRefused, object_key, payload_of
from tests.daemon.rig import wait_until

StartThread = Callable[..., ThreadedDaemon]

KIB = 1024
MIB = 1024 * KIB
ALICE, BOB = Tenant.named("alice"), Tenant.named("bob")
TOKENS = {"alice": "token-of-alice-1234", "bob": "token-of-bob-123456"}
OBJECT = 8 * MIB  # more than the sockets take from the daemon for a client that does not read


@pytest.fixture
def tenants_file(folder: Path) -> str:
    path = folder / "tenants"
    path.write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
    path.chmod(0o600)
    return str(path)


def soon() -> float:
    return asyncio.get_running_loop().time() + 30


def session_of(tenant: Tenant, number: int = 1) -> Session:
    return Session(number, tenant, "test", ByteBudget(MIB))


class TestUnreadStreams:
    """A client that asks for objects and does not read them."""

    @pytest.mark.parametrize("bound", ["call_timeout", "patience"])
    def test_the_room_of_a_stream_that_nobody_reads_comes_back(
        self, start_thread: StartThread, monkeypatch: pytest.MonkeyPatch, bound: str
    ) -> None:
        if bound == "patience":
            monkeypatch.setattr("hicache.daemon.bulk_connection.PATIENCE_S", 0.2)
        daemon = start_thread(call_timeout_s_max=0.5 if bound == "call_timeout" else 60.0)
        keys = [object_key(number) for number in range(4)]
        with Client(daemon.target) as client, Client(daemon.target) as reader:
            for number, key in enumerate(keys):
                assert client.put_stream([key], [payload_of(number, OBJECT)]) == [Outcome.OK]
            unread = [client.bulk() for _ in range(3)]
            for bulk in unread:
                bulk.request(BulkKind.GET, keys, [OBJECT] * 4, timeout_s=0)
            wait_until(lambda: daemon.metric("hicache_inflight_bytes") > 0, what="a stream holds room")
            wait_until(
                lambda: daemon.metric("hicache_calls_total", method="GetStream", result="deadline") == 3,
                what="the unread streams are given up",
            )
            assert daemon.metric("hicache_inflight_bytes") == 0
            assert daemon.metric("hicache_calls_active", method="GetStream") == 0
            for bulk in unread:
                with pytest.raises(ConnectionError):
                    bulk.receive(4 * OBJECT)
            assert reader.get_stream(keys[:1], [OBJECT]) == [payload_of(0, OBJECT)]


class TestUploads:
    """Room is taken by what is sent, not by what is announced."""

    def starving(self, client: Client, number: int) -> Bulk:
        """An upload that announces an object of 1 MiB, and sends a byte of it."""
        bulk = client.bulk()
        assert bulk.begin_put([object_key(number)], [MIB]) == [Outcome.OK]
        bulk.send(b"x")
        return bulk

    def test_uploads_of_a_byte_take_a_byte_and_leave_room_for_others(self, start_thread: StartThread) -> None:
        daemon = start_thread(object_bytes_max=MIB, session_inflight_bytes_max=4 * MIB, inflight_bytes_max=4 * MIB)
        with Client(daemon.target) as client, Client(daemon.target) as second, Client(daemon.target) as other:
            uploads = [self.starving(client if number % 2 else second, number) for number in range(16)]
            wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 16, what="all have sent their byte")
            assert other.put_stream([object_key(99)], [payload_of(99, MIB)]) == [Outcome.OK]
            assert other.get_stream([object_key(99)], [MIB]) == [payload_of(99, MIB)]
            for bulk in uploads:
                bulk.close()
            wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="all bytes are given back")

    def test_an_upload_that_says_nothing_more_is_ended(
        self, start_thread: StartThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.daemon.bulk_connection.PATIENCE_S", 0.2)
        daemon = start_thread()
        with Client(daemon.target) as client:
            bulk = self.starving(client, 1)
            with pytest.raises(BulkRefused, match="did not come within"):
                bulk.end_put(1)
            assert client.present([object_key(1)]) == [False]
            wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="its byte is given back")

    def test_an_upload_that_goes_on_byte_by_byte_ends_at_its_deadline(self, start_thread: StartThread) -> None:
        daemon = start_thread()
        with Client(daemon.target) as client:
            bulk = client.bulk()
            assert bulk.begin_put([object_key(1)], [MIB], timeout_s=0.3) == [Outcome.OK]

            def trickle() -> None:
                for _ in range(MIB):
                    bulk.send(b"x")
                    threading.Event().wait(0.005)

            with pytest.raises(OSError, match=r"Broken pipe|reset"):
                trickle()
            assert client.present([object_key(1)]) == [False]
            assert daemon.metric("hicache_calls_total", method="PutStream", result="deadline") == 1
            wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="its bytes are given back")

    @pytest.mark.parametrize("session_bytes", [MIB, 256 * KIB])
    def test_uploads_that_need_more_room_than_there_is_do_not_wait_for_each_other(
        self, start_thread: StartThread, session_bytes: int
    ) -> None:
        daemon = start_thread(
            object_bytes_max=256 * KIB,
            session_inflight_bytes_max=session_bytes,
            inflight_bytes_max=max(session_bytes, MIB),
        )
        with Client(daemon.target) as client, Client(daemon.target) as second, ThreadPoolExecutor(16) as pool:

            def put(number: int) -> list[Outcome]:
                keys = [object_key(2 * number), object_key(2 * number + 1)]
                payloads = [payload_of(2 * number, 256 * KIB), payload_of(2 * number + 1, 200 * KIB)]
                return (client if number % 3 else second).put_stream(keys, payloads)

            assert list(pool.map(put, range(16))) == [[Outcome.OK] * 2] * 16
        wait_until(lambda: daemon.metric("hicache_inflight_bytes") == 0, what="all bytes are given back")


class TestBudgets:
    """Room of sessions within that of tenants within that of the daemon."""

    def test_one_tenant_leaves_the_others_their_half(self) -> None:
        budgets = InflightBudgets(total_bytes=100, tenant_bytes=50, session_bytes=40)
        first, second = budgets.of_session(ALICE), budgets.of_session(ALICE)
        own, rest = first.try_acquire(40), second.try_acquire(10)
        assert own is not None
        assert rest is not None
        assert second.try_acquire(1) is None
        other = budgets.of_session(BOB).try_acquire(40)
        assert other is not None
        assert budgets.total.used_bytes == 90
        own.drop()
        more = second.try_acquire(1)
        assert more is not None
        for ticket in (rest, other, more):
            ticket.drop()
        assert budgets.total.used_bytes == 0

    def test_a_session_may_not_move_more_than_its_tenant(self) -> None:
        budgets = InflightBudgets(total_bytes=100, tenant_bytes=50, session_bytes=80)
        assert budgets.session_bytes == budgets.of_session(ALICE).limit_bytes == 50

    def test_bytes_are_taken_only_with_room_to_spare_at_every_level(self) -> None:
        parent = ByteBudget(10)
        child = ByteBudget(20, parent=parent)
        assert child.try_acquire(4, spare_bytes=7) is None
        ticket = child.try_acquire(4, spare_bytes=6)
        assert ticket is not None
        assert (parent.used_bytes, child.used_bytes) == (4, 4)
        ticket.drop()

    def test_two_tickets_that_became_one_go_back_together(self) -> None:
        parent = ByteBudget(10)
        child = ByteBudget(10, parent=parent)
        ticket, more = child.try_acquire(3), child.try_acquire(4)
        assert ticket is not None
        assert more is not None
        ticket.absorb(more)
        assert (parent.used_bytes, child.used_bytes) == (7, 7)
        ticket.drop()
        assert (parent.used_bytes, child.used_bytes) == (0, 0)

    def test_a_tenant_at_its_bound_does_not_hold_up_another(self, start_thread: StartThread, tenants_file: str) -> None:
        daemon = start_thread(
            tenants_file=tenants_file,
            object_bytes_max=OBJECT,
            session_inflight_bytes_max=2 * OBJECT,
            inflight_bytes_max=2 * OBJECT,
        )
        key, sizes = object_key(1), [OBJECT]
        with Client(daemon.target, token=TOKENS["alice"]) as alice, Client(daemon.target, token=TOKENS["bob"]) as bob:
            assert alice.put_stream([key], [payload_of(1, OBJECT)]) == [Outcome.OK]
            unread = [alice.bulk() for _ in range(4)]
            for bulk in unread:
                bulk.request(BulkKind.GET, [key], sizes)
            wait_until(lambda: daemon.metric("hicache_inflight_bytes") == OBJECT, what="alice is at her bound")
            assert bob.put_stream([key], [payload_of(2, OBJECT)]) == [Outcome.OK]
            assert bob.get_stream([key], sizes) == [payload_of(2, OBJECT)]
            assert daemon.metric("hicache_inflight_bytes") == OBJECT, "alice still held all that she may"
            for bulk in unread:
                bulk.close()


class Unsplittable(bytes):
    """A message whose keys nobody may look at."""

    def __getitem__(self, _: SupportsIndex | slice) -> Never:
        raise AssertionError("split")


class TestLargeBatches:
    """Many keys are refused, or passed on, without a look at each."""

    @pytest.mark.parametrize(
        ("key_bytes", "code"), [(1, "BATCH_TOO_LARGE"), (3, "MALFORMED"), (0, "MALFORMED"), (113, "MALFORMED")]
    )
    def test_too_many_keys_are_refused_without_splitting_them(self, key_bytes: int, code: str) -> None:
        with pytest.raises(Refusal) as caught:
            read_keys(Unsplittable(1 << 20), key_bytes, session_of(ALICE), DaemonConfig())
        assert caught.value.code == code

    @pytest.mark.parametrize(
        "count", [0, 1, LARGE_BATCH_KEYS - 1, LARGE_BATCH_KEYS, LARGE_BATCH_KEYS + 1, 3 * LARGE_BATCH_KEYS + 5]
    )
    def test_the_physical_keys_are_all_keys_of_the_request_behind_the_tenant(self, count: int) -> None:
        session, keys = session_of(ALICE), [object_key(number) for number in range(count)]
        physical = read_keys(b"".join(keys), 36 if keys else 0, session, DaemonConfig())
        expected = [session.physical_key(key) for key in keys]
        assert list(physical) == expected
        assert list(physical[1:]) == expected[1:]
        assert len(physical) == count

    def test_the_keys_of_a_lookup_are_not_even_split(self) -> None:
        assert len(read_keys(Unsplittable(16_000 * 36), 36, session_of(ALICE), DaemonConfig())) == 16_000

    async def test_of_one_session_one_large_batch_goes_on_at_a_time_and_small_ones_do_not_wait(self) -> None:
        turns, session, other = Turns(), session_of(ALICE), session_of(BOB)
        async with turns.one_of(session, LARGE_BATCH_KEYS + 1, deadline=soon()):
            with pytest.raises(TimeoutError):
                async with turns.one_of(session, LARGE_BATCH_KEYS + 1, deadline=asyncio.get_running_loop().time()):
                    raise AssertionError("two at a time")
            async with turns.one_of(session, LARGE_BATCH_KEYS, deadline=soon()):
                pass
            async with turns.one_of(other, LARGE_BATCH_KEYS + 1, deadline=soon()):
                pass
        async with turns.one_of(session, LARGE_BATCH_KEYS + 1, deadline=soon()):
            pass

    def test_a_large_batch_is_answered_in_order(self, client: Client) -> None:
        keys = [object_key(number) for number in range(2 * LARGE_BATCH_KEYS + 7)]
        there = [0, LARGE_BATCH_KEYS - 1, LARGE_BATCH_KEYS, 2 * LARGE_BATCH_KEYS, len(keys) - 1]
        client.put_stream([keys[number] for number in there], [payload_of(number, 8) for number in there])
        expected = [number in there for number in range(len(keys))]
        assert client.present(keys) == expected
        results = client.get_stream(keys, [8] * len(keys))
        assert sorted(result for result in results if isinstance(result, bytes)) == sorted(
            payload_of(number, 8) for number in there
        )
        assert [outcome is Outcome.OK for outcome in client.delete(keys)] == expected


def test_a_deeply_nested_descriptor_is_a_bad_namespace() -> None:
    for raw in (b"\x81\xa1a" + b"\x91" * 60_000 + b"\x01", b"\x81\xa1a" * 20_000 + b"\x01"):
        with pytest.raises(Refusal, match="BAD_NAMESPACE"):
            read_descriptor(raw, bytes(NAMESPACE_DIGEST_BYTES))


class Mute:
    """The context of a stream whose client says nothing until it is told to."""

    def __init__(self) -> None:
        self.said: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def read(self) -> object:
        return await self.said


class TestFirstMessages:
    """Streams of clients who have not said who they are."""

    async def test_the_one_that_waits_longest_makes_way_for_the_newest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hicache.daemon.first_messages.SILENT_STREAMS_MAX", 2)
        monkeypatch.setattr("hicache.daemon.first_messages.FIRST_MESSAGE_S", 30.0)
        first_messages = FirstMessages()
        contexts: list[Any] = [Mute() for _ in range(4)]  # Any: only what is used of a context
        waiting = [asyncio.create_task(first_messages.next(context)) for context in contexts]
        for dropped in waiting[:2]:
            with pytest.raises(Refusal, match="TOO_MANY_SESSIONS"):
                await dropped
        for context, task in zip(contexts[2:], waiting[2:], strict=True):
            context.said.set_result("hello")
            assert await task == "hello"

    async def test_silence_is_refused_in_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hicache.daemon.first_messages.FIRST_MESSAGE_S", 0.0)
        context: Any = Mute()
        with pytest.raises(Refusal, match="MALFORMED"):
            await FirstMessages().next(context)

    def test_silent_streams_of_strangers_keep_nobody_out(
        self, daemon: ThreadedDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.daemon.first_messages.SILENT_STREAMS_MAX", 2)
        never: queue.SimpleQueue[None] = queue.SimpleQueue()

        def silence() -> Iterator[Any]:
            never.get()
            yield from ()

        with grpc.insecure_channel(daemon.target, options=channel_options()) as channel:
            stub = HiCachedStub(channel)
            hellos = [stub.Session(silence(), timeout=CALL_S) for _ in range(3)]
            wait_until(
                lambda: daemon.metric("hicache_calls_total", method="Session", result="TOO_MANY_SESSIONS") == 1,
                what="the oldest made way",
            )
            with Client(daemon.target) as newcomer:
                assert newcomer.present([object_key(1)]) == [False]
            for _ in hellos:
                never.put(None)


def test_the_numbers_of_a_tenant_show_nothing_of_the_others(start_thread: StartThread, tenants_file: str) -> None:
    daemon = start_thread(tenants_file=tenants_file)
    with Client(daemon.target, token=TOKENS["alice"]) as alice, Client(daemon.target, token=TOKENS["bob"]) as bob:
        before = bob.stats()
        assert alice.put_stream([object_key(1)], [b"x" * 5000]) == [Outcome.OK]
        with Client(daemon.target, token=TOKENS["alice"]):
            assert bob.stats() == before
            assert (before.used_bytes, before.objects, before.sessions) == (0, 0, 1)
            own = alice.stats()
        assert (own.used_bytes, own.objects, own.sessions) == (5000, 1, 2)


def test_a_lone_tenant_sees_the_whole_store(daemon: ThreadedDaemon, client: Client) -> None:
    assert client.put_stream([object_key(1)], [b"x" * 5000]) == [Outcome.OK]
    stats = client.stats()
    assert stats.used_bytes > stats.tenant_used_bytes == 5000, "with overhead"
