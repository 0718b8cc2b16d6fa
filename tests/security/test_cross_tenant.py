"""One tenant tries everything that there is with what belongs to another; the owner's try beside it succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from itertools import takewhile
from pathlib import Path

import grpc
import pytest
from aiohttp import web

from hicache.admin.client import Admin
from hicache.admin.verbs import EXPORT, NAMESPACE_DROP, NAMESPACES, TENANT_ERASE
from hicache.daemon.admin_api import AdminError
from hicache.daemon.authority import Caller
from hicache.daemon.background import STREAMS_MAX, STREAMS_OF_TENANTS_MAX, Background, write
from hicache.daemon.tier_fills import TierFill
from hicache.errors import AdminRefused
from hicache.outcome import Outcome
from hicache.tenancy import tenant_digest
from hicache.wire import hicached_pb2 as pb
from hicache.wire.bulk import BulkKind
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import ALICE, BOB

KEYS = [object_key(number) for number in range(2)]
PAYLOADS = [payload_of(number, 5000) for number in range(2)]
SIZES = [5000, 5000]
OFFSETS = [0, 5000]


class Two:
    """alice has objects, a lease, a region and a session; bob wants them."""

    def __init__(self, daemon: ThreadedDaemon, alice: Client, bob: Client, memory: Memory) -> None:
        self.daemon, self.alice, self.bob, self.memory = daemon, alice, bob, memory
        assert alice.put_stream(KEYS, PAYLOADS) == [Outcome.OK] * 2
        self.region = alice.attach(memory).region_id
        _, self.lease = alice.lookup(KEYS, lease_ms=60_000)


@pytest.fixture
def two(start_thread: Callable[..., ThreadedDaemon], two_tenants: str, memory: Memory) -> Iterator[Two]:
    daemon = start_thread(tenants_file=two_tenants)
    with Client(daemon.target, token=ALICE) as alice, Client(daemon.target, token=BOB) as bob:
        yield Two(daemon, alice, bob, memory)


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory(1 << 20) as mapped:
        yield mapped


def lookup(two: Two, who: Client) -> object:
    return who.present(KEYS)


def delete(two: Two, who: Client) -> object:
    return who.delete(KEYS)


def lease(two: Two, who: Client) -> object:
    return who.lease(two.lease, lease_ms=1000)


def pin(two: Two, who: Client) -> object:
    return who.pin(KEYS, pin_ms=1000)


def watch(two: Two, who: Client) -> object:
    """Whether keys come before the snapshot is complete."""
    return any(event.keys for event in takewhile(lambda event: event.kind != pb.WatchEvents.SYNCED, _snapshot(who)))


def _snapshot(who: Client) -> Iterator[pb.WatchEvents]:
    return who.watch(snapshot=True)


def stats(two: Two, who: Client) -> object:
    reply = who.stats()
    return (reply.objects, reply.used_bytes, reply.tenant_objects, reply.sessions)


def report(two: Two, who: Client) -> object:
    """What a report changes of what alice has reported."""
    tiers = [pb.TierFill(name="l1", used_bytes=1, capacity_bytes=2)]
    who.stub.Report(pb.ReportRequest(session_secret=who.secret, tiers=tiers), timeout=10)
    [hers] = [session for session in two.daemon.daemon.drain._sessions or () if session.tenant.name == "alice"]
    return dict(hers.tier_fills)


def get_stream(two: Two, who: Client) -> object:
    return who.get_stream(KEYS, SIZES)


def put_stream(two: Two, who: Client) -> object:
    """EXISTS would tell that somebody has it."""
    return who.put_stream(KEYS, PAYLOADS)


def load(two: Two, who: Client) -> object:
    return _refusal(lambda: who.get(two.region, KEYS, OFFSETS, SIZES))


def store(two: Two, who: Client) -> object:
    return _refusal(lambda: who.put(two.region, KEYS, OFFSETS, SIZES))


def session(two: Two, who: Client) -> object:
    """A second session: what it is told of who else is there."""
    with Client(two.daemon.target, token=ALICE if who is two.alice else BOB) as other:
        return (other.welcome.tenant, other.stats().sessions)


OK, ABSENT, EXISTS = Outcome.OK, Outcome.ABSENT, Outcome.EXISTS
ATTEMPTS = {
    # what is tried: what bob gets, and what alice gets
    lookup: ([False] * 2, [True] * 2),
    lease: (False, True),
    pin: ([ABSENT] * 2, [OK] * 2),
    watch: (False, True),
    stats: ((0, 0, 0, 1), (2, 10_000, 2, 1)),
    report: ({}, {"l1": TierFill(1, 2)}),
    get_stream: ([ABSENT] * 2, PAYLOADS),
    put_stream: ([OK] * 2, [EXISTS] * 2),
    load: ("UNKNOWN_REGION", [OK] * 2),
    store: ("UNKNOWN_REGION", [EXISTS] * 2),
    session: (("bob", 2), ("alice", 2)),
    delete: ([ABSENT] * 2, [OK] * 2),
}


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=[attempt.__name__ for attempt in ATTEMPTS])
def test_br_024_what_is_anothers_is_as_if_it_were_not_there(two: Two, attempt: Callable[[Two, Client], object]) -> None:
    for_bob, for_alice = ATTEMPTS[attempt]
    assert attempt(two, two.bob) == for_bob
    assert attempt(two, two.alice) == for_alice, "the control"


def test_every_call_that_there_is_has_an_attempt() -> None:
    tried = {attempt.__name__.replace("_", "").lower() for attempt in ATTEMPTS}
    methods = {method.name.lower() for method in pb.DESCRIPTOR.services_by_name["HiCached"].methods}
    kinds = {kind.name.lower() for kind in BulkKind}
    assert methods <= tried
    assert kinds <= {name.removesuffix("stream") for name in tried}


def test_a_session_secret_of_another_tenant_is_all_that_authority_is_and_a_wrong_one_is_none(two: Two) -> None:
    for secret, code in (
        (b"x" * 32, "UNKNOWN_SESSION"),
        (b"", "UNKNOWN_SESSION"),
        (two.alice.secret + b"x", "UNKNOWN_SESSION"),
    ):
        with pytest.raises(grpc.RpcError, match=code):
            two.bob.stub.Stats(pb.StatsRequest(session_secret=secret), timeout=10)
    assert two.alice.stats().tenant_objects == 2


def test_verbs_about_one_tenant_are_for_that_one(two: Two) -> None:
    alice, bob = (Admin(two.daemon.config.admin_socket, token=token) for token in (ALICE, BOB))
    [own] = alice.ask(NAMESPACES, names={"tenant": "alice"}).namespaces
    names = {"tenant": "alice", "namespace": own.namespace}
    for verb in (NAMESPACES, NAMESPACE_DROP, EXPORT):
        with pytest.raises(AdminRefused, match="not for tenant bob"), bob.open(verb, names=names) as answer:
            b"".join(answer)
    with alice.open(EXPORT, names=names) as answer:
        assert b"".join(answer).startswith(b"HICACHEX")
    assert two.alice.present(KEYS) == [True] * 2


def test_whether_a_tenant_goes_on_is_not_its_own_to_say(two: Two) -> None:
    alice = Admin(two.daemon.config.admin_socket, token=ALICE)
    names = {"tenant": "alice", "remove": "1"}
    with pytest.raises(AdminRefused, match="ask as an operator"), alice.open(TENANT_ERASE, names=names) as answer:
        b"".join(answer)
    assert two.alice.present(KEYS) == [True] * 2
    del names["remove"]
    with alice.open(TENANT_ERASE, names=names) as answer:
        b"".join(answer)
    assert two.alice.present(KEYS) == [False] * 2


def test_a_name_that_looks_like_anothers_digest_is_a_name(
    start_thread: Callable[..., ThreadedDaemon], folder: Path
) -> None:
    file = folder / "tenants"
    file.write_text(f"alice {ALICE}\n{tenant_digest('alice').hex()} {BOB}\n")
    daemon = start_thread(tenants_file=str(file))
    with Client(daemon.target, token=ALICE) as client:
        assert client.put_stream(KEYS, [b"hers", b"too"]) == [Outcome.OK] * 2
    double = Admin(daemon.config.admin_socket, token=BOB)
    assert double.ask(NAMESPACES, names={"tenant": tenant_digest("alice").hex()}).namespaces == []
    [own] = Admin(daemon.config.admin_socket, token=ALICE).ask(NAMESPACES, names={"tenant": "alice"}).namespaces
    assert own.objects == 2, "and a control"


def test_long_jobs_of_tenants_leave_room_for_others_and_for_operators() -> None:
    async def fill() -> None:
        background = Background()
        async with AsyncExitStack() as running:

            async def begin(caller: Caller) -> None:
                await running.enter_async_context(background.steps("export", iter([1]), caller=caller))

            alice, bob, carol = (Caller(f"tenant {name}", tenant=name) for name in ("alice", "bob", "carol"))
            operator = Caller("root", is_operator=True)
            await begin(alice)
            with pytest.raises(AdminError, match="one long job at a time"):
                await begin(alice)
            await begin(bob)
            with pytest.raises(AdminError, match="all tenants 2"):
                await begin(carol)
            for _ in range(STREAMS_MAX - STREAMS_OF_TENANTS_MAX):
                await begin(operator)
            with pytest.raises(AdminError, match="4 of 4"):
                await begin(operator)
        async with background.steps("export", iter([1]), caller=alice):
            pass

    asyncio.run(fill())


def test_a_client_that_takes_nothing_ends_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stalled(web.StreamResponse):
        async def write(self, data: object) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("hicache.daemon.background.SILENCE_S", 0.01)
    with pytest.raises(ConnectionAbortedError, match="nobody took anything"):
        asyncio.run(write(Stalled(), b"part"))


def _refusal(call: Callable[[], object]) -> object:
    """What it returns, or the code of its refusal."""
    try:
        return call()
    except Exception as error:  # the raw client has no type for it
        return str(error).partition(":")[0]
