"""What goes wrong with the store is a miss, holds nobody, and leaks nothing."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolTransfer

from hicache.outcome import Outcome
from tests.client.hicached import HicachedProcess, token_of
from tests.client.small_daemon import SmallDaemon
from tests.client.support import open_descriptors, wait_until
from tests.engines.sglang.conftest import Start
from tests.engines.sglang.devices import PAGE_TOKENS, Device, gdn, mha
from tests.engines.sglang.rig import assert_equal, extra_config, storage_threads, tokens

DEADLINE_S = 0.3
Fault: TypeAlias = Callable[[SmallDaemon], threading.Event | None]  # what ends it, if anything can

revisions = itertools.count()


@pytest.fixture
def revision() -> str:
    """Weights that no other test has."""
    return f"faults {next(revisions)}"


def hang_in_lookups(daemon: SmallDaemon) -> threading.Event:
    return daemon.faults.hang(where="before_reply", operation="lookup", times=100)


def hang_in_gets(daemon: SmallDaemon) -> threading.Event:
    return daemon.faults.hang(where="before_bytes", operation="get", times=100)


def answer_gets_late(daemon: SmallDaemon) -> threading.Event:
    return daemon.faults.hang(where="before_reply", operation="get", times=100)


def say_deadline_and_write_later(daemon: SmallDaemon) -> threading.Event:
    release = threading.Event()
    daemon.faults.late = lambda operation: release if operation == "get" else None
    return release


def refuse_gets(daemon: SmallDaemon) -> None:
    daemon.faults.refuse["get"] = (grpc.StatusCode.INTERNAL, "SHUTTING_DOWN: this daemon ends")


def refuse_lookups(daemon: SmallDaemon) -> None:
    daemon.faults.refuse["lookup"] = (grpc.StatusCode.INTERNAL, "SHUTTING_DOWN: this daemon ends")


def find_corruption(daemon: SmallDaemon) -> None:
    daemon.faults.outcomes = lambda outcomes: bytes([Outcome.CORRUPT] * len(outcomes))


def lose_what_lookups_found(daemon: SmallDaemon) -> None:
    daemon.faults.before_bytes = lambda operation: daemon.objects.clear() if operation == "get" else None


def end(daemon: SmallDaemon) -> None:
    daemon.stop()


FAULTS = [
    hang_in_lookups,
    hang_in_gets,
    answer_gets_late,
    refuse_gets,
    refuse_lookups,
    find_corruption,
    say_deadline_and_write_later,
    lose_what_lookups_found,
    end,
]


@pytest.mark.parametrize("model", [mha, gdn])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_prefetch_during_a_fault_finds_nothing_and_gives_everything_back(
    daemon: SmallDaemon, start: Start, fault: Fault, model: Callable[[], Device]
) -> None:
    config = extra_config(daemon.address, deadline_s=DEADLINE_S)
    first = start(model(), config)
    first.connect()
    first.compute(tokens(8))
    first.settle()
    second = start(model(), config)
    second.connect()
    slots = second.host_slots()
    release = fault(daemon)
    try:
        assert second.prefetch(tokens(8)) == 0
        second.idle()
        assert second.host_slots() == slots
        computed = second.compute(tokens(8))  # what it did not find
        second.settle()
    finally:
        if release is not None:
            release.set()
    assert_equal(second.on_device(tokens(8)), computed)
    assert second.host_locks() == 0


def test_without_a_fault_the_same_prefetch_finds_all(daemon: SmallDaemon, start: Start) -> None:
    config = extra_config(daemon.address, deadline_s=DEADLINE_S)
    first = start(gdn(), config)
    first.connect()
    computed = first.compute(tokens(8))
    first.settle()
    second = start(gdn(), config)
    second.connect()
    assert second.prefetch(tokens(8)) == 8 * PAGE_TOKENS
    assert_equal(second.load(tokens(8)), computed)


@pytest.mark.parametrize("model", [mha, gdn])
def test_br_103_host_pages_that_the_store_may_still_write_are_given_to_nobody_until_it_lets_go(
    daemon: SmallDaemon, start: Start, model: Callable[[], Device]
) -> None:
    config = extra_config(daemon.address, deadline_s=DEADLINE_S, allocator="shm")
    first = start(model(), config)
    first.connect()
    first.compute(tokens(8))
    first.settle()
    second = start(model(), config)
    second.connect()
    assert second.shares_host_memory()
    slots = second.host_slots()
    release = hang_in_gets(daemon)
    try:
        assert second.prefetch(tokens(8)) == 0
        second.idle()
        free, size = second.host_slots()["kv"]
        assert free == size - 8 * PAGE_TOKENS
        second.cache.reset()  # gives out everything but them
        assert second.host_slots()["kv"] == (free, size)
        computed = second.compute(tokens(8, seed=1))
        second.settle()
    finally:
        release.set()
    assert_equal(second.on_device(tokens(8, seed=1)), computed)
    second.cache.reset()
    wait_until(lambda: second.host_slots() == slots, what="the end of the holds")


@pytest.mark.parametrize("model", [mha, gdn])
def test_a_store_that_hangs_while_it_is_written_to_is_given_up_at_the_deadline(
    daemon: SmallDaemon, start: Start, model: Callable[[], Device]
) -> None:
    engine = start(model(), extra_config(daemon.address, deadline_s=DEADLINE_S))
    engine.connect()
    release = daemon.faults.hang(where="before_bytes", operation="put", times=100)
    engine.compute(tokens(8))
    engine.settle()  # while it hangs
    release.set()
    assert engine.host_locks() == 0


def test_states_that_are_missing_make_the_whole_prefix_a_miss(
    hicached: HicachedProcess, start: Start, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    first = start(gdn(), config)
    first.connect()
    keep, put = first.storage.batch_set_v2, []

    def without_states(transfers: list[object], extra_info: object = None) -> dict[str, list[bool]]:
        put.extend(transfers)
        return {each.name: [True] * len(each.keys) for each in transfers}  # type: ignore[attr-defined]

    monkeypatch.setattr(first.storage, "batch_set_v2", without_states)
    first.compute(tokens(16))
    first.settle()
    second = start(gdn(), config)
    second.connect()
    slots = second.host_slots()
    assert second.storage.batch_exists(second.hashes(tokens(16))) == 16
    assert second.stored(tokens(16)) == 0
    assert second.prefetch(tokens(16)) == 0
    second.idle()
    assert second.host_slots() == slots
    assert put
    assert keep


def test_br_138_states_that_cannot_be_read_make_the_whole_prefix_a_miss(
    hicached: HicachedProcess, start: Start, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    first = start(gdn(), config)
    first.connect()
    first.compute(tokens(16))
    first.settle()
    second = start(gdn(), config)
    second.connect()
    slots = second.host_slots()
    monkeypatch.setattr(second.storage._pools["mamba"], "_roots", [b"?" * 32, b"!" * 32])
    monkeypatch.setattr(
        type(second.storage), "batch_exists_v2", lambda self, keys, transfers, extra_info=None: all_there(len(keys))
    )
    assert second.prefetch(tokens(16)) == 0
    second.idle()
    assert second.host_slots() == slots


def all_there(pages: int) -> object:
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

    return PoolTransferResult(pages, {"kv": pages, "mamba": pages}, list(range(1, pages + 1)))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_br_038_hicached_dies_or_freezes_while_it_serves_and_is_used_again_afterwards(
    tmp_path: Path, start: Start, sent: signal.Signals
) -> None:
    process = HicachedProcess(tmp_path)
    process.start()
    try:
        config = extra_config(process.address, deadline_s=DEADLINE_S)
        first = start(mha(), config)
        first.connect()
        computed = first.compute(tokens(8))
        first.settle()
        second = start(mha(), config)
        second.connect()
        slots = second.host_slots()
        process.signal(sent)
        assert second.prefetch(tokens(8)) == 0
        second.idle()
        assert second.host_slots() == slots
        second.compute(tokens(8, seed=1))
        second.settle()
        if sent is signal.SIGKILL:
            process.start()
        else:
            process.signal(signal.SIGCONT)
        second.connect()
        found = wait_for_prefetch(second)
        assert found == 8 * PAGE_TOKENS
        assert_equal(second.load(tokens(8)), computed)
    finally:
        process.signal(signal.SIGCONT) if sent is signal.SIGSTOP else None
        process.end()


def wait_for_prefetch(engine: object, timeout_s: float = 20.0) -> int:
    """What a prefetch finds once the store is used again: the client finds that out by itself."""
    ends_at_s = time.monotonic() + timeout_s
    found = 0
    while not found and time.monotonic() < ends_at_s:
        found = engine.prefetch(tokens(8))  # type: ignore[attr-defined]
    return found


def test_a_flipped_byte_and_a_truncated_object_are_misses(tmp_path: Path, start: Start) -> None:
    process = HicachedProcess(tmp_path, backend="file")
    process.start()
    try:
        config = extra_config(process.address)
        first = start(mha(), config)
        first.connect()
        computed = first.compute(tokens(8))
        first.settle()
        objects = sorted(
            path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 4096
        )
        assert len(objects) >= 2
        payload = bytearray(objects[0].read_bytes())
        payload[len(payload) // 2] ^= 1
        objects[0].write_bytes(payload)
        with objects[1].open("r+b") as file:
            file.truncate(objects[1].stat().st_size - 100)
        second = start(mha(), config)
        second.connect()
        found = second.prefetch(tokens(8))
        assert found < 8 * PAGE_TOKENS
        if found:
            shorter = tokens(8)[:found]
            assert_equal(second.load(shorter), {name: tensor[:found] for name, tensor in computed.items()})
    finally:
        process.end()


def test_br_082_a_full_store_refuses_pages_and_the_engine_goes_on(daemon: SmallDaemon, start: Start) -> None:
    daemon.faults.outcomes = lambda outcomes: bytes([Outcome.NO_SPACE] * len(outcomes))
    engine = start(gdn(), extra_config(daemon.address))
    engine.connect()
    computed = engine.compute(tokens(8))
    engine.settle()
    assert engine.host_locks() == 0
    assert_equal(engine.on_device(tokens(8)), computed)


def test_an_engine_starts_and_serves_while_hicached_is_away(tmp_path: Path, start: Start) -> None:
    descriptors, threads = open_descriptors(), storage_threads()
    engine = start(gdn(), extra_config(f"unix://{tmp_path}/nobody.sock", deadline_s=DEADLINE_S))
    slots = engine.host_slots()
    assert engine.prefetch(tokens(8)) == 0
    engine.idle()
    assert engine.host_slots() == slots
    computed = engine.compute(tokens(8))
    engine.settle()
    assert_equal(engine.on_device(tokens(8)), computed)
    engine.close()
    wait_until(lambda: storage_threads() == threads, what="the end of the threads")
    wait_until(lambda: not open_descriptors() - descriptors, what="the end of the descriptors")


def test_one_call_about_several_pools_has_one_deadline(daemon: SmallDaemon, start: Start) -> None:
    engine = start(gdn(), extra_config(daemon.address, deadline_s=DEADLINE_S))
    engine.connect()
    group = engine.cache.host_pool_group
    moved = [
        PoolTransfer(
            name, host_indices=group.alloc(group.get_entry(name).host_pool.page_size, pool=name), keys=["0" * 64]
        )
        for name in ("kv", "mamba")
    ]
    assert engine.storage.batch_set_v2(moved) == {"kv": [True], "mamba": [True]}
    asked: list[float] = []
    pages = engine.storage._pages
    assert pages is not None
    get = pages.get

    def late(items: Any, *, deadline_s: float) -> Any:
        asked.append(deadline_s)
        return get(items, deadline_s=deadline_s)

    pages.get = late  # type: ignore[method-assign]
    release = daemon.faults.hang(where="before_bytes", operation="get", times=100)
    try:
        assert engine.storage.batch_get_v2(moved) == {"kv": [False], "mamba": [False]}
    finally:
        release.set()
        for each in moved:
            group.free(each.host_indices, pool=each.name)
    assert sum(asked) <= DEADLINE_S + 0.1
    assert len(asked) == 1, "nothing is asked for when the time is over"


def test_detaching_while_a_call_hangs_leaks_nothing(daemon: SmallDaemon, start: Start) -> None:
    engine = start(mha(), extra_config(daemon.address, deadline_s=DEADLINE_S, allocator="shm"))
    engine.connect()
    engine.compute(tokens(8))
    engine.settle()
    engine.evict_everything()
    slots = engine.host_slots()
    begun, release = threading.Event(), threading.Event()

    def hang(operation: str) -> None:
        begun.set()
        release.wait(20)

    daemon.faults.before_bytes = hang
    try:
        handle = CacheRequestHandle("hangs", 0)
        node = engine.match(tokens(8)).last_host_node
        engine.cache.prefetch_from_storage(handle, node, tokens(8), None, None, None, None, None)

        def is_hanging() -> bool:
            engine.step()
            return begun.is_set()

        wait_until(is_hanging, what="the call")
        detached, text = engine.cache.detach_storage_backend()
        assert detached, text
    finally:
        release.set()
    wait_until(lambda: not storage_threads(), what="the end of the threads")
    engine.cache.reset()
    wait_until(lambda: engine.host_slots() == slots, what="the end of the holds")


def test_br_051_requests_that_are_aborted_give_everything_back(daemon: SmallDaemon, start: Start) -> None:
    config = extra_config(daemon.address, deadline_s=DEADLINE_S, allocator="shm")
    engine = start(gdn(), config)
    engine.connect()
    engine.compute(tokens(8))
    engine.settle()
    engine.evict_everything()
    slots = engine.host_slots()
    release = daemon.faults.hang(where="before_bytes", operation="get", times=100)
    for number in range(6):
        handle = CacheRequestHandle(f"aborted {number}", 0)
        engine.cache.prefetch_from_storage(
            handle, engine.match(tokens(8)).last_host_node, tokens(8), None, None, None, None, None
        )
        for _ in range(number):
            engine.step()
        engine.cache.release_aborted_request(handle)
        engine.step()
    release.set()
    engine.idle()
    wait_until(lambda: engine.host_slots() == slots, what="the end of the holds")
    assert wait_for_prefetch(engine) == 8 * PAGE_TOKENS
