"""One rank fails, lags or dies: a miss for all, at the same prefix; nothing leaks, and nothing hangs."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import get_args

import pytest

from bench.daemon_process import BenchError
from bench.rank_patterns import Slot, compute, seed_of
from bench.rank_process import RankProcess, WorkerSettings
from bench.rank_replica import compute_in_step, ranks_in
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy
from hicache.ranks.worker import RankWorker
from hicache.spec import CacheSpec
from tests.client.support import wait_until
from tests.ranks import faults
from tests.ranks.conftest import PAGE, MakeReplica, prompt, spec_of

TP2 = spec_of(2)
L3 = "file://{}/l3?shared=1"


def stored(make: MakeReplica, folder: Path, pages: int, *, spec: CacheSpec = TP2) -> str:
    """L3 has a prompt, from a replica that is gone."""
    l3 = L3.format(folder)
    writer = make(spec, l3=l3)
    writer.serve(prompt(pages))
    writer.settle()
    writer.close()
    return l3


def test_a_rank_that_is_killed_in_the_middle_of_a_fetch_is_a_miss_for_all(make: MakeReplica, tmp_path: Path) -> None:
    replica = make(TP2, l3=stored(make, tmp_path, 5))
    [worker] = replica.workers
    replica.on_one(1, faults.hold, "l3.get", tmp_path)
    request = replica.cache.match(prompt(5))
    replica.cache.prefetch(request)
    faults.wait_until_reached("l3.get", tmp_path)
    worker.signal(signal.SIGKILL)
    assert replica.cache.wait(request)
    restored = replica.cache.load(request, timeout_s=20)
    assert restored is not None
    assert restored.tokens == 0
    replica.cache.release(request)
    assert list(replica.cache.stats.ranks_lost) == [1]
    faults.assert_nothing_leaked(replica.cache)
    later = replica.cache.match(prompt(5))
    assert later.hit.l1_tokens + later.hit.l2_tokens == 0
    assert replica.cache.load(later).tokens == 0
    assert replica.cache.extend(later, tokens=5 * PAGE)
    replica.cache.store(later, computed=5 * PAGE, state_at=5 * PAGE)
    replica.cache.release(later)
    assert replica.cache.match(prompt(5)).hit.l1_tokens == 0, "a page of a rank that is gone"


def test_a_load_ends_when_a_rank_dies_during_its_copies(make: MakeReplica, tmp_path: Path) -> None:
    replica = make(TP2, l3=stored(make, tmp_path, 4))
    [worker] = replica.workers
    request = replica.cache.match(prompt(4))
    replica.cache.prefetch(request)
    assert replica.cache.wait(request)
    replica.on_one(1, faults.hold, "copies.load", tmp_path)
    found: list[int] = []
    loading = threading.Thread(target=lambda: found.append(replica.cache.load(request, timeout_s=20).tokens))
    loading.start()
    faults.wait_until_reached("copies.load", tmp_path)
    worker.signal(signal.SIGKILL)
    loading.join(20)
    assert found == [0]
    replica.cache.release(request)
    faults.assert_nothing_leaked(replica.cache)


def test_a_rank_that_is_stopped_is_lost_and_what_it_says_later_is_not_heard(make: MakeReplica) -> None:
    replica = make(TP2, timeouts={"silence_timeout_s": 2.0})
    [worker] = replica.workers
    replica.serve(prompt(3))
    worker.signal(signal.SIGSTOP)
    request = replica.cache.match(prompt(6))
    restored = replica.cache.load(request, timeout_s=20)
    assert restored is not None
    assert restored.tokens == 0
    assert "silent" in replica.cache.stats.ranks_lost[1]
    replica.cache.release(request)
    worker.signal(signal.SIGCONT)
    worker.ask(faults.why_over)
    assert "lost each other" in worker.answer()
    worker.ask(faults.try_step, replica.cache.step())
    with pytest.raises(BenchError, match="RankLost"):
        worker.answer()
    faults.assert_nothing_leaked(replica.cache)


def test_a_rank_that_does_not_do_a_copy_in_time_is_lost_though_it_is_alive(make: MakeReplica, tmp_path: Path) -> None:
    replica = make(TP2, timeouts={"copy_timeout_s": 1.5})
    [worker] = replica.workers
    replica.serve(prompt(3))
    replica.settle()
    replica.on_one(1, faults.hold, "copies.restore", tmp_path)
    request = replica.cache.match(prompt(3))
    assert request.hit.l1_tokens == 3 * PAGE
    restored = replica.cache.load(request, timeout_s=20)
    assert restored is not None
    assert restored.tokens == 0
    assert "copy job" in replica.cache.stats.ranks_lost[1]
    faults.let_go("copies.restore", tmp_path)
    worker.ask(faults.why_over)
    assert worker.answer()
    replica.cache.release(request)
    faults.assert_nothing_leaked(replica.cache)


@pytest.mark.parametrize(("failing_rank", "mode"), [(1, mode) for mode in get_args(PrefetchMode)] + [(0, "timeout")])
def test_br_001_a_fetch_that_fails_on_one_rank_ends_the_prefix_there_on_all(
    failing_rank: int, mode: PrefetchMode, make: MakeReplica, tmp_path: Path
) -> None:
    policy = PrefetchPolicy(mode, threshold_tokens=0, grace_s=10.0, base_s=10.0)
    replica = make(TP2, l3=stored(make, tmp_path, 8), prefetch=policy)
    tokens = prompt(8)
    request = replica.cache.match(tokens)
    replica.on_all(faults.poison)
    replica.on_one(failing_rank, faults.fail_gets, {request._record.keys[3]})
    replica.cache.prefetch(request)
    assert replica.cache.wait(request)
    restored = replica.cache.load(request, timeout_s=20)
    assert restored is not None
    assert restored.tokens == 3 * PAGE
    assert not replica.differing(request, tokens, restored.tokens)
    failed = sum(count for name, count in replica.cache.stats.objects.items() if name == "fetch.io_error")
    assert failed == len(TP2.groups)  # all of page 3, whose state is that of the plan's earlier stop
    replica.cache.release(request)
    assert not replica.cache.stats.ranks_lost
    faults.assert_nothing_leaked(replica.cache)


@pytest.mark.parametrize("group", range(len(TP2.groups)), ids=[group.name for group in TP2.groups])
def test_br_139_a_leg_that_fails_on_one_rank_leaves_no_half_of_a_prefix_on_any(
    group: int, make: MakeReplica, tmp_path: Path
) -> None:
    replica = make(TP2, l3=stored(make, tmp_path, 4))
    replica.on_all(faults.poison)
    replica.on_one(1, faults.fail_copies, "copies.load", group)
    tokens = prompt(4)
    request, restored = replica.restore(tokens)
    assert restored.tokens == 0
    assert not replica.differing(request, tokens, 0)
    assert replica.cache.stats.objects["load.io_error"] >= 1
    replica.compute(request, tokens, 0)
    replica.cache.release(request)
    replica.settle()  # a snapshot counts when every rank has taken it
    assert replica.serve(tokens).by_source["l1"] == 4 * PAGE
    faults.assert_nothing_leaked(replica.cache)


def test_br_045_stages_agree_on_what_the_one_with_less_in_l3_has(make: MakeReplica, tmp_path: Path) -> None:
    spec = spec_of(1, (2, 3))
    replica = make(spec, l3=stored(make, tmp_path, 6, spec=spec))
    tokens = prompt(6)
    request = replica.cache.match(tokens)
    replica.on_one(1, faults.fail_gets, set(request._record.keys[4:]))
    replica.on_one(0, faults.hold, "l3.get", tmp_path)  # the other stage is done long before
    replica.cache.prefetch(request)
    faults.wait_until_reached("l3.get", tmp_path)
    aborted = replica.cache.match(tokens)
    replica.cache.prefetch(aborted)
    replica.cache.release(aborted)
    faults.let_go("l3.get", tmp_path)
    assert replica.cache.wait(request)
    restored = replica.cache.load(request, timeout_s=20)
    assert restored is not None
    assert restored.tokens == 4 * PAGE
    assert not replica.differing(request, tokens, restored.tokens)
    replica.cache.release(request)
    faults.assert_nothing_leaked(replica.cache)


def test_l3_that_is_away_for_one_rank_is_a_miss_for_all(make: MakeReplica, tmp_path: Path) -> None:
    l3 = stored(make, tmp_path, 4)
    replica = make(TP2, l3=l3, waits_for_l3=False, of_rank={1: {"l3": f"unix://{tmp_path}/nobody.sock"}})
    assert replica.serve(prompt(4)).tokens == 0
    replica.settle()
    assert replica.cache.stats.objects["lookup.unavailable"] > 0
    assert replica.serve(prompt(4)).by_source["l1"] == 4 * PAGE
    assert not replica.cache.stats.ranks_lost
    faults.assert_nothing_leaked(replica.cache)


def test_br_003_pages_of_a_store_that_waits_on_one_rank_are_not_given_to_others(
    make: MakeReplica, tmp_path: Path
) -> None:
    l3 = L3.format(tmp_path)
    replica = make(TP2, l3=l3, l1_pages=8)
    replica.on_one(1, faults.hold, "copies.backup", tmp_path)
    request, _ = replica.restore(prompt(4))
    replica.compute(request, prompt(4), 0)
    replica.cache.release(request)
    other, restored = replica.restore(prompt(8, seed=1))
    assert restored.tokens == 0
    assert not replica.cache.extend(other, tokens=8 * PAGE), "pages that a rank is still copying were given away"
    assert replica.cache.extend(other, tokens=4 * PAGE)
    replica.compute(other, prompt(4, seed=1)[:-1], 0)
    faults.let_go("copies.backup", tmp_path)
    replica.cache.release(other)
    replica.settle()
    replica.close()
    reader = make(TP2, l3=l3)
    assert reader.serve(prompt(4)).by_source["l3"] == 4 * PAGE
    assert reader.serve(prompt(4, seed=1)).by_source["l3"] == 4 * PAGE


def test_a_late_answer_of_a_living_rank_is_waited_for(make: MakeReplica, tmp_path: Path) -> None:
    replica = make(TP2, l3=stored(make, tmp_path, 4))
    replica.on_one(1, faults.hold, "l3.get", tmp_path)
    request = replica.cache.match(prompt(4))
    replica.cache.prefetch(request)
    faults.wait_until_reached("l3.get", tmp_path)
    assert not replica.cache.is_ready(request)
    faults.let_go("l3.get", tmp_path)
    assert replica.cache.wait(request)
    restored = replica.cache.load(request, timeout_s=20)
    assert restored is not None
    assert restored.by_source["l3"] == 4 * PAGE
    assert not replica.differing(request, prompt(4), restored.tokens)
    replica.cache.release(request)
    faults.assert_nothing_leaked(replica.cache)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_whose_leader_dies_ends_its_waits_and_gives_its_memory_back(
    ending: signal.Signals, tmp_path: Path
) -> None:
    ranks = ranks_in(tmp_path, start_timeout_s=60.0, silence_timeout_s=3.0)
    sizes = {"l1_pages": 8, "l1_state_slots": 8, "l2_bytes": 1 << 20}
    leader, worker = (RankProcess(WorkerSettings(TP2, rank, ranks, sizes)) for rank in (0, 1))
    try:
        leader.ready()
        worker.ready()
        worker.ask(faults.open_things)
        assert any("hicache-l2" in name for name in worker.answer())
        worker.ask(faults.try_step, 7)  # waits for jobs that will never come
        leader.signal(ending)
        with pytest.raises(BenchError, match="RankLost"):
            worker.answer()
        worker.ask(faults.why_over)
        assert "lost each other" in worker.answer()
        worker.ask(faults.open_things)
        left = worker.answer()
        assert not [name for name in left if "hicache-l2" in name or "eventfd" in name]
        worker.ask(faults.thread_names)
        assert worker.answer() == []
    finally:
        leader.end()
        worker.end()


def test_a_leader_that_is_closed_ends_the_waits_of_its_other_threads(make: MakeReplica, tmp_path: Path) -> None:
    replica = make(TP2, l3=L3.format(tmp_path))
    replica.on_one(1, faults.hold, "copies.backup", tmp_path)
    request, _ = replica.restore(prompt(2))
    replica.compute(request, prompt(2), 0)
    answers: list[object] = []
    waits = (
        lambda: answers.append(replica.cache.flush(timeout_s=600)),
        lambda: answers.append(replica.cache.wait_stored(request, timeout_s=600).tokens),
    )
    waiting = [threading.Thread(target=wait) for wait in waits]
    for thread in waiting:
        thread.start()
    waiters = replica.cache._changed._waiters  # type: ignore[attr-defined]
    wait_until(lambda: len(waiters) == 2, timeout_s=20, what="both threads to wait")
    replica.cache.close()
    for thread in waiting:
        thread.join(20)
    faults.let_go("copies.backup", tmp_path)
    assert sorted(map(repr, answers)) == ["0", "False"]


def test_nothing_is_left_of_a_replica_that_was_closed(make: MakeReplica, tmp_path: Path) -> None:
    left = []
    for _ in range(2):
        replica = make(TP2, l3=L3.format(tmp_path))
        replica.serve(prompt(2))
        replica.settle()
        replica.cache.close()
        replica.workers[0].ask(faults.why_over)
        assert "the leader was closed" in replica.workers[0].answer()
        replica.workers[0].ask(faults.thread_names)
        assert replica.workers[0].answer() == []
        replica.close()
        left.append((faults.open_things(replica.cache), faults.thread_names(replica.cache)))
    assert left[0] == left[1]
    assert not (tmp_path / "ranks.sock").exists()


@pytest.mark.parametrize("in_order", [True, False], ids=["in a step", "control: without one"])
def test_what_a_rank_computes_after_a_snapshot_was_asked_for_is_not_in_it(
    in_order: bool, make: MakeReplica, tmp_path: Path
) -> None:
    replica = make(TP2)
    [worker] = replica.workers
    tokens = prompt(1)
    request, _ = replica.restore(tokens)
    assert replica.cache.extend(request, tokens=PAGE)
    replica.compute(request, tokens, 0, snapshot=False)
    replica.on_one(1, faults.hold, "copies.snapshot", tmp_path)
    replica.cache.store(request, computed=PAGE, state_at=PAGE)
    faults.wait_until_reached("copies.snapshot", tmp_path)
    later = [Slot(2, request.state_slot(2), 77)]
    if in_order:
        worker.ask(compute_in_step, replica.cache.step(), later)
        faults.let_go("copies.snapshot", tmp_path)
        worker.answer()
    else:
        replica.on_one(1, compute_at_once, later)
        faults.let_go("copies.snapshot", tmp_path)
    replica.settle()
    replica.cache.release(request)
    again, restored = replica.restore([*tokens, 1])
    assert restored.tokens == PAGE
    wrong = replica.differing(again, tokens, PAGE)
    assert wrong == ({} if in_order else {1: [Slot(2, again.state_slot(2), seed_of(tokens[:PAGE]))]})
    replica.cache.release(again)


def compute_at_once(worker: RankWorker, slots: list[Slot]) -> None:
    """Runs in a worker that does not say when it computes."""
    compute(worker.l1, slots)
