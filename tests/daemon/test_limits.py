"""What tenants may have, as clients see it: quotas, pins, watches, rates, time to live, and the file that sets them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from hicache.daemon.config import load_config
from hicache.daemon.server import Daemon
from hicache.daemon.tenants import Tenant, Tenants, TenantSettings
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from hicache.wire.hicached_pb2_grpc import HiCachedStub
from hicache.wire.protocol import split_keys
from tests.daemon.client import Client, refusal_code
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import BulkRefused, Memory, object_key, payload_of
from tests.daemon.rig import scrape, settings_in, wait_until

TOKENS = {"alice": "token-of-alice-1234", "bob": "token-of-bob-123456"}
SLOT = 64 * 1024
SIZE = SLOT - 4096
EVENTS = pb.WatchEvents


def tenants_file(folder: Path, **settings: str) -> str:
    path = folder / "tenants"
    path.write_text("".join(f"{name} {token} {settings.get(name, '')}\n" for name, token in TOKENS.items()))
    return str(path)


@pytest.fixture
def start_with(start_thread: Callable[..., ThreadedDaemon], folder: Path) -> Callable[..., ThreadedDaemon]:
    """A daemon with two tenants; ``alice`` and ``bob`` are what stands behind their tokens."""

    def start_one(*, alice: str = "", bob: str = "", **settings: object) -> ThreadedDaemon:
        given = {"backend": "file", "capacity_bytes": 100 * SLOT, "object_bytes_max": SLOT} | settings
        return start_thread(tenants_file=tenants_file(folder, alice=alice, bob=bob), **given)

    return start_one


def connect(daemon: ThreadedDaemon, name: str) -> Client:
    return Client(daemon.target, token=TOKENS[name])


def put(client: Client, *numbers: int) -> list[Outcome]:
    return client.put_stream([object_key(number) for number in numbers], [payload_of(n, SIZE) for n in numbers])


def keys_of(event: pb.WatchEvents) -> list[bytes]:
    return split_keys(event.keys, event.key_bytes)


class TestTenantsFile:
    def load(self, folder: Path, text: str, **defaults: object) -> Tenants:
        (folder / "tenants").write_text(text)
        return Tenants.load(str(folder / "tenants"), defaults=TenantSettings(**defaults))  # type: ignore[arg-type]

    def test_settings_of_a_tenant_win_over_the_defaults(self, folder: Path) -> None:
        lines = [
            "alice a-token-0123456789 weight=2.5 quota_bytes=3GiB",
            "alice b-token-0123456789 ttl_s=60",
            "bob c-token-0123456789",
        ]
        text = "\n".join(lines)
        tenants = self.load(folder, text, quota_objects=7, ttl_s=5.0)
        assert tenants.settings == {
            Tenant.named("alice"): TenantSettings(weight=2.5, quota_bytes=3 << 30, quota_objects=7, ttl_s=60.0),
            Tenant.named("bob"): TenantSettings(quota_objects=7, ttl_s=5.0),
        }
        assert [tenant.name for tenant in tenants.named] == ["alice", "bob"]

    def test_without_a_file_the_defaults_are_those_of_the_one_tenant(self) -> None:
        tenants = Tenants.load("", defaults=TenantSettings(quota_objects=3))
        assert tenants.settings == {Tenant.named("default"): TenantSettings(quota_objects=3)}
        assert tenants.named == []

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ("quota=1", "setting=value"),
            ("quota_bytes", "a size"),
            ("quota_bytes=", "a size"),
            ("quota_bytes=lots", "a size"),
            ("weight=0", "a number from 0.001"),
            ("ttl_s=-1", "a number from 0"),
            ("quota_objects=1 quota_objects=1", "only once"),
            ("pin_share=0.5", "setting=value"),
            ("secret-secret-secret", "setting=value"),
        ],
    )
    def test_a_wrong_setting_stops_the_start_with_what_would_be_right(
        self, folder: Path, words: str, told: str
    ) -> None:
        with pytest.raises(ConfigError, match=r"tenants_file .* line 1") as caught:
            self.load(folder, f"alice {TOKENS['alice']} {words}\n")
        assert told in caught.value.expected
        assert TOKENS["alice"] not in str(caught.value)
        assert "secret" not in str(caught.value), "it may be a token"


def test_a_shared_backend_that_could_not_keep_a_quota_stops_the_start(folder: Path) -> None:
    config = load_config(None, settings_in(folder, backend="mooncake", mooncake_master="127.0.0.1:1", quota_objects=1))

    async def steps() -> None:
        daemon = Daemon(config, environment={})
        with pytest.raises(ConfigError, match="quota_objects = 1: expected 0 for tenant default"):
            await daemon.start()
        await daemon.stop()

    asyncio.run(steps())


def test_a_quota_costs_only_its_own_tenant_and_shows_in_its_metrics(start_with: Callable[..., ThreadedDaemon]) -> None:
    daemon = start_with(alice="quota_objects=4")
    with connect(daemon, "alice") as alice, connect(daemon, "bob") as bob:
        assert put(bob, *range(5)) == [Outcome.OK] * 5
        assert put(alice, *range(6)) == [Outcome.OK] * 6
        assert alice.present([object_key(number) for number in range(6)]) == [False, False, True, True, True, True]
        assert bob.present([object_key(number) for number in range(5)]) == [True] * 5
    samples = scrape(daemon.ready.http)
    assert samples['hicache_tenant_objects{tenant="alice"}'] == 4
    assert samples['hicache_tenant_used_bytes{tenant="bob"}'] == 5 * SLOT
    assert samples['hicache_tenant_evicted_objects_total{tenant="alice"}'] == 2
    assert samples['hicache_tenant_evicted_objects_total{tenant="bob"}'] == 0
    assert samples['hicache_store_removed_objects_total{reason="quota"}'] == 2


def test_without_a_tenants_file_no_tenant_is_a_label(daemon: ThreadedDaemon, client: Client) -> None:
    assert client.put_stream([object_key(1)], [b"x"]) == [Outcome.OK]
    assert not [name for name in scrape(daemon.ready.http) if "tenant=" in name]


def test_a_flood_of_one_tenant_costs_another_within_its_share_nothing(
    start_with: Callable[..., ThreadedDaemon],
) -> None:
    daemon = start_with()
    with connect(daemon, "alice") as alice, connect(daemon, "bob") as bob:
        assert put(bob, *range(40)) == [Outcome.OK] * 40
        for first in range(100, 400, 50):
            assert put(alice, *range(first, first + 50)) == [Outcome.OK] * 50
        assert bob.present([object_key(number) for number in range(40)]) == [True] * 40


class TestPins:
    def test_a_pin_outlives_its_session_and_only_its_tenant_can_end_it(
        self, start_with: Callable[..., ThreadedDaemon]
    ) -> None:
        daemon = start_with()
        keys = [object_key(number) for number in range(3)]
        with connect(daemon, "alice") as alice:
            assert put(alice, 0, 1) == [Outcome.OK] * 2
            assert alice.pin(keys, pin_ms=60_000) == [Outcome.OK, Outcome.OK, Outcome.ABSENT]
        with connect(daemon, "bob") as bob:
            assert bob.pin(keys, pin_ms=60_000) == [Outcome.ABSENT] * 3
            assert bob.pin(keys, pin_ms=0) == [Outcome.ABSENT] * 3
        samples = scrape(daemon.ready.http)
        assert samples["hicache_store_pinned_objects"] == 2
        assert samples['hicache_tenant_pinned_bytes{tenant="alice"}'] == 2 * SLOT
        with connect(daemon, "alice") as alice:
            for first in range(100, 300, 50):
                put(alice, *range(first, first + 50))
            assert alice.present(keys) == [True, True, False]
            assert alice.pin(keys[:1], pin_ms=0) == [Outcome.OK]
            for first in range(300, 500, 50):
                put(alice, *range(first, first + 50))
            assert alice.present(keys) == [False, True, False]

    def test_pins_are_refused_at_the_limits_of_the_tenant(self, start_with: Callable[..., ThreadedDaemon]) -> None:
        daemon = start_with(bob="pinned_objects_max=1")
        keys = [object_key(number) for number in range(20)]
        with connect(daemon, "alice") as alice, connect(daemon, "bob") as bob:
            put(alice, *range(20))
            put(bob, *range(2))
            assert alice.pin(keys, pin_ms=60_000) == [Outcome.OK] * 12 + [Outcome.REFUSED] * 8, "an eighth each"
            assert bob.pin(keys[:2], pin_ms=60_000) == [Outcome.OK, Outcome.REFUSED]

    def test_a_longer_pin_than_the_longest_is_cut(
        self, start_with: Callable[..., ThreadedDaemon], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        daemon = start_with(pin_s_max=5.0)
        asked: list[float] = []
        monkeypatch.setattr(daemon.store, "pin", lambda keys, pin_s: asked.append(pin_s) or [Outcome.OK] * len(keys))
        with connect(daemon, "alice") as alice:
            alice.pin([object_key(1)], pin_ms=2**63)
            alice.pin([object_key(1)], pin_ms=1)
        assert asked == [5.0, 0.001]


class TestWatch:
    def test_a_watcher_sees_its_own_tenants_objects_come_and_go_and_no_others(
        self, start_with: Callable[..., ThreadedDaemon]
    ) -> None:
        daemon = start_with(alice="quota_objects=2")
        with connect(daemon, "alice") as alice, connect(daemon, "bob") as bob:
            alice_sees, bob_sees = alice.watch(snapshot=True), bob.watch(snapshot=True)
            assert next(alice_sees).kind == next(bob_sees).kind == EVENTS.SYNCED
            put(alice, 1)
            stored = next(alice_sees)
            assert (stored.kind, keys_of(stored), stored.sequence) == (EVENTS.STORED, [object_key(1)], 1)
            put(alice, 2)
            put(alice, 3)
            alice.delete([object_key(2)])
            seen = [(event.kind, event.removal, keys_of(event)) for event in (next(alice_sees) for _ in range(4))]
            assert seen == [
                (EVENTS.STORED, EVENTS.NONE, [object_key(2)]),
                (EVENTS.REMOVED, EVENTS.EVICTED, [object_key(1)]),
                (EVENTS.STORED, EVENTS.NONE, [object_key(3)]),
                (EVENTS.REMOVED, EVENTS.DELETED, [object_key(2)]),
            ]
            put(bob, 77)  # the control: the same way, to the right one
            first = next(bob_sees)
            assert (keys_of(first), first.sequence) == ([object_key(77)], 1), "nothing of alice came before it"

    def test_a_snapshot_comes_first_with_keys_of_any_length(self, start_with: Callable[..., ThreadedDaemon]) -> None:
        daemon = start_with()
        keys = [object_key(number, length=20 + number) for number in range(4)]
        with connect(daemon, "alice") as alice, connect(daemon, "bob") as bob:
            put(bob, 99)
            for key in keys:
                assert alice.put_stream([key], [b"x"]) == [Outcome.OK]
            present: list[bytes] = []
            for event in alice.watch(snapshot=True):
                if event.kind == EVENTS.SYNCED:
                    break
                assert event.kind == EVENTS.PRESENT
                present += keys_of(event)
            assert sorted(present) == sorted(keys)

    def test_a_watcher_that_is_too_slow_is_told_how_much_it_lost(
        self, start_with: Callable[..., ThreadedDaemon], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.backends.events.QUEUED_EVENTS_MAX", 3)
        daemon = start_with()
        told = daemon.store.watch(Tenant.named("alice").digest, wake=lambda: None)
        monkeypatch.setattr(daemon.store, "watch", lambda tenant, wake: wake() or told)
        with connect(daemon, "alice") as alice:
            put(alice, *range(8))
            seen = alice.watch()
            lost = next(seen)
            assert (lost.kind, lost.lost, lost.sequence) == (EVENTS.LOST, 6, 6)
            after = next(seen)
            assert (after.kind, len(keys_of(after)), after.sequence) == (EVENTS.STORED, 2, 8)
        assert scrape(daemon.ready.http)["hicache_watch_lost_events_total"] == 6

    def test_a_watch_ends_with_its_session_and_leaves_nothing(self, start_with: Callable[..., ThreadedDaemon]) -> None:
        daemon = start_with()
        client = connect(daemon, "alice")
        other = grpc.insecure_channel(daemon.target)
        with other:
            stream = HiCachedStub(other).Watch(pb.WatchRequest(session_secret=client.secret, snapshot=True), timeout=20)
            assert next(stream).kind == EVENTS.SYNCED
            assert scrape(daemon.ready.http)["hicache_watches"] == 1
            client.close()
            assert list(stream) == []
        wait_until(lambda: daemon.store.stats().holds.watchers == 0, what="the subscription has ended")

    def test_watches_of_one_tenant_are_bounded_and_another_tenant_may_still_watch(
        self, start_with: Callable[..., ThreadedDaemon], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.daemon.watch.WATCHES_PER_TENANT_MAX", 2)
        daemon = start_with()
        with connect(daemon, "alice") as alice, connect(daemon, "bob") as bob:
            held = [alice.watch(snapshot=True) for _ in range(2)]
            assert [next(watch).kind for watch in held] == [EVENTS.SYNCED] * 2
            with pytest.raises(grpc.RpcError) as caught:
                next(alice.watch())
            assert refusal_code(caught.value) == "TOO_MANY_CALLS"
            assert next(bob.watch(snapshot=True)).kind == EVENTS.SYNCED

    def test_a_stop_does_not_wait_for_watches(self, start_with: Callable[..., ThreadedDaemon]) -> None:
        daemon = start_with()
        with connect(daemon, "alice") as alice:
            watch = alice.watch(snapshot=True)
            next(watch)
            daemon.stop()
            with contextlib.suppress(grpc.RpcError):  # the end of the connection may overtake that of the stream
                assert list(watch) == []
        assert daemon.stopped_clean


class TestRates:
    def test_a_tenant_above_its_calls_is_refused_with_a_hint_and_no_other_is(
        self, start_with: Callable[..., ThreadedDaemon]
    ) -> None:
        daemon = start_with(alice="calls_per_s_max=0.001")
        with connect(daemon, "alice") as alice, connect(daemon, "alice") as second, connect(daemon, "bob") as bob:
            assert alice.present([object_key(1)]) == [False]
            for client in (alice, second):
                with pytest.raises(grpc.RpcError) as caught:
                    client.present([object_key(1)])
                assert refusal_code(caught.value) == "RATE_LIMITED"
                assert "retry in " in (caught.value.details() or "")
            alice.stats()
            assert [bob.present([object_key(1)]) for _ in range(20)] == [[False]] * 20
        samples = scrape(daemon.ready.http)
        assert samples['hicache_rate_refusals_total{limit="calls"}'] == 2
        assert samples['hicache_tenant_rate_refusals_total{tenant="alice"}'] == 2
        assert samples['hicache_calls_total{method="Lookup",result="RATE_LIMITED"}'] == 2

    def test_bytes_above_the_rate_are_refused_before_they_move_and_misses_cost_nothing(
        self, start_with: Callable[..., ThreadedDaemon], memory: Memory
    ) -> None:
        daemon = start_with(alice="bytes_per_s_max=1")
        with connect(daemon, "alice") as alice:
            region = alice.attach(memory).region_id
            for _ in range(3):
                assert alice.get(region, [object_key(1)], [0], [SIZE]) == [Outcome.ABSENT]
            assert alice.put(region, [object_key(1)], [0], [SIZE]) == [Outcome.OK]
            with pytest.raises(BulkRefused, match="RATE_LIMITED"):
                alice.put(region, [object_key(2)], [0], [SIZE])
            with pytest.raises(BulkRefused) as refused:
                alice.put_stream([object_key(3)], [b"x"])
            assert refused.value.code == "RATE_LIMITED"
            assert alice.present([object_key(number) for number in (1, 2, 3)]) == [True, False, False]
        assert daemon.metric("hicache_rate_refusals_total", limit="bytes") == 2


def test_what_has_expired_is_swept_without_any_call(
    start_with: Callable[..., ThreadedDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.daemon.upkeep.INTERVAL_S", 0.01)
    daemon = start_with(alice="ttl_s=0.001")
    with connect(daemon, "alice") as alice, connect(daemon, "bob") as bob:
        assert put(alice, 1) == [Outcome.OK]
        assert put(bob, 1) == [Outcome.OK]
        wait_until(lambda: daemon.backend.usage().objects == 1, what="the expired object has been swept")
        assert alice.present([object_key(1)]) == [False]
        assert bob.present([object_key(1)]) == [True]
    assert scrape(daemon.ready.http)['hicache_store_removed_objects_total{reason="expired"}'] == 1
