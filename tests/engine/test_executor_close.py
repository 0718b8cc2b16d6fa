"""Closing an executor: every job has completed, every thread has ended, and it is told when memory is still in use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

import pytest

from hicache.copies import PoolCopies
from hicache.executor import ExecutorLimits
from hicache.jobs import CopyItem, CopyJob, CopyKind
from hicache.l3 import Done
from hicache.outcome import Outcome
from tests.engine.conftest import Rank
from tests.engine.fakes import WAIT_S, FaultyCopies, MemoryL3, ScriptedL3
from tests.engine.test_executor_l3 import fetch, lookup, nothing, store
from tests.engine.test_l2 import mapped_pools


def hicache_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-")]


@pytest.fixture(autouse=True)
def no_thread_is_left(rank: Rank) -> Iterator[None]:
    assert not hicache_threads()
    yield
    for executor in rank.executors:
        executor.close()
    for thread in threading.enumerate():
        if thread.name.startswith("hicache-"):
            thread.join(WAIT_S)
    assert not hicache_threads()


def backup(job_id: int, slot: int) -> CopyJob:
    return CopyJob(job_id, CopyKind.BACKUP, (CopyItem(0, slot, slot),))


def test_close_is_idempotent_and_ends_threads_and_l3(rank: Rank) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    l3 = MemoryL3(rank.l2)
    executor = rank.executor(l3)
    assert len(hicache_threads()) == 2 + 2 + 4 + 2
    executor.submit(fetch(1, 0))
    assert executor.close()
    assert executor.close()
    assert l3.closed == 1
    assert not hicache_threads()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_jobs_after_close_are_cancelled(rank: Rank) -> None:
    executor = rank.executor(MemoryL3(rank.l2))
    executor.close()
    for job in (fetch(1, 0), store(2, 0), lookup(3, 0), backup(4, 0)):
        executor.submit(job)
        assert rank.completions.outcomes(job.job_id) == (Outcome.CANCELLED,)
    executor.submit(CopyJob(5, CopyKind.RESET, (CopyItem(2, 0, 0),)))
    assert rank.completions.outcomes(5) == (Outcome.CANCELLED,)


def test_a_copy_that_has_begun_ends_and_those_behind_it_are_cancelled(rank: Rank) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(leg: str, group: int, targets: Sequence[int]) -> None:
        entered.set()
        assert go_on.wait(WAIT_S)

    copies = FaultyCopies(PoolCopies(rank.l1, rank.l2), before=hold)
    executor = rank.executor(copies=copies)
    executor.submit(backup(1, 0))
    executor.submit(backup(2, 1))
    assert entered.wait(WAIT_S)
    results: list[bool] = []
    closer = threading.Thread(target=lambda: results.append(executor.close(timeout_s=WAIT_S)))
    closer.start()
    assert rank.completions.outcomes(2) == (Outcome.CANCELLED,)
    assert not rank.completions.has(1)
    go_on.set()
    closer.join(WAIT_S)
    assert results == [True]
    assert rank.completions.outcomes(1) == (Outcome.OK,)
    assert copies.calls == ["backup"]


def test_l3_gives_up_what_is_in_flight_when_it_is_closed(rank: Rank) -> None:
    waiting: list[Done] = []
    l3 = ScriptedL3(rank.l2, lambda done, outcomes: waiting.append(done))
    l3.on_close = lambda: [done([Outcome.UNAVAILABLE] * 2) for done in waiting] and None
    executor = rank.executor(l3)
    executor.submit(fetch(1, 0, 1))
    assert l3.entered.acquire(timeout=WAIT_S)
    assert executor.close()
    assert rank.completions.outcomes(1) == (Outcome.UNAVAILABLE,) * 2


def test_an_l3_that_never_reports_makes_close_say_so(rank: Rank) -> None:
    l3 = ScriptedL3(rank.l2, nothing)
    executor = rank.executor(l3)
    executor.submit(fetch(1, 0, 1))
    assert l3.entered.acquire(timeout=WAIT_S)
    assert not executor.close(timeout_s=0.05)
    assert rank.completions.outcomes(1) == (Outcome.CANCELLED,) * 2
    assert executor.faults() == {"close": 1}


def test_a_report_after_close_is_counted_and_changes_nothing(rank: Rank) -> None:
    waiting: list[Done] = []
    l3 = ScriptedL3(rank.l2, lambda done, outcomes: waiting.append(done))
    executor = rank.executor(l3)
    executor.submit(fetch(1, 0))
    assert l3.entered.acquire(timeout=WAIT_S)
    assert not executor.close(timeout_s=0.05)
    waiting[0]([Outcome.OK])
    assert rank.completions.outcomes(1) == (Outcome.CANCELLED,)
    assert executor.faults() == {"close": 1, "l3.get.again": 1}


def test_an_l3_that_hangs_in_a_call_and_in_close_does_not_hang_the_engine(rank: Rank) -> None:
    go_on = threading.Event()
    l3 = ScriptedL3(rank.l2, lambda done, outcomes: (go_on.wait(WAIT_S), done(outcomes))[1])
    l3.on_close = lambda: (go_on.wait(WAIT_S), None)[1]
    executor = rank.executor(l3, limits=ExecutorLimits(batch_keys_max=1))
    executor.submit(fetch(1, 0, 1))
    assert l3.entered.acquire(timeout=WAIT_S)
    assert not executor.close(timeout_s=0.05)
    assert rank.completions.outcomes(1) == (Outcome.CANCELLED,) * 2
    go_on.set()


def test_batches_that_have_not_begun_are_cancelled_while_the_one_that_has_ends(rank: Rank) -> None:
    go_on = threading.Event()
    l3 = ScriptedL3(rank.l2, lambda done, outcomes: (go_on.wait(WAIT_S), done(outcomes))[1])
    l3.on_close = go_on.set
    executor = rank.executor(l3, limits=ExecutorLimits(batch_keys_max=1, store_threads=1))
    executor.submit(store(1, 0, 1, 2))
    assert l3.entered.acquire(timeout=WAIT_S)
    assert executor.close()
    assert rank.completions.outcomes(1) == (Outcome.OK, Outcome.CANCELLED, Outcome.CANCELLED)


def test_an_l3_that_raises_on_close_is_counted(rank: Rank) -> None:
    def fail() -> None:
        raise OSError("injected")

    l3 = ScriptedL3(rank.l2, nothing)
    l3.on_close = fail
    executor = rank.executor(l3)
    assert executor.close()
    assert executor.faults() == {"l3.close": 1}


def test_closing_from_several_threads_is_closing_once(rank: Rank) -> None:
    l3 = MemoryL3(rank.l2)
    executor = rank.executor(l3)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(executor.close())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert (results, l3.closed) == ([True] * 4, 1)


def test_jobs_submitted_while_another_thread_closes_all_complete(rank: Rank) -> None:
    executor = rank.executor(MemoryL3(rank.l2))
    begun = threading.Event()

    def submit_many() -> None:
        for job_id in range(200):
            executor.submit((fetch, store, lookup)[job_id % 3](job_id, 0) if job_id % 4 else backup(job_id, 0))
            if job_id == 20:
                begun.set()

    submitter = threading.Thread(target=submit_many)
    submitter.start()
    assert begun.wait(WAIT_S)
    assert executor.close()
    submitter.join(WAIT_S)
    assert sorted(completion.job_id for completion in rank.completions.all) == list(range(200))


def test_the_memory_of_l2_is_gone_when_executor_and_pool_are_closed(rank: Rank) -> None:
    executor = rank.executor(MemoryL3(rank.l2))
    executor.submit(backup(1, 0))
    assert rank.completions.outcomes(1) == (Outcome.OK,)
    assert executor.close()
    before = mapped_pools()
    rank.l2.close()
    assert mapped_pools() == before - 1
