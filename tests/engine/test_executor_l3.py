"""Jobs for L3 complete exactly once, whatever L3 does."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ConfigError, SpecError
from hicache.executor import Executor, ExecutorLimits
from hicache.jobs import Completion, FetchJob, LookupItem, LookupJob, StoreJob, TransferItem
from hicache.keys import object_key
from hicache.l3 import Done, L3Item
from hicache.outcome import Outcome
from hicache.pools import L1Pool, L2Pool
from hicache.spec import CacheSpec, PagedGroup
from tests.engine.conftest import Rank
from tests.engine.fakes import WAIT_S, Completions, MemoryL3, ScriptedL3
from tests.engine.specs import POISON, as_bytes, fill_with_noise, poison

OK = Outcome.OK
KEYS = [bytes([index]) * 32 for index in range(10)]


def fetch(job_id: int, *slots: int, group: int = 0) -> FetchJob:
    return FetchJob(job_id, tuple(TransferItem(group, KEYS[slot % 10], slot) for slot in slots))


def store(job_id: int, *slots: int, group: int = 0) -> StoreJob:
    return StoreJob(job_id, tuple(TransferItem(group, KEYS[slot % 10], slot) for slot in slots))


def lookup(job_id: int, *slots: int) -> LookupJob:
    return LookupJob(job_id, tuple(LookupItem(0, KEYS[slot]) for slot in slots))


def at_once(done: Done, outcomes: list[Outcome]) -> None:
    done(outcomes)


def twice(done: Done, outcomes: list[Outcome]) -> None:
    done(outcomes)
    done([Outcome.CORRUPT] * len(outcomes))


def raising(done: Done, outcomes: list[Outcome]) -> None:
    raise OSError("injected")


def done_then_raising(done: Done, outcomes: list[Outcome]) -> None:
    done(outcomes)
    raise OSError("injected")


def one_too_few(done: Done, outcomes: list[Outcome]) -> None:
    done(outcomes[1:])


def nonsense(done: Done, outcomes: list[Outcome]) -> None:
    done([99] * len(outcomes))  # type: ignore[list-item]  # on purpose


def nothing(done: Done, outcomes: list[Outcome]) -> None:
    pass


def test_objects_go_to_l3_and_come_back_into_other_slots(rank: Rank) -> None:
    l3 = MemoryL3(rank.l2)
    executor = rank.executor(l3)
    fill_with_noise(rank.l2.view(0), seed=1)
    before = as_bytes(rank.l2.view(0)[3])
    executor.submit(store(1, 3, 4))
    assert rank.completions.outcomes(1) == (OK, OK)
    assert l3.objects[object_key(KEYS[3], group=0, shard=0)] == before
    executor.submit(lookup(2, 3, 5, 4))
    assert rank.completions.outcomes(2) == (OK, Outcome.ABSENT, OK)
    executor.submit(FetchJob(3, (TransferItem(0, KEYS[3], 8), TransferItem(0, KEYS[5], 9))))
    assert rank.completions.outcomes(3) == (OK, Outcome.ABSENT)
    assert as_bytes(rank.l2.view(0)[8]) == before
    executor.submit(store(4, 3))
    assert rank.completions.outcomes(4) == (Outcome.EXISTS,)


def test_objects_are_named_by_shard_and_each_rank_asks_for_its_own() -> None:
    spec = CacheSpec("m", "1", (PagedGroup("g", (0,), 2, 8, "int8"),), page_tokens=4, tp_size=2)
    completions = Completions()
    pools = [(L1Pool(spec, rank=rank, pages=2), L2Pool(spec, (8,), rank=rank)) for rank in (0, 1)]
    objects: dict[bytes, bytes] = {}
    ranks = [Executor(spec, l1, l2, MemoryL3(l2, objects), on_complete=completions) for l1, l2 in pools]
    ranks[0].submit(store(1, 0, 1))
    assert completions.outcomes(1) == (OK, OK)
    ranks[1].submit(store(2, 1))
    assert completions.outcomes(2) == (OK,)
    ranks[0].submit(lookup(3, 0, 1, 2))
    assert completions.outcomes(3) == (OK, OK, Outcome.ABSENT)
    ranks[1].submit(lookup(4, 0, 1, 2))
    assert completions.outcomes(4) == (Outcome.ABSENT, OK, Outcome.ABSENT)
    for executor in ranks:
        assert executor.close()
    with pytest.raises(ConfigError, match=r"l2\.rank = 1: expected a pool of the same CacheSpec and rank as L1's, 0"):
        Executor(spec, pools[0][0], pools[1][1], None, on_complete=completions)
    with pytest.raises(ConfigError, match=r"l1\.spec = 'm': expected a pool of the same CacheSpec"):
        Executor(dataclasses.replace(spec, revision="2"), *pools[0], None, on_complete=completions)
    with pytest.raises(SpecError, match="rank = None: expected one of the 2 ranks"):
        L2Pool(spec, (8,))
    for _, l2 in pools:
        l2.close()


@pytest.mark.parametrize("kind", ["fetch", "store"])
@pytest.mark.parametrize(
    ("script", "outcome", "faults"),
    [
        (at_once, OK, set()),
        (twice, OK, {".again"}),
        (raising, Outcome.IO_ERROR, {""}),
        (done_then_raising, OK, {""}),
        (one_too_few, Outcome.IO_ERROR, {""}),
        (nonsense, Outcome.IO_ERROR, {""}),
    ],
)
def test_a_job_completes_once_whatever_l3_does(
    rank: Rank, kind: str, script: Callable[[Done, list[Outcome]], None], outcome: Outcome, faults: set[str]
) -> None:
    l3 = ScriptedL3(rank.l2, script)
    for key in KEYS:
        l3.objects[object_key(key, group=0, shard=0)] = bytes(rank.spec.object_bytes[0])
    executor = rank.executor(l3)
    executor.submit(fetch(1, 0, 1) if kind == "fetch" else store(1, 0, 1))
    call = "l3.get" if kind == "fetch" else "l3.put"
    expected = Outcome.EXISTS if kind == "store" and outcome is OK else outcome
    assert rank.completions.outcomes(1) == (expected, expected)
    assert executor.close()
    assert len(rank.completions.all) == 1
    assert executor.faults().keys() == {call + fault for fault in faults}


def test_a_job_whose_bytes_are_in_doubt_completes_when_they_no_longer_are(rank: Rank) -> None:
    """The call has returned long ago; a thread of L3 reports later, and its outcome counts."""
    late: list[Done] = []
    l3 = ScriptedL3(rank.l2, lambda done, outcomes: late.append(done))
    executor = rank.executor(l3, limits=ExecutorLimits(fetch_threads=1))
    executor.submit(fetch(1, 0))
    executor.submit(lookup(2, 0))
    assert l3.entered.acquire(timeout=WAIT_S)
    assert rank.completions.outcomes(2) == (Outcome.ABSENT,)
    assert not rank.completions.has(1)
    assert executor.open_jobs()["fetch"] == 1
    reporter = threading.Thread(target=late[0], args=([Outcome.DEADLINE],), name="reporter")
    reporter.start()
    reporter.join()
    assert rank.completions.outcomes(1) == (Outcome.DEADLINE,)
    assert rank.completions.threads[-1] == "reporter"


def test_a_slow_store_does_not_hold_up_fetches_lookups_or_copies(rank: Rank) -> None:
    go_on = threading.Event()

    class SlowPut(MemoryL3):
        def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
            assert go_on.wait(WAIT_S)
            super().put(items, timeout_s=timeout_s, done=done)

    executor = rank.executor(SlowPut(rank.l2), limits=ExecutorLimits(store_threads=1, open_jobs_max=2))
    for job_id in (1, 2, 3):
        executor.submit(store(job_id, job_id))
    assert rank.completions.outcomes(3) == (Outcome.REFUSED,)
    executor.submit(fetch(4, 0))
    executor.submit(lookup(5, 0))
    assert rank.completions.outcomes(4) == rank.completions.outcomes(5) == (Outcome.ABSENT,)
    assert not rank.completions.has(1)
    go_on.set()
    assert [rank.completions.outcomes(job_id) for job_id in (1, 2)] == [(OK,), (OK,)]


def test_items_go_to_l3_in_bounded_batches_and_bad_ones_go_nowhere(rank: Rank) -> None:
    l3 = MemoryL3(rank.l2)
    two_objects = 2 * rank.spec.object_bytes[0]
    limits = ExecutorLimits(batch_keys_max=3, batch_bytes_max=two_objects, lookup_keys_max=2)
    executor = rank.executor(l3, limits=limits)
    items = [TransferItem(0, KEYS[slot], slot) for slot in range(5)]
    items[1:1] = [TransferItem(0, KEYS[0], 10), TransferItem(7, KEYS[0], 0), TransferItem(0, KEYS[0], -1)]
    executor.submit(StoreJob(1, tuple(items)))
    bad = (Outcome.BAD_RANGE,) * 3
    assert rank.completions.outcomes(1) == (OK, *bad, OK, OK, OK, OK)
    executor.submit(StoreJob(2, tuple(TransferItem(1, KEYS[slot], slot) for slot in range(7))))  # small ones: by keys
    assert rank.completions.outcomes(2) == (OK,) * 7
    executor.submit(lookup(3, 0, 1, 2, 3, 9))
    assert rank.completions.outcomes(3) == (OK, OK, OK, OK, Outcome.ABSENT)
    sizes = [(name, count) for name, count, _ in l3.calls]
    assert sizes[:6] == [("put", 2), ("put", 2), ("put", 1), ("put", 3), ("put", 3), ("put", 1)]
    assert sizes[6:] == [("lookup", 2), ("lookup", 2), ("lookup", 1)]
    assert executor.faults() == {"bad_range": 3}


def test_an_object_above_the_batch_bound_goes_alone(rank: Rank) -> None:
    l3 = MemoryL3(rank.l2)
    executor = rank.executor(l3, limits=ExecutorLimits(batch_bytes_max=1))
    executor.submit(store(1, 0, 1))
    assert rank.completions.outcomes(1) == (OK, OK)
    assert [count for _, count, _ in l3.calls] == [1, 1]


def test_a_key_that_cannot_be_named_is_an_outcome(rank: Rank) -> None:
    executor = rank.executor(MemoryL3(rank.l2))
    executor.submit(LookupJob(1, (LookupItem(1 << 20, KEYS[0]),)))
    assert rank.completions.outcomes(1) == (Outcome.IO_ERROR,)
    executor.submit(lookup(2, 0))
    assert rank.completions.outcomes(2) == (Outcome.ABSENT,)


def test_a_lookup_that_raises_or_answers_nonsense_is_an_outcome(rank: Rank) -> None:
    class Broken(MemoryL3):
        def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
            if keys[0].startswith(KEYS[0]):
                raise OSError("injected")
            return [OK] * (len(keys) + 1)

    executor = rank.executor(Broken(rank.l2))
    for job_id in (0, 1):
        executor.submit(lookup(job_id, job_id))
        assert rank.completions.outcomes(job_id) == (Outcome.IO_ERROR,)
    assert executor.faults() == {"l3.lookup": 2}


def test_deadlines_count_from_submit_and_what_has_not_begun_by_then_does_not(rank: Rank) -> None:
    now_s = 100.0
    held = threading.Event()
    entered = threading.Semaphore(0)

    class Holding(MemoryL3):
        def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
            entered.release()
            assert held.wait(WAIT_S)
            super().get(items, timeout_s=timeout_s, done=done)

    l3 = Holding(rank.l2)
    limits = ExecutorLimits(fetch_threads=1, batch_keys_max=1, fetch_timeout_s=5.0)
    executor = rank.executor(l3, clock=lambda: now_s, limits=limits)
    executor.submit(fetch(1, 0, 1))
    executor.submit(fetch(2, 2))
    assert entered.acquire(timeout=WAIT_S)
    now_s = 106.0
    held.set()
    assert rank.completions.outcomes(1) == (Outcome.ABSENT, Outcome.DEADLINE)
    assert rank.completions.outcomes(2) == (Outcome.DEADLINE,)
    assert l3.calls == [("get", 1, 5.0)]
    assert [completion.seconds for completion in rank.completions.all] == [6.0, 0.0]


def test_without_l3_jobs_for_it_are_unavailable(rank: Rank) -> None:
    executor = rank.executor()
    for job in (fetch(1, 0, 1), store(2, 0), lookup(3, 0)):
        executor.submit(job)
        assert set(rank.completions.outcomes(job.job_id)) == {Outcome.UNAVAILABLE}


def test_l3_without_l2_is_refused_at_start(rank: Rank) -> None:
    with pytest.raises(ConfigError, match="l2 = None"):
        Executor(rank.spec, rank.l1, None, MemoryL3(rank.l2), on_complete=rank.completions)


def test_br_001_a_fetch_that_fails_is_never_called_good(rank: Rank) -> None:
    """Page 4 of 8 fails on its way from L3: its sentinel bytes stay, and so does its outcome."""
    poison(rank.l2.view(0))
    l3 = MemoryL3(rank.l2)
    for slot in range(8):
        l3.objects[object_key(KEYS[slot], group=0, shard=0)] = bytes(rank.spec.object_bytes[0])
    del l3.objects[object_key(KEYS[4], group=0, shard=0)]
    executor = rank.executor(l3, limits=ExecutorLimits(batch_keys_max=3))
    executor.submit(fetch(1, *range(8)))
    outcomes = rank.completions.outcomes(1)
    assert [index for index, outcome in enumerate(outcomes) if not outcome.is_ok] == [4]
    clean = [bool((rank.l2.view(0)[slot].view(torch.uint8) != POISON).all()) for slot in range(8)]
    assert clean == [True] * 4 + [False] + [True] * 3


@pytest.mark.parametrize("limit", ["open_jobs_max", "batch_keys_max", "fetch_timeout_s", "store_threads"])
def test_limits_that_are_none_are_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match=f"executor.{limit} = 0"):
        ExecutorLimits(**{limit: 0})


@settings(max_examples=25, deadline=None)
@given(
    scripts=st.lists(
        st.sampled_from([at_once, twice, raising, done_then_raising, one_too_few, nonsense, nothing]), min_size=1
    ),
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    close_after=st.integers(0, 12),
)
def test_every_job_completes_exactly_once_with_an_outcome_for_each_item(
    scripts: list[Callable[[Done, list[Outcome]], None]], sizes: list[int], close_after: int
) -> None:
    rank = Rank()
    turn = iter(range(10**6))
    lock = threading.Lock()

    def script(done: Done, outcomes: list[Outcome]) -> None:
        with lock:
            chosen = scripts[next(turn) % len(scripts)]
        chosen(done, outcomes)

    executor = rank.executor(ScriptedL3(rank.l2, script), limits=ExecutorLimits(batch_keys_max=2, open_jobs_max=4))
    for job_id, size in enumerate(sizes):
        if job_id == close_after:
            executor.close(timeout_s=0.2)
        make = (fetch, store, lookup)[job_id % 3]
        executor.submit(make(job_id, *range(size)))
    executor.close(timeout_s=0.2)
    rank.l2.close()
    by_job = Counter(completion.job_id for completion in rank.completions.all)
    assert by_job == dict.fromkeys(range(len(sizes)), 1)
    counts = {completion.job_id: len(completion.outcomes) for completion in rank.completions.all}
    assert counts == dict(enumerate(sizes))
    assert set(executor.open_jobs().values()) == {0}


def test_a_listener_that_raises_disturbs_nothing(rank: Rank) -> None:
    seen: list[int] = []

    def listen(completion: Completion) -> None:
        seen.append(completion.job_id)
        raise ValueError("injected")

    executor = Executor(rank.spec, rank.l1, rank.l2, MemoryL3(rank.l2), on_complete=listen)
    for job_id in range(4):
        executor.submit(fetch(job_id, 0))
    assert executor.close()
    assert sorted(seen) == [0, 1, 2, 3]
    assert executor.faults() == {"on_complete": 4}
