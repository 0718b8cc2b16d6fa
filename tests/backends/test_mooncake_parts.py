"""Parts of the Mooncake backend alone: names, headers, codes, settings, staging, calls that hang."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends import mooncake_client
from hicache.backends.arena import Arena
from hicache.backends.mooncake_calls import BoundedCalls
from hicache.backends.mooncake_codes import is_without_master, outcome_of
from hicache.backends.mooncake_layout import HEADER_BYTES, decode_header, encode_header, key_of_name, object_name
from hicache.backends.mooncake_nodes import SuspectNodes
from hicache.backends.mooncake_settings import MooncakeSettings, parse_url
from hicache.backends.open import open_backend, open_store
from hicache.breaker import BreakerState
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.fake_mooncake import MIB, Clock, FakeMooncake, open_fake
from tests.backends.payloads import get, key, put

WAIT_S = 30.0
ROOT = Path(__file__).parents[2]


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


def test_the_tests_that_the_documentation_names_exist() -> None:
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", (ROOT / "docs" / "mooncake.md").read_text(encoding="utf-8")))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "backends").glob("*.py"))
    assert len(named) > 15
    assert {name for name in named if f"def {name}(" not in sources} == set()


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


def _eventually(is_so: Callable[[], bool]) -> None:
    """Wait for another thread."""
    tick = threading.Event()
    for _ in range(int(WAIT_S * 100)):
        if is_so():
            return
        tick.wait(0.01)
    pytest.fail("it did not come to pass in time")
