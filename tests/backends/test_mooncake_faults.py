"""A real Mooncake store whose parts die, hang, fill up and forget. See the table of traps in docs/mooncake.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.backends.base import GetItem
from hicache.backends.mooncake_layout import object_name
from hicache.backends.mooncake_store import MooncakeBackend
from hicache.backends.open import open_backend
from hicache.backends.shared_store import SharedStore
from hicache.breaker import BreakerState
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.mooncake_cluster import MIB, MooncakeCluster, eventually, require_wheel
from tests.backends.payloads import get, get_many, key, payload, put, scanned

require_wheel()

BOUND_S = 8.0  # four times the time for one call, here 2 s
WORDS = {number: payload(number, 64 << 10) for number in range(24)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MooncakeCluster]:
    with MooncakeCluster(tmp_path) as running:
        yield running


def put_words(backend: MooncakeBackend, numbers: range = range(24)) -> list[Outcome]:
    return put(backend, *[(key(number), WORDS[number]) for number in numbers])


def get_words(backend: MooncakeBackend) -> list[Outcome]:
    """The outcomes; what is OK has been compared."""
    found = get_many(backend, [(key(number), len(content)) for number, content in WORDS.items()])
    for (outcome, content), expected in zip(found, WORDS.values(), strict=True):
        assert outcome is not Outcome.OK or content == expected
    return [outcome for outcome, _ in found]


def words_on(cluster: MooncakeCluster, backend: MooncakeBackend, node: int) -> list[bool]:
    """Which of the words lie on a node, as the master says."""
    segments = {segment["te_endpoint"]: segment["segment_name"] for segment in cluster.segments()}
    names = {number: object_name(key(number)) for number in WORDS}
    copies = backend.link.locate(list(names.values()))
    assert cluster.node_names[node] in segments.values()
    return [
        any(segments[endpoint] == cluster.node_names[node] for endpoint in copies[names[number]].nodes)
        for number in WORDS
    ]


def test_a_killed_node_costs_its_own_objects_and_no_time_after_the_first(cluster: MooncakeCluster) -> None:
    for _ in range(2):
        cluster.start_node(64 * MIB)
    backend = cluster.open()
    assert set(put_words(backend)) == {Outcome.OK}
    is_lost = words_on(cluster, backend, 1)
    assert 0 < sum(is_lost) < 24
    cluster.nodes[1].kill()
    outcomes = get_words(backend)
    assert [outcome is not Outcome.OK for outcome in outcomes] == is_lost
    assert Outcome.ABSENT not in outcomes  # the node may come back: nobody said that they are gone
    started_s = time.monotonic()
    assert [outcome is Outcome.UNAVAILABLE for outcome in get_words(backend)] == is_lost
    found = backend.find([key(number) for number in WORDS])  # the master still says that they exist
    assert [outcome is Outcome.UNAVAILABLE for outcome in found] == is_lost
    assert time.monotonic() - started_s < 0.8  # asking the dead node takes a second
    eventually(lambda: Outcome.ABSENT in backend.find([key(number) for number in WORDS]), timeout_s=30)
    eventually(lambda: set(put_words(backend)) <= {Outcome.OK, Outcome.EXISTS}, timeout_s=30)
    assert set(get_words(backend)) == {Outcome.OK}
    backend.close()


def test_a_hung_node_holds_up_neither_the_caller_nor_the_objects_of_others(cluster: MooncakeCluster) -> None:
    for _ in range(2):
        cluster.start_node(64 * MIB)
    backend = cluster.open()
    put_words(backend)
    is_lost = words_on(cluster, backend, 1)
    free_bytes = backend.link.staging_free_bytes
    cluster.hang(cluster.nodes[1])
    started_s = time.monotonic()
    targets = [bytearray(b"?" * len(content)) for content in WORDS.values()]
    items = [GetItem(key(number), memoryview(target)) for number, target in zip(WORDS, targets, strict=True)]
    outcomes = backend.get_into(items)
    assert time.monotonic() - started_s < BOUND_S
    assert [outcome is not Outcome.OK for outcome in outcomes] == is_lost
    assert backend.link.staging_free_bytes < free_bytes  # the late transfers keep the memory that they write into
    started_s = time.monotonic()
    assert [outcome is Outcome.UNAVAILABLE for outcome in get_words(backend)] == is_lost
    assert time.monotonic() - started_s < 1.0
    eventually(lambda: backend.link.running == 0, timeout_s=25)  # the wheel's own limit, and not its 60 s
    assert backend.link.staging_free_bytes == free_bytes
    cluster.nodes[1].send_signal(signal.SIGCONT)
    untouched = [target for target, is_gone in zip(targets, is_lost, strict=True) if is_gone]
    assert all(set(target) == {ord("?")} for target in untouched)
    backend.close()


def test_puts_that_meet_a_hung_node_come_back_and_then_stop_for_a_while(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    backend = cluster.open(call_timeout_s=0.5)
    cluster.hang(cluster.nodes[0])
    started_s = time.monotonic()
    outcomes = [put(backend, (key(number), WORDS[number]))[0] for number in range(6)]
    assert time.monotonic() - started_s < 4.0
    assert outcomes[:2] == [Outcome.DEADLINE] * 2
    assert set(outcomes[2:]) <= {Outcome.UNAVAILABLE, Outcome.DEADLINE}
    started_s = time.monotonic()
    backend.close()  # with calls that hang
    assert time.monotonic() - started_s < 5.0
    cluster.nodes[0].send_signal(signal.SIGCONT)


def test_without_a_master_everything_is_unavailable_at_once_and_a_new_one_is_another_store(
    cluster: MooncakeCluster,
) -> None:
    cluster.start_node(64 * MIB)
    backend = cluster.open()
    put_words(backend)
    store_id = backend.store_id
    cluster.kill_master()
    assert put(backend, (key(99), b"x"))[0] in (Outcome.UNAVAILABLE, Outcome.DEADLINE)
    eventually(lambda: backend.link.status().state is not BreakerState.CLOSED, timeout_s=10)
    started_s = time.monotonic()
    for _ in range(20):
        assert set(get_words(backend)) == {Outcome.UNAVAILABLE}
        assert backend.find([key(1)]) == [Outcome.UNAVAILABLE]
        assert backend.contains([key(1)]) == [False]
        assert put(backend, (key(98), b"x")) == [Outcome.UNAVAILABLE]
        assert backend.delete([key(1)]) == [Outcome.IO_ERROR]
        backend.usage()
    assert time.monotonic() - started_s < 3.0  # a single call without a master takes more than four
    cluster.restart_master()
    eventually(lambda: backend.find([key(1)]) == [Outcome.ABSENT], timeout_s=30)
    eventually(lambda: put(backend, (key(1), WORDS[1]))[0].is_ok, timeout_s=30)  # the node joins again
    assert get(backend, key(1), len(WORDS[1])) == (Outcome.OK, WORDS[1])
    eventually(lambda: backend.find([key(1)]) == [Outcome.OK] and backend.store_id != store_id, timeout_s=30)
    backend.close()


def test_a_hung_master_costs_one_timeout_and_no_more(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    backend = cluster.open(call_timeout_s=0.5)
    put_words(backend)
    cluster.hang(cluster.master)
    started_s = time.monotonic()
    assert backend.find([key(1)]) == [Outcome.UNAVAILABLE]
    assert time.monotonic() - started_s < 1.0
    eventually(lambda: backend.link.status().state is not BreakerState.CLOSED, timeout_s=10)
    cluster.master.send_signal(signal.SIGCONT)
    eventually(lambda: backend.find([key(1)]) == [Outcome.OK], timeout_s=30)
    backend.close()


def test_a_full_pool_evicts_what_was_not_looked_up_and_never_raises(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    backend = cluster.open()
    content = payload(7, MIB)
    kept = [key(number) for number in range(8)]
    outcomes = put(backend, *[(name, content) for name in kept])
    for number in range(100, 260):
        assert backend.find(kept) == [Outcome.OK] * 8  # each time a lease
        outcomes += put(backend, (key(number), content))
    assert set(outcomes) <= {Outcome.OK, Outcome.NO_SPACE}
    assert outcomes.count(Outcome.OK) > 60
    usage = backend.usage()
    assert usage.objects < outcomes.count(Outcome.OK)
    assert usage.stored_bytes <= usage.capacity_bytes == 64 * MIB
    assert get_many(backend, [(name, MIB) for name in kept]) == [(Outcome.OK, content)] * 8
    assert put(backend, (key(1000), bytes(65 * MIB))) == [Outcome.NO_SPACE]  # more than any node has
    backend.close()


def test_bytes_that_somebody_else_put_first_are_corrupt_and_make_way(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    backend = cluster.open()
    raw = cluster.client()
    for foreign in (b"f", b"f" * 16, b"f" * 64, b"f" * (32 + 4096)):
        assert raw.put(object_name(key(1)), foreign) == 0
        assert (
            raw.put(object_name(key(1)), b"silently dropped") == 0
        )  # the trap: the first write stays, the answer is 0
        assert raw.get(object_name(key(1))) == foreign
        assert put(backend, (key(1), WORDS[1])) == [Outcome.EXISTS]
        assert get(backend, key(1), len(WORDS[1]))[0] is Outcome.CORRUPT
        assert backend.find([key(1)]) == [Outcome.ABSENT]
        assert put(backend, (key(1), WORDS[1])) == [Outcome.OK]
        assert get(backend, key(1), len(WORDS[1])) == (Outcome.OK, WORDS[1])
        backend.delete([key(1)])
    assert get(backend, key(2), 1)[0] is Outcome.ABSENT
    backend.close()


DYING_WRITER = """
import sys
from tests.backends.mooncake_cluster import require_wheel
store = require_wheel().MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1]) == 0
print("READY", flush=True)
store.put(sys.argv[2], b"never finished")
"""


def test_a_put_behind_a_writer_that_died_is_not_reported_as_stored(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    backend = cluster.open()
    cluster.hang(cluster.nodes[0])
    root = Path(__file__).parents[2]
    writer = subprocess.Popen(
        [sys.executable, "-c", DYING_WRITER, cluster.address, object_name(key(1))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "READY\n"
    raw = cluster.client()
    eventually(lambda: raw.get_size(object_name(key(1))) == -703, timeout_s=10)  # PutStart was, PutEnd will not be
    writer.kill()
    writer.wait()
    writer.stdout.close()
    cluster.nodes[0].send_signal(signal.SIGCONT)
    assert raw.put(object_name(key(1)), b"trap") == 0  # the store says so
    assert raw.is_exist(object_name(key(1))) == 0  # and has nothing
    assert put(backend, (key(1), WORDS[1]), (key(2), WORDS[2])) == [Outcome.IO_ERROR, Outcome.OK]
    assert get(backend, key(1), len(WORDS[1]))[0] is Outcome.ABSENT
    backend.close()


def test_leases_of_the_store_hold_off_others_but_not_the_owner(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    store = SharedStore(cluster.open(), object_bytes_max=MIB)
    raw = cluster.client()
    assert put(store, (key(1), b"one"), (key(2), b"two")) == [Outcome.OK] * 2  # type: ignore[arg-type]  # same calls
    outcomes, lease_id = store.lookup([key(1), key(2), key(3)], lease_s=60)
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.ABSENT]
    assert raw.remove(object_name(key(1))) == -706
    assert store.renew(lease_id, lease_s=60)
    assert store.delete([key(1)]) == [Outcome.OK]
    assert not store.renew(lease_id, lease_s=60)
    assert not store.release(lease_id)
    eventually(lambda: raw.remove(object_name(key(2))) == 0, timeout_s=10)
    store.close()


def test_a_lease_that_ends_during_a_transfer_never_gives_bytes(tmp_path: Path) -> None:
    """The lease is long enough for the few bytes of an open, and too short for what is read then."""
    with MooncakeCluster(tmp_path, lease="10ms") as cluster:
        cluster.start_node(160 * MIB)
        backend = cluster.open(call_timeout_s=10.0)
        content = payload(1, 48 * MIB)
        assert put(backend, (key(1), content))[0] in (Outcome.OK, Outcome.IO_ERROR)
        outcome, found = get(backend, key(1), len(content))
        assert outcome is Outcome.DEADLINE or found == content
        backend.close()


def test_copies_on_two_nodes_survive_one_of_them(cluster: MooncakeCluster) -> None:
    for _ in range(2):
        cluster.start_node(64 * MIB)
    backend = cluster.open(replicas=2)
    assert set(put_words(backend)) == {Outcome.OK}
    assert all(words_on(cluster, backend, 0))
    assert all(words_on(cluster, backend, 1))
    assert backend.usage().stored_bytes > 2 * sum(map(len, WORDS.values()))  # copies count
    cluster.nodes[1].kill()
    eventually(lambda: set(get_words(backend)) == {Outcome.OK}, timeout_s=30)
    assert set(backend.find([key(number) for number in WORDS])) == {Outcome.OK}
    backend.close()


def test_more_copies_than_nodes_are_as_many_as_there_are_nodes(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    backend = cluster.open(replicas=3)
    assert set(put_words(backend)) == {Outcome.OK}
    assert set(get_words(backend)) == {Outcome.OK}
    backend.close()


def test_a_soft_pin_is_told_to_the_store_and_one_that_it_forbids_stops_the_start(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    backend = cluster.open(soft_pin_s=600)
    put_words(backend)
    assert "master_soft_pin_key_count 24" in cluster.http("/metrics")
    backend.close()
    with pytest.raises(ConfigError, match="mooncake_soft_pin_s = 1000000: expected at most"):
        cluster.open(soft_pin_s=1_000_000)


def test_memory_that_is_lent_is_preferred_and_taken_back_at_the_end(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    backend = cluster.open(segment_bytes=64 * MIB)
    assert len(cluster.segments()) == 2
    assert set(put_words(backend)) == {Outcome.OK}
    used = {segment["segment_name"]: int(segment["allocator_used_bytes"]) for segment in cluster.segments()}
    assert max(used.values()) > sum(map(len, WORDS.values()))
    assert used[cluster.node_names[0]] < 4096
    assert set(get_words(backend)) == {Outcome.OK}
    backend.close()
    eventually(lambda: len(cluster.segments()) == 1, timeout_s=20)


def test_daemons_that_start_and_store_at_once_agree_on_the_id_and_lose_nothing(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    settings = cluster.settings()
    with ThreadPoolExecutor(4) as pool:
        backends = list(pool.map(lambda _: MooncakeBackend.open(settings), range(4)))
        assert len({backend.store_id for backend in backends}) == 1
        for outcomes in pool.map(put_words, backends):
            assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS}
        assert set(pool.map(lambda backend: tuple(get_words(backend)), backends)) == {(Outcome.OK,) * 24}
        list(pool.map(MooncakeBackend.close, backends))


def test_what_cannot_be_opened_says_why(cluster: MooncakeCluster) -> None:
    with pytest.raises(BackendError, match="keeps nothing: it has no node"):
        cluster.open()
    cluster.start_node(64 * MIB)
    with pytest.raises(ConfigError, match="mooncake_metrics"):
        open_backend(f"mooncake://{cluster.address}?metrics=127.0.0.1:1", capacity_bytes=1)
    backend = open_backend(cluster.settings().url(), capacity_bytes=1)
    assert (backend.name, len(backend.store_id)) == ("mooncake", 16)
    backend.close()
    cluster.kill_master()
    started_s = time.monotonic()
    with pytest.raises(BackendError, match="no Mooncake master at 127"):
        cluster.open()
    assert time.monotonic() - started_s < 20.0  # and not the 90 s that a client takes by itself


def test_a_name_is_told_apart_from_those_of_other_users_of_the_pool(cluster: MooncakeCluster) -> None:
    cluster.start_node(64 * MIB)
    backend = cluster.open()
    raw = cluster.client()
    assert raw.put("model_hash_0_k", b"of SGLang") == 0
    put(backend, (key(1), b"ours"))
    assert [stored.key for stored in scanned(backend)] == [key(1)]
    assert backend.usage().objects == 2
    backend.close()
