"""The parts of the Mooncake backend, and what it does when a client answers late or wrongly. Needs no wheel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX, GetItem
from hicache.backends.mooncake_layout import HEADER_BYTES, key_of_name, object_name
from hicache.backends.shared_store import SharedStore
from hicache.backends.tenant_usage import TenantUsage
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from tests.backends.fake_mooncake import MIB, Clock, FakeMooncake, open_fake
from tests.backends.payloads import get, get_many, key, payload, put

WAIT_S = 30.0
ROOT = Path(__file__).parents[2]


@given(key=st.binary(min_size=1, max_size=PHYSICAL_KEY_BYTES_MAX))
def test_a_name_gives_its_key_back(key: bytes) -> None:
    assert key_of_name(object_name(key)) == key


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
