"""What /v1/status, /v1/history and /v1/events tell: true figures, in the documented form, whatever happens."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from hicache.admin import status as messages
from hicache.admin.client import Admin
from hicache.admin.follow import read_events
from hicache.admin.status import TENANTS_SHOWN, History, Sample, Status
from hicache.admin.verbs import EVENTS, HISTORY, STATUS
from hicache.daemon import events, status_feed
from hicache.daemon.events import SUBSCRIBERS_MAX, UNSENT_MAX
from hicache.errors import AdminRefused
from tests.daemon.client import DESCRIPTOR, Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import wait_until
from tests.page.conftest import KIB, MIB, TOKENS

StartTenants = Callable[..., ThreadedDaemon]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "status.md"


def fresh(daemon: ThreadedDaemon, is_there: Callable[[Status], bool] = lambda _: True) -> Status:
    """A status made after this call began, in which ``is_there``."""
    admin, asked_at_s = Admin(daemon.config.admin_socket), time.time()
    found: list[Status] = []

    def look() -> bool:
        found[:] = [admin.ask(STATUS)]
        return found[0].at_s >= asked_at_s and is_there(found[0])

    wait_until(look, what="a status with what was waited for", within_s=10)
    return found[0]


def test_the_figures_are_those_of_what_was_done(start_tenants: StartTenants) -> None:
    daemon = start_tenants()
    fresh(daemon)
    with Client(daemon.target, token=TOKENS["alice"]) as alice, Client(daemon.target, token=TOKENS["bob"]) as bob:
        keys = [object_key(number) for number in range(3)]
        alice.put_stream(keys, [b"x" * MIB] * 3)
        bob.put_stream(keys[:2], [b"y" * KIB] * 2)
        alice.lookup([*keys, object_key(77)])
        alice.get_stream(keys, [MIB] * 3)
        alice.get_stream(keys[:1], [MIB + 1])
        told = fresh(daemon, lambda status: status.lookups.asked == 4)
        assert (told.lookups.found, told.lookups.hit_rate, told.lookups.ceiling) == (3, 0.75, 0.75)
        assert told.traffic.read_bytes == 3 * MIB
        assert told.traffic.written_bytes == 3 * MIB + 2 * KIB
        assert {latency.kind: latency.calls for latency in told.latency} == {"lookup": 1, "get": 2, "put": 2}
        assert all(0 < (latency.p50_s or 0) <= (latency.p99_s or 0) for latency in told.latency)
        assert (told.sessions.open, told.sessions.limit) == (2, 64)
        by_name = {tenant.name: tenant for tenant in told.tenants}
        assert list(by_name) == ["alice", "bob", "carol"], "the nearest to its quota comes first"
        assert (by_name["alice"].objects, by_name["alice"].quota_bytes, by_name["alice"].sessions) == (3, 4 * MIB, 1)
        assert by_name["alice"].used_bytes >= 3 * MIB
        assert (by_name["bob"].objects, by_name["bob"].quota_objects) == (2, 10)
        [l3] = told.tiers
        assert (l3.name, l3.objects, l3.capacity_bytes) == ("l3", 5, 64 * MIB)
        assert l3.used_bytes == sum(tenant.used_bytes for tenant in told.tenants)
        assert {(error.of, error.reason): error.count for error in told.errors} == {("get objects", "size_mismatch"): 1}
        assert {space.tenant for space in told.namespaces} == {"alice", "bob"}
        assert {space.model for space in told.namespaces} == {DESCRIPTOR["model"]}
        assert {slow.tenant for slow in told.slowest} == {"alice", "bob"}
        assert {slow.kind for slow in told.slowest} == {"get", "put"}
        assert [slow.seconds for slow in told.slowest] == sorted((slow.seconds for slow in told.slowest), reverse=True)


def test_neither_keys_nor_tokens_nor_secrets_are_told(start_tenants: StartTenants) -> None:
    daemon = start_tenants()
    with Client(daemon.target, token=TOKENS["alice"], name="\x1b[31mevil") as alice:
        key = object_key(1)
        alice.put_stream([key], [b"x" * KIB])
        told = msgspec.json.encode(fresh(daemon, lambda status: bool(status.slowest))).decode()
        for secret in (TOKENS["alice"], key.hex(), alice.secret.hex(), "\\u001b"):
            assert secret not in told


def test_names_of_clients_are_told_without_what_terminals_obey(daemon: ThreadedDaemon) -> None:
    descriptor = DESCRIPTOR | {"model": "\x1b]0;owned\x07" + "m" * 5000}
    with Client(daemon.target, descriptor=descriptor):
        [space] = fresh(daemon, lambda status: bool(status.namespaces)).namespaces
    assert space.model.startswith("?]0;owned?mmm")
    assert len(space.model) <= 128


def schema(kind: type) -> dict[str, str]:
    """Fields of a message with their types, as the documentation has them."""
    hints = get_type_hints(kind)
    return {name: _type_name(hints[name]) for name in kind.__struct_fields__}


def _type_name(hint: Any) -> str:
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    if getattr(hint, "__origin__", None) is list:
        return f"list of {_type_name(get_args(hint)[0])}"
    return " or ".join("null" if part is type(None) else part.__name__ for part in get_args(hint))


MESSAGES = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_field_is_documented_with_its_type(kind: type) -> None:
    section = DOCS.read_text().split(f"\n### {kind.__name__}\n", 1)[1].split("\n#", 1)[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, re.MULTILINE))
    assert documented == schema(kind)


def test_the_answers_have_the_documented_form_and_format_1(daemon: ThreadedDaemon, admin: Admin) -> None:
    raw = json.loads(b"".join(_open(admin, STATUS)))
    assert raw["format"] == 1
    assert set(raw) == set(schema(Status))
    assert msgspec.convert(raw, Status, strict=True).state == "ready"
    assert json.loads(b"".join(_open(admin, HISTORY))) == {"format": 1, "sample_s": 10, "samples": []}


def _open(admin: Admin, verb: Any) -> Iterator[bytes]:
    with admin.open(verb) as parts:
        yield from parts


def test_while_the_store_does_not_answer_its_last_numbers_and_their_age_are_told(
    daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(daemon.target) as client:
        client.put_stream([object_key(1)], [b"x" * KIB])
    before = fresh(daemon, lambda status: status.tiers[0].objects == 1)
    asked, stuck = threading.Event(), threading.Event()
    usage = daemon.store.usage

    def never() -> Any:
        asked.set()
        stuck.wait(20)
        return usage()

    monkeypatch.setattr("hicache.daemon.store_look.LOOK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(daemon.store, "usage", never)
    try:
        told = fresh(daemon, lambda status: asked.is_set() and (status.store_age_s or 0) > 0.5)
        assert told.tiers == before.tiers
    finally:
        stuck.set()
    monkeypatch.undo()
    fresh(daemon, lambda status: (status.store_age_s or 9) < 0.5)


def events_of(admin: Admin) -> Iterator[tuple[str, bytes]]:
    with admin.open(EVENTS, silence_s=10) as parts:
        yield from read_events(parts)


def test_events_show_each_change_and_end_with_the_daemon(
    start_tenants: StartTenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_feed, "TICK_S", 0.02)
    monkeypatch.setattr(status_feed, "SAMPLE_S", 0.05)
    daemon = start_tenants()
    with Client(daemon.target, token=TOKENS["carol"]) as carol:
        told = events_of(Admin(daemon.ready.http))
        kind, first = next(told)
        assert kind == "status"
        assert msgspec.json.decode(first, type=Status).tiers[0].objects == 0
        carol.put_stream([object_key(1)], [b"x" * KIB])
        documents = itertools.takewhile(lambda status: status.tiers[0].objects == 0, statuses(told))
        assert len(list(documents)) < 500
        samples = (msgspec.json.decode(document, type=Sample) for kind, document in told if kind == "sample")
        assert next(samples).sessions == 1
    history = Admin(daemon.ready.http).ask(HISTORY)
    assert isinstance(history, History)
    assert len(history.samples) >= 1
    threading.Thread(target=daemon.stop).start()
    assert list(statuses(told))[-1].state == "stopping"
    wait_until(lambda: daemon.stopped_clean is not None, what="the daemon has stopped")
    assert daemon.stopped_clean


def statuses(told: Iterator[tuple[str, bytes]]) -> Iterator[Status]:
    return (msgspec.json.decode(document, type=Status) for kind, document in told if kind == "status")


def test_a_subscriber_who_does_not_read_is_dropped_and_holds_up_nobody(
    daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = daemon.daemon.status_feed.hub
    reader = events_of(Admin(daemon.ready.http))
    next(reader)
    host, port = daemon.ready.http.split(":")
    with socket.socket() as mute:
        mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        mute.connect((host, int(port)))
        mute.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: len(hub) == 2, what="both listen")
        large = b'"' + b"x" * (1 << 20) + b'"'
        published = 0
        while hub.dropped_count == 0:
            daemon.call(lambda: hub.publish("large", large))
            assert next(document for kind, document in reader if kind == "large") == large
            published += 1
            assert published < 200
        assert published > UNSENT_MAX
        wait_until(lambda: len(hub) == 1, what="the mute one is gone")
    reader.close()
    wait_until(lambda: len(hub) == 0, what="nobody listens any more")


def test_one_subscriber_too_many_is_refused_with_the_limit(
    daemon: ThreadedDaemon, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SUBSCRIBERS_MAX", 2)
    monkeypatch.setattr(status_feed, "SUBSCRIBERS_MAX", 2)
    two = [events_of(admin), events_of(admin)]
    for one in two:
        next(one)
    with pytest.raises(AdminRefused, match="events have 2 subscribers, which is the most") as refused:
        next(events_of(admin))
    assert refused.value.status == 503
    for one in two:
        one.close()
    wait_until(lambda: len(daemon.daemon.status_feed.hub) == 0, what="both have been found to be gone")
    next(events_of(admin))


def test_64_subscribers_all_hear_every_second_and_calls_are_served_beside_them(
    daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = Admin(daemon.ready.http)
    listeners = [events_of(admin) for _ in range(SUBSCRIBERS_MAX)]
    for listener in listeners:
        next(listener)
    with Client(daemon.target) as client:
        client.put_stream([object_key(1)], [b"x" * KIB])
        for listener in listeners:
            kind, document = next(listener)
            assert (kind, msgspec.json.decode(document, type=Status).state) == ("status", "ready")
        assert client.get_stream([object_key(1)], [KIB]) == [b"x" * KIB]
    for listener in listeners:
        listener.close()


def test_4096_tenants_make_no_larger_answer_and_nobody_waits_for_the_store_for_all_of_them(
    folder: Path, start_thread: Callable[..., ThreadedDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "tenants"
    file.write_text("".join(f"tenant-{number} token-of-tenant-{number}-long\n" for number in range(4096)))
    daemon = start_thread(tenants_file=str(file))
    asked: list[int] = []
    tenant_stats = daemon.store.tenant_stats

    def count(tenants: list[bytes]) -> Any:
        asked.append(len(tenants))
        return tenant_stats(tenants)

    monkeypatch.setattr(daemon.store, "tenant_stats", count)
    with Client(daemon.target, token="token-of-tenant-4000-long") as client:
        client.put_stream([object_key(1)], [b"x" * MIB])
        told = fresh(daemon, lambda status: status.tiers[0].objects == 1)
    assert told.tenant_count == 4096
    assert len(told.tenants) == TENANTS_SHOWN
    assert told.tenants[0].name == "tenant-4000"
    assert max(asked) <= 128
    assert len(msgspec.json.encode(told)) < 64 * KIB
