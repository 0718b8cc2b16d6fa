"""Jobs and steps of one rank take turns by their numbers, whoever is faster."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hicache.errors import RankLost, UsageError
from hicache.jobs import CopyJob, CopyKind, Job
from hicache.ranks.step_order import StepOrder

WAIT_S = 20.0


def job(number: int) -> Job:
    return CopyJob(number, CopyKind.LOAD, ())


class Rank:
    """An order, with what was done and in which thread."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.changed = threading.Condition()
        self.gates: dict[int, threading.Event] = {}
        self.broken: set[int] = set()
        self.order = StepOrder(self.run)
        self.reasons: list[str] = []
        self.thread = threading.Thread(target=lambda: self.reasons.append(self.order.work()))
        self.thread.start()

    def run(self, ran: Job) -> None:
        if (gate := self.gates.get(ran.job_id)) is not None:
            assert gate.wait(WAIT_S)
        if ran.job_id in self.broken:
            raise OSError("broken")
        self.note((ran.job_id, threading.current_thread() is self.thread))

    def note(self, what: object) -> None:
        with self.changed:
            self.done.append(what)
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[object]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.done) >= count, WAIT_S)
            return list(self.done)

    def step(self, number: int) -> None:
        self.order.begin(number, timeout_s=WAIT_S)
        self.note(f"step {number}")
        self.order.end()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    for gate in rank.gates.values():
        gate.set()
    rank.order.close("the test is over")
    rank.thread.join(WAIT_S)
    assert not rank.thread.is_alive()


def test_between_steps_jobs_run_by_themselves_in_order(rank: Rank) -> None:
    for number in (1, 2, 3):
        rank.order.add(number, job(number))
    assert rank.wait_for(3) == [(1, True), (2, True), (3, True)]


def test_a_job_that_was_emitted_after_a_step_waits_for_it_however_early_it_comes(rank: Rank) -> None:
    rank.order.add(1, job(1))
    rank.order.add(4, job(4))  # 2 and 3 are steps
    rank.wait_for(1)
    rank.step(2)
    assert rank.done == [(1, True), "step 2"]
    rank.step(3)
    assert rank.wait_for(4)[2:] == ["step 3", (4, True)]


def test_a_step_waits_for_the_jobs_before_it_and_runs_them_itself(rank: Rank) -> None:
    stepping = threading.Thread(target=rank.step, args=(3,))
    stepping.start()
    rank.gates[1] = threading.Event()
    rank.order.add(1, job(1))
    rank.order.add(2, None)  # asks nothing of compute, and has its number all the same
    assert not rank.done
    rank.gates[1].set()
    stepping.join(WAIT_S)
    assert [what if isinstance(what, str) else what[0] for what in rank.done] == [1, "step 3"]


def test_no_job_runs_while_a_step_is_computed(rank: Rank) -> None:
    rank.order.begin(1, timeout_s=WAIT_S)
    rank.order.add(2, job(2))
    rank.order.add(3, job(3))
    assert not rank.done
    rank.note("computed")
    rank.order.end()
    assert rank.wait_for(3) == ["computed", (2, True), (3, True)]


def test_a_job_that_fails_holds_nobody_up(rank: Rank) -> None:
    rank.broken.add(1)
    rank.order.add(1, job(1))
    rank.order.add(2, job(2))
    assert rank.wait_for(1) == [(2, True)]
    rank.step(3)


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_was_taken_is_refused(rank: Rank, step: int) -> None:
    rank.step(1)
    rank.step(2)
    with pytest.raises(UsageError, match="taken once"):
        rank.step(step)


def test_a_step_that_this_rank_has_missed_is_named(rank: Rank) -> None:
    rank.order.add(2, job(2))  # so that 1 is a step
    with pytest.raises(UsageError, match="step 1 was never taken here"):
        rank.step(3)


def test_steps_do_not_nest(rank: Rank) -> None:
    rank.order.begin(1, timeout_s=WAIT_S)
    with pytest.raises(UsageError, match="step 1 has not ended"):
        rank.order.begin(2, timeout_s=WAIT_S)
    rank.order.end()


def test_jobs_that_do_not_come_end_the_wait_of_a_step(rank: Rank) -> None:
    with pytest.raises(RankLost, match="number 1 has not come"):
        rank.order.begin(2, timeout_s=0.01)


def test_the_end_of_the_link_ends_every_wait_with_its_reason(rank: Rank) -> None:
    errors: list[Exception] = []

    def step() -> None:
        try:
            rank.step(5)
        except RankLost as error:
            errors.append(error)

    stepping = threading.Thread(target=step)
    stepping.start()
    rank.order.close("the leader is gone")
    rank.order.close("said again")
    stepping.join(WAIT_S)
    rank.thread.join(WAIT_S)
    assert [str(error) for error in errors] == ["the leader is gone"]
    assert rank.reasons == ["the leader is gone"]
    rank.order.add(1, job(1))
    with pytest.raises(RankLost):
        rank.step(1)
    assert not rank.done
