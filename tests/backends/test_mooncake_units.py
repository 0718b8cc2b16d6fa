"""The parts of the Mooncake backend, and what it does when a client answers late or wrongly. Needs no wheel."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends import mooncake_client
from hicache.backends.arena import Arena
from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX, GetItem
from hicache.backends.mooncake_calls import BoundedCalls
from hicache.backends.mooncake_codes import is_without_master, outcome_of
from hicache.backends.mooncake_layout import HEADER_BYTES, decode_header, encode_header, key_of_name, object_name
from hicache.backends.mooncake_nodes import SuspectNodes
from hicache.backends.mooncake_settings import MooncakeSettings, parse_url
from hicache.backends.open import open_backend, open_store
from hicache.backends.shared_store import SharedStore
from hicache.backends.tenant_usage import TenantUsage
from hicache.breaker import BreakerState
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.fake_mooncake import MIB, FakeMooncake, open_fake
from tests.backends.payloads import get, get_many, key, payload, put

WAIT_S = 30.0
ROOT = Path(__file__).parents[2]


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(key=st.binary(min_size=1, max_size=PHYSICAL_KEY_BYTES_MAX))
def test_a_name_gives_its_key_back(key: bytes) -> None:
    assert key_of_name(object_name(key)) == key


@given(name=st.text(max_size=30))
def test_a_name_of_somebody_else_gives_none_or_is_one_of_ours(name: str) -> None:
    for candidate in (name, f"hicache1.{name}"):
        found = key_of_name(candidate)
        assert found is None or object_name(found) == candidate


@given(size=st.integers(1, 2**40), checksum=st.integers(0, 2**64 - 1), flip=st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_is_read_back_under_its_key_alone_and_any_damage_shows(size: int, checksum: int, flip: int) -> None:
    raw = encode_header(key(1), size, checksum)
    assert len(raw) == HEADER_BYTES
    assert decode_header(key(1), raw) == (size, checksum)
    assert decode_header(key(2), raw) is None
    damaged = bytearray(raw)
    damaged[flip // 8] ^= 1 << flip % 8
    assert decode_header(key(1), bytes(damaged)) is None


def test_codes_tell_misses_from_failures() -> None:
    told = {0: "OK", 4096: "OK", -704: "ABSENT", -703: "ABSENT", -712: "ABSENT", -707: "DEADLINE", -200: "NO_SPACE"}
    told |= {-800: "IO_ERROR", -1: "IO_ERROR", -123456: "IO_ERROR", -801: "CORRUPT", -705: "EXISTS", -600: "REFUSED"}
    told |= {-900: "UNAVAILABLE", -901: "UNAVAILABLE", -1010: "UNAVAILABLE", -1700: "NO_SPACE"}
    assert {code: outcome_of(code).name for code in told} == told
    assert is_without_master([-900, -901])
    assert not is_without_master([-900, 0])
    assert not is_without_master([])


def test_a_url_says_all_settings_and_is_read_back() -> None:
    settings = MooncakeSettings(
        "10.0.0.1:50051", metrics="10.0.0.1:9", replicas=2, soft_pin_s=60, devices="mlx5_0,mlx5_1", call_timeout_s=0.5
    )
    assert parse_url(settings.url()) == settings
    assert parse_url("mooncake://h:1") == MooncakeSettings("h:1")
    assert parse_url("mooncake://[::1]:50051").metrics_address == ("::1", 9003)
    assert parse_url("mooncake://h:1?") == MooncakeSettings("h:1")
    assert MooncakeSettings("h:1").url() == "mooncake://h:1"


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "mooncake://host",
        "mooncake://host:0",
        "mooncake://host:99999",
        "mooncake://host:1?replica=2",
        "mooncake://host:1?replicas=two",
        "mooncake://host:1?replicas=0",
        "mooncake://host:1?protocol=smoke",
        "mooncake://host:1?metrics=host",
        "mooncake://host:1?staging_bytes=5",
        "mooncake://host:1?call_timeout_s=nan",
    ],
)
def test_a_url_that_says_nonsense_is_a_config_error(url: str) -> None:
    for open_it in (open_backend, lambda url, capacity_bytes: open_store(url, capacity_bytes=1, object_bytes_max=1)):
        with pytest.raises(ConfigError):
            open_it(url, capacity_bytes=1)


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(mooncake_client.importlib, "import_module", fail)
    monkeypatch.setattr(mooncake_client.os, "environ", {})
    with pytest.raises(
        ConfigError,
        match=r"pip install 'hicache\[mooncake\]' and apt-get install libibverbs1 libnuma1 libcurl4 \(libib",
    ):
        open_backend("mooncake://127.0.0.1:1", capacity_bytes=1)


def test_extents_never_overlap_and_all_comes_back() -> None:
    staging = Arena(MIB)
    random = Random(3)
    held: list[tuple[object, int]] = []
    for number in range(400):
        if held and random.random() < 0.5:
            extent, content = held.pop(random.randrange(len(held)))
            assert {bytes(view)[:1] for view in extent.views} == {bytes([content])}  # type: ignore[attr-defined]
            extent.release()  # type: ignore[attr-defined]
            continue
        acquired = staging.acquire([random.randrange(1, 60_000) for _ in range(random.randrange(1, 4))], timeout_s=0)
        if acquired is not None:
            for view in acquired.views:
                view[:] = bytes([number % 256]) * len(view)
            held.append((acquired, number % 256))
    for extent, _ in held:
        extent.release()  # type: ignore[attr-defined]
    assert staging.free_bytes == MIB
    whole = staging.acquire([MIB], timeout_s=0)
    assert whole is not None
    assert staging.acquire([1], timeout_s=0) is None
    assert staging.acquire([MIB + 1], timeout_s=1e9) is None  # never
    whole.release()
    with pytest.raises(AssertionError, match="twice"):
        whole.release()


def test_who_waits_for_staging_gets_it_when_it_is_released() -> None:
    staging = Arena(MIB)
    whole = staging.acquire([MIB], timeout_s=0)
    assert whole is not None
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(staging.acquire([100], timeout_s=WAIT_S)))
    thread.start()
    whole.release()
    thread.join(WAIT_S)
    assert got != [None]
    assert len(got) == 1


def test_a_call_that_hangs_gives_its_caller_back_and_tells_when_it_ends() -> None:
    calls = BoundedCalls("test", threads=1)
    release, ended = threading.Event(), threading.Event()
    late: list[int | None] = []

    def hang() -> int:
        release.wait(WAIT_S)
        return 5

    def note(value: int | None) -> None:
        late.append(value)
        ended.set()

    assert calls.run(hang, timeout_s=0.01, late=note) is None
    assert late == []
    assert calls.run(lambda: 1, timeout_s=0.01, late=late.append) is None  # no thread is left for it
    assert late == [None]
    assert not calls.close(timeout_s=0.01)
    release.set()
    assert ended.wait(WAIT_S)
    assert late == [None, 5]
    assert calls.close(timeout_s=WAIT_S)
    with pytest.raises(BackendError, match="closed"):
        calls.run(lambda: 1, timeout_s=1, late=late.append)


def test_a_call_that_raises_does_so_in_its_caller_and_the_thread_lives_on() -> None:
    calls = BoundedCalls("test", threads=1)
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, timeout_s=WAIT_S, late=lambda value: None)
    assert calls.run(lambda: 7, timeout_s=WAIT_S, late=lambda value: None) == 7
    calls.close(timeout_s=WAIT_S)


def test_a_suspect_is_one_until_its_time_has_passed() -> None:
    clock = Clock()
    nodes = SuspectNodes(cool_down_s=10, clock=clock)
    nodes.add(["a", "b"])
    clock.now_s += 9
    nodes.add(["b"])
    clock.now_s += 2
    assert nodes.current() == {"b"}
    clock.now_s += 10
    assert nodes.current() == frozenset()


class Hung:
    """Lets calls of one kind hang until released."""

    def __init__(self, fake: FakeMooncake, call: str, *, times: int) -> None:
        self.release = threading.Event()
        self._call = call
        self._times = times
        fake.before = self

    def __call__(self, call: str) -> None:
        if call == self._call and self._times > 0:
            self._times -= 1
            self.release.wait(WAIT_S)


def test_a_late_get_writes_neither_into_its_target_nor_into_what_others_were_given() -> None:
    fake = FakeMooncake()
    backend = open_fake(fake, staging_bytes=MIB, call_timeout_s=0.1)
    put(backend, (key(1), payload(1, 200_000)), (key(2), payload(2, 200_000)))
    free_bytes = backend.link.staging_free_bytes
    hung = Hung(fake, "get", times=2)
    target = bytearray(b"?" * 200_000)
    assert backend.get_into([GetItem(key(1), memoryview(target))]) == [Outcome.DEADLINE]
    assert backend.link.staging_free_bytes < free_bytes - 2 * 200_000
    target[:] = b"!" * 200_000  # its owner goes on
    assert backend.find([key(1)]) == [Outcome.UNAVAILABLE]  # its only node did not answer
    hung.release.set()
    _eventually(lambda: backend.link.running == 0)
    assert target == b"!" * 200_000
    assert backend.link.staging_free_bytes == free_bytes
    backend.close()
    assert fake.calls[-1] == "close"


def test_a_hung_node_costs_a_large_batch_two_timeouts_and_only_its_own_objects() -> None:
    fake = FakeMooncake()
    backend = open_fake(fake, staging_bytes=8 * MIB, call_timeout_s=0.2)  # groups of 2 MiB
    objects = [(key(number), payload(number, MIB // 2)) for number in range(32)]
    assert set(put(backend, *objects)) == {Outcome.OK}
    fake.nodes = {object_name(name): f"node-{number % 2}" for number, (name, _) in enumerate(objects)}
    release = threading.Event()
    hung: list[int] = []

    def hang(names: Sequence[str]) -> None:
        if "node-1" in {fake.nodes[name] for name in names}:
            hung.append(len(names))
            release.wait(WAIT_S)

    fake.on_get = hang
    found = get_many(backend, [(name, MIB // 2) for name, _ in objects])
    assert hung == [3, 3]  # the first group, and the first of that node alone
    assert [outcome is Outcome.OK for outcome, _ in found] == [number % 2 == 0 for number in range(32)]
    assert all(outcome is not Outcome.OK or content == objects[at][1] for at, (outcome, content) in enumerate(found))
    release.set()
    _eventually(lambda: backend.link.running == 0)
    backend.close()


def test_a_late_put_keeps_the_memory_that_it_reads() -> None:
    fake = FakeMooncake()
    backend = open_fake(fake, staging_bytes=MIB, call_timeout_s=0.1)
    hung = Hung(fake, "put", times=1)
    content = bytearray(payload(1, 200_000))
    assert put(backend, (key(1), content)) == [Outcome.DEADLINE]  # type: ignore[arg-type]  # bytes-like
    content[:] = bytes(200_000)  # the client's memory is its own again
    for number in range(2, 6):
        assert put(backend, (key(number), payload(number, 100_000))) == [Outcome.OK]
    hung.release.set()
    _eventually(lambda: backend.find([key(1)]) == [Outcome.OK])
    assert get(backend, key(1), 200_000) == (Outcome.OK, payload(1, 200_000))
    backend.close()


def test_a_client_that_hangs_is_not_closed_under_its_calls() -> None:
    fake = FakeMooncake()
    backend = open_fake(fake, staging_bytes=MIB, call_timeout_s=0.1)
    put(backend, (key(1), b"x"))
    hung = Hung(fake, "get", times=9)
    get(backend, key(1), 1)
    backend.close()
    assert "close" not in fake.calls
    assert fake.registered
    hung.release.set()


@pytest.mark.parametrize(("codes", "outcome"), [([-707], "OK"), ([-707, -707], "DEADLINE"), ([-801], "OK")])
def test_a_read_whose_lease_ran_out_is_tried_once_more(codes: list[int], outcome: str) -> None:
    fake = FakeMooncake()
    backend = open_fake(fake)
    put(backend, (key(1), payload(1, 5000)), (key(2), payload(2, 5000)))
    fake.codes[object_name(key(1))] = codes
    found = get_many(backend, [(key(1), 5000), (key(2), 5000)])
    assert [found[0][0].name, found[1][0].name] == [outcome, "OK"]
    assert found[1][1] == payload(2, 5000)
    assert backend.contains([key(1)]) == [True]
    backend.close()


def test_a_batch_costs_a_fixed_number_of_calls() -> None:
    fake = FakeMooncake()
    backend = open_fake(fake)
    objects = [(key(number), payload(number, 1000)) for number in range(200)]
    fake.calls.clear()
    assert put(backend, *objects) == [Outcome.OK] * 200
    assert fake.calls == ["exist", "put", "exist"]
    fake.calls.clear()
    assert put(backend, *objects) == [Outcome.EXISTS] * 200
    assert [outcome for outcome, _ in get_many(backend, [(name, 1000) for name, _ in objects])] == [Outcome.OK] * 200
    assert backend.delete([name for name, _ in objects]) == [Outcome.OK] * 200
    assert fake.calls == ["exist", "get", "remove"]
    backend.close()


def test_a_put_without_room_is_tried_once_more_when_eviction_had_a_moment() -> None:
    fake = FakeMooncake()
    backend = open_fake(fake)
    fake.put_codes = [0, -200, 0]
    assert put(backend, *[(key(number), b"x") for number in range(3)]) == [Outcome.OK] * 3
    fake.put_codes = [-200, -800, -1, -200]
    assert put(backend, *[(key(number), b"x") for number in range(10, 13)]) == [
        Outcome.NO_SPACE,
        Outcome.IO_ERROR,
        Outcome.IO_ERROR,
    ]
    backend.close()


def test_a_put_that_met_another_daemons_put_of_the_same_object_is_exists_when_that_ends() -> None:
    fake = FakeMooncake()
    backend = open_fake(fake)
    put(backend, (key(1), payload(1, 1000)))
    value = fake.values.pop(object_name(key(1)))
    confirmed = 0

    def before(call: str) -> None:  # the store takes our put for done while the other one is in progress
        nonlocal confirmed
        if call == "exist":
            fake.values.pop(object_name(key(1)), None)
            confirmed += 1
            if confirmed == 3:
                fake.values[object_name(key(1))] = value

    fake.before = before
    assert put(backend, (key(1), payload(1, 1000))) == [Outcome.EXISTS]
    backend.close()


def test_puts_stop_for_a_while_when_nodes_do_not_answer() -> None:
    fake, clock = FakeMooncake(), Clock()
    backend = open_fake(fake, clock=clock)
    fake.put_codes = [-800, -800]
    outcomes = [put(backend, (key(number), b"x"))[0].name for number in range(4)]
    assert outcomes == ["IO_ERROR", "IO_ERROR", "UNAVAILABLE", "UNAVAILABLE"]
    clock.now_s += 60
    assert put(backend, (key(5), b"x")) == [Outcome.OK]
    backend.close()


def test_the_tests_that_the_documentation_names_exist() -> None:
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", (ROOT / "docs" / "mooncake.md").read_text(encoding="utf-8")))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "backends").glob("*.py"))
    assert len(named) > 15
    assert {name for name in named if f"def {name}(" not in sources} == set()


def test_a_length_is_not_believed() -> None:
    fake = FakeMooncake()
    backend = open_fake(fake)
    name = object_name(key(1))
    for told in (0, 1, HEADER_BYTES, HEADER_BYTES + 4999, HEADER_BYTES + 5001, 1 << 40):
        put(backend, (key(1), payload(1, 5000)))
        fake.codes[name] = [told, told]
        assert get(backend, key(1), 5000)[0] is Outcome.CORRUPT
        assert name not in fake.values
    put(backend, (key(1), payload(1, 5000)))
    fake.values[name] = fake.values[name][:-1] + b"?"  # the right length says nothing about the bytes
    assert get(backend, key(1), 5000)[0] is Outcome.CORRUPT
    backend.close()


def test_a_master_that_is_away_is_not_asked_again_until_somebody_listens_there() -> None:
    fake, clock = FakeMooncake(), Clock()
    backend = open_fake(fake, clock=clock)
    put(backend, (key(1), b"x"))
    fake.is_unreachable, fake.is_listening = True, False
    assert backend.find([key(1)]) == [Outcome.UNAVAILABLE]
    assert backend.link.status().state is BreakerState.OPEN
    asked = len(fake.calls)
    for _ in range(50):
        clock.now_s += 1
        assert backend.find([key(1)]) == [Outcome.UNAVAILABLE]
        assert get(backend, key(1), 1)[0] is Outcome.UNAVAILABLE
        assert put(backend, (key(2), b"x")) == [Outcome.UNAVAILABLE]
    assert len(fake.calls) == asked
    fake.is_unreachable, fake.is_listening = False, True
    store_id = backend.store_id
    fake.values.clear()  # the new master has forgotten everything
    clock.now_s += 60
    assert backend.find([key(1)]) == [Outcome.ABSENT]
    assert backend.find([key(1)]) == [Outcome.ABSENT]
    assert backend.store_id != store_id
    backend.close()


def test_two_daemons_agree_on_one_id() -> None:
    fake = FakeMooncake()
    first, second = open_fake(fake), open_fake(fake)
    assert first.store_id == second.store_id
    assert len(first.store_id) == 16


def test_a_client_that_raises_or_answers_too_little_is_an_io_error() -> None:
    fake = FakeMooncake()
    backend = open_fake(fake)
    put(backend, (key(1), b"x"))

    def fail(call: str) -> None:
        if call == "get":
            raise RuntimeError("bad cast")

    fake.before = fail
    assert get(backend, key(1), 1)[0] is Outcome.IO_ERROR
    fake.before = lambda call: None
    assert get(backend, key(1), 1) == (Outcome.OK, b"x")
    backend.close()


def test_a_shared_store_asks_each_time_and_remembers_only_leases() -> None:
    fake, clock = FakeMooncake(), Clock()
    store = SharedStore(open_fake(fake), object_bytes_max=100, clock=clock)
    other = open_fake(fake)
    assert store.lookup([key(1)], lease_s=5) == ([Outcome.ABSENT], 0)
    assert put(other, (key(1), b"theirs")) == [Outcome.OK]
    outcomes, lease_id = store.lookup([key(1), key(2)], lease_s=5)
    assert outcomes == [Outcome.OK, Outcome.ABSENT]
    assert put(store, (key(1), b"theirs"), (key(3), bytes(101)), (key(4), b"4")) == [  # type: ignore[arg-type]
        Outcome.EXISTS,
        Outcome.TOO_LARGE,
        Outcome.OK,
    ]
    assert get(store, key(1), 6) == (Outcome.OK, b"theirs")  # type: ignore[arg-type]
    clock.now_s += 4
    assert store.renew(lease_id, lease_s=5)
    clock.now_s += 4
    assert (store.stats().holds.leases, store.stats().holds.leased_keys) == (1, 1)
    other.delete([key(1)])
    assert not store.renew(lease_id, lease_s=5)
    assert store.stats().holds.leases == 0
    stats = store.stats()
    assert (stats.lookup_hits, stats.lookup_misses, stats.bytes_read, stats.bytes_written) == (1, 2, 6, 1)
    assert (store.tenants(), store.tenant_usage(b"t" * 16)) == ([], TenantUsage(0, 0, 0))
    assert store.usage().objects == 1
    store.close()
    store.close()
    with pytest.raises(ConfigError):
        SharedStore(other, object_bytes_max=0)


def _eventually(is_so: Callable[[], bool]) -> None:
    """Wait for another thread."""
    tick = threading.Event()
    for _ in range(int(WAIT_S * 100)):
        if is_so():
            return
        tick.wait(0.01)
    pytest.fail("it did not come to pass in time")
