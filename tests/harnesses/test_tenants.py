"""Harness 3: a tenant tries everything there is with what belongs to another; the owner's try beside it succeeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import grpc
import pytest

from hicache.admin.client import Admin
from hicache.admin.verbs import EXPORT, IMPORT, NAMESPACE_DROP, NAMESPACES, TENANT_CHANGE, TENANT_ERASE, VERBS, Verb
from hicache.daemon.authority import VERBS_OF_TENANTS
from hicache.errors import AdminRefused
from hicache.outcome import Outcome
from hicache.tenancy import tenant_digest
from hicache.wire import hicached_pb2 as pb
from hicache.wire.bulk import BulkKind
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import ALICE, BOB, http_get

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


def get_stream(two: Two, who: Client) -> object:
    return who.get_stream(KEYS, SIZES)


def put_stream(two: Two, who: Client) -> object:
    """EXISTS would tell that somebody has it."""
    return who.put_stream(KEYS, PAYLOADS)


def load(two: Two, who: Client) -> object:
    return _refusal(lambda: who.get(two.region, KEYS, OFFSETS, SIZES))


def store(two: Two, who: Client) -> object:
    return _refusal(lambda: who.put(two.region, KEYS, OFFSETS, SIZES))


def report(two: Two, who: Client) -> object:
    """What an engine tells of itself is answered by nothing."""
    fill = pb.TierFill(name="l1", used_bytes=1, capacity_bytes=2)
    return who.stub.Report(pb.ReportRequest(session_secret=who.secret, tiers=[fill]), timeout=10).SerializeToString()


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
    get_stream: ([ABSENT] * 2, PAYLOADS),
    put_stream: ([OK] * 2, [EXISTS] * 2),
    load: ("UNKNOWN_REGION", [OK] * 2),
    store: ("UNKNOWN_REGION", [EXISTS] * 2),
    report: (b"", b""),
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


def test_what_was_put_under_a_foreign_key_is_ones_own_and_hides_nothing(two: Two) -> None:
    own = payload_of(77, 5000)
    assert two.bob.put_stream(KEYS[:1], [own]) == [OK]
    assert two.bob.get_stream(KEYS, SIZES) == [own, ABSENT]
    assert two.alice.get_stream(KEYS, SIZES) == PAYLOADS
    assert two.bob.delete(KEYS) == [OK, ABSENT]
    assert two.alice.present(KEYS) == [True] * 2


def test_a_key_with_the_digest_of_its_owner_before_it_names_nothing(two: Two) -> None:
    for digest in (tenant_digest("alice"), tenant_digest("bob"), tenant_digest("")):
        forged = [digest + key for key in KEYS]
        assert two.bob.get_stream(forged, SIZES) == [ABSENT] * 2
    assert two.alice.get_stream(KEYS, SIZES) == PAYLOADS


class Operators:
    """Everything that can be asked of the admin API, by the token of one tenant or the other."""

    def __init__(self, two: Two) -> None:
        self._by_token = {
            who: Admin(two.daemon.config.admin_socket, token=token) for who, token in (("alice", ALICE), ("bob", BOB))
        }
        [own] = self._by_token["alice"].ask(NAMESPACES, names={"tenant": "alice"}).namespaces
        self.names = {"tenant": "alice", "namespace": own.namespace}
        with self._by_token["alice"].open(EXPORT, names=self.names) as answer:
            self.archive = b"".join(answer)

    def ask(self, who: str, verb: Verb[object, object], **names: str) -> bytes:
        body = [self.archive] if verb is IMPORT else {} if verb is TENANT_CHANGE else None
        with self._by_token[who].open(verb, body, names=self.names | names) as answer:  # type: ignore[arg-type]  # of every verb
            return b"".join(answer)


ABOUT_ONE_TENANT = [verb for verb in VERBS if verb.name in VERBS_OF_TENANTS]
FOR_OPERATORS = [verb for verb in VERBS if verb not in ABOUT_ONE_TENANT and not verb.is_public]


@pytest.mark.parametrize("verb", ABOUT_ONE_TENANT, ids=lambda verb: verb.name)
def test_verbs_about_one_tenant_are_for_that_one(two: Two, verb: Verb[object, object]) -> None:
    operators = Operators(two)
    with pytest.raises(AdminRefused, match="not for tenant bob"):
        operators.ask("bob", verb)
    assert two.alice.present(KEYS) == [True] * 2
    assert two.bob.present(KEYS) == [False] * 2
    assert operators.ask("alice", verb), "the control"


@pytest.mark.parametrize("verb", FOR_OPERATORS, ids=lambda verb: verb.name)
def test_verbs_about_all_of_hicached_are_for_no_tenant(two: Two, verb: Verb[object, object]) -> None:
    operators = Operators(two)
    for who in ("alice", "bob"):
        with pytest.raises(AdminRefused, match=f"not for tenant {who}"):
            operators.ask(who, verb)
    assert two.alice.present(KEYS) == [True] * 2


def test_no_verb_is_forgotten() -> None:
    public = [verb for verb in VERBS if verb.is_public]
    assert len(ABOUT_ONE_TENANT) + len(FOR_OPERATORS) + len(public) == len(VERBS)
    assert {TENANT_ERASE, NAMESPACE_DROP} <= set(ABOUT_ONE_TENANT)


def test_ones_own_namespaces_and_exports_have_nothing_of_anothers(two: Two) -> None:
    assert two.bob.put_stream(KEYS[:1], [payload_of(77, 5000)]) == [OK]
    operators = Operators(two)
    for who, own, foreign in (("bob", payload_of(77, 5000), PAYLOADS[1]), ("alice", PAYLOADS[1], payload_of(77, 5000))):
        exported = operators.ask(who, EXPORT, tenant=who)
        assert own in exported, "the control"
        assert foreign not in exported
    assert b"alice" not in operators.ask("bob", NAMESPACES, tenant="bob")


def test_an_import_goes_to_whoever_imports(two: Two) -> None:
    operators = Operators(two)
    assert two.bob.present(KEYS) == [False] * 2
    operators.ask("bob", IMPORT, tenant="bob")
    assert two.bob.get_stream(KEYS, SIZES) == PAYLOADS, "he had the file"
    assert two.bob.delete(KEYS) == [OK] * 2
    assert two.alice.present(KEYS) == [True] * 2


def test_pages_metrics_and_traces_tell_no_key_no_payload_and_no_secret(
    start_thread: Callable[..., ThreadedDaemon], two_tenants: str, folder: Path, memory: Memory
) -> None:
    trace = folder / "trace.jsonl"
    daemon = start_thread(tenants_file=two_tenants, trace_file=str(trace))
    with Client(daemon.target, token=ALICE) as alice, Client(daemon.target, token=BOB) as bob:
        two = Two(daemon, alice, bob, memory)
        assert two.bob.present(KEYS) == [False] * 2
        paths = ("/metrics", "/", "/v1/status", "/v1/history")
        told = "".join(http_get(daemon.ready.http, path)[1] for path in paths)
        secrets = [alice.secret, bob.secret]
    daemon.stop()
    told += trace.read_text()
    assert 'tenant="alice"' in told, "the control: labels are names of the tenants file"
    assert "tenant 0" in trace.read_text(), "the control: lookups were recorded"
    assert "alice" not in trace.read_text()
    hidden = [*KEYS, *secrets, PAYLOADS[0][:16], *(tenant_digest("alice") + key for key in KEYS)]
    for raw in hidden:
        assert raw.hex() not in told
        assert raw not in told.encode()
    for token in (ALICE, BOB):
        assert token not in told


def test_a_foreign_key_costs_the_same_steps_as_one_that_nobody_has(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that can be timed differs: the store is asked the same, and so is the medium."""
    steps: Counter[str] = Counter()

    def counting(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(items: list[object], *arguments: object, **options: object) -> object:
            steps[f"{type(owner).__name__}.{name}"] += len(items)
            return real(items, *arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("lookup", "get_into", "delete", "pin"):
        counting(two.daemon.store, name)
    for name in ("get_into", "contains", "delete"):
        counting(two.daemon.backend, name)

    def steps_for(who: Client, keys: list[bytes]) -> Counter[str]:
        steps.clear()
        who.present(keys)
        who.get_stream(keys, SIZES)
        who.pin(keys, pin_ms=1000)
        who.delete(keys)
        return Counter(steps)

    nobodys = [object_key(number) for number in (100, 101)]
    foreign = steps_for(two.bob, KEYS)
    assert foreign == steps_for(two.bob, nobodys)
    assert foreign["ObjectStore.lookup"] > 0
    assert steps_for(two.alice, KEYS) != foreign, "the control: what is there takes more"


def _refusal(call: Callable[[], object]) -> object:
    """What it returns, or the code of its refusal."""
    try:
        return call()
    except Exception as error:  # the raw client has no type for it
        return str(error).partition(":")[0]
