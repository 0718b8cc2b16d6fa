"""Storage threads: bounded, withdrawable, and no obstacle to anybody when one is stuck."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from hicache.backends.base import Usage
from hicache.daemon.storage import Storage
from hicache.workers import Job, QueueFull, Workers

WAIT_S = 20.0


class Gate:
    """Work that says when it runs, and ends when it may."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.opened.wait(WAIT_S)
        return "done"


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("test", threads=1, queue_max=3)
    yield made
    assert made.close(timeout_s=WAIT_S)


def test_work_runs_in_order_and_its_errors_come_back(workers: Workers) -> None:
    ran: list[int] = []
    jobs = [workers.submit(partial(ran.append, number)) for number in range(3)]
    for job in jobs:
        job.future.result(WAIT_S)
    assert ran == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 // 0).future.result(WAIT_S)


def test_without_a_thread_nothing_is_queued_and_the_next_job_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [0]
    start = threading.Thread.start

    def start_if_one_is_left(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_one_is_left)
    workers = Workers("test", threads=2, queue_max=3)
    with pytest.raises(QueueFull):
        workers.submit(str)
    assert workers.queued_count == 0
    left[0] = 1
    gate = Gate()
    running = workers.submit(gate)
    assert gate.entered.wait(WAIT_S)
    left[0] = 1
    assert workers.submit(str).future.result(WAIT_S) == ""
    gate.opened.set()
    assert running.future.result(WAIT_S) == "done"
    assert workers.close(timeout_s=WAIT_S)


def test_a_full_queue_refuses_and_a_withdrawn_job_makes_room(workers: Workers) -> None:
    gate = Gate()
    running = workers.submit(gate)
    assert gate.entered.wait(WAIT_S)
    queued = [workers.submit(str) for _ in range(3)]
    with pytest.raises(QueueFull):
        workers.submit(str)

    assert workers.withdraw(queued[1])
    assert queued[1].future.cancelled()
    workers.submit(str)
    assert not workers.withdraw(running), "a thread has it"
    gate.opened.set()
    assert running.future.result(WAIT_S) == "done"


def test_how_long_threads_are_busy_can_be_asked() -> None:
    now = [100.0]
    gate = Gate()
    workers = Workers("test", threads=2, queue_max=3, clock=lambda: now[0])
    workers.submit(gate)
    assert gate.entered.wait(WAIT_S)
    now[0] = 107.0
    assert workers.busy_for_s() == [7.0]
    gate.opened.set()


def test_closing_cancels_what_waits_and_reports_what_is_stuck() -> None:
    gate = Gate()
    workers = Workers("test", threads=1, queue_max=3)
    workers.submit(gate)
    assert gate.entered.wait(WAIT_S)
    queued = workers.submit(str)
    assert not workers.close(timeout_s=0.01)
    assert queued.future.cancelled()
    with pytest.raises(QueueFull):
        workers.submit(str)
    gate.opened.set()
    assert workers.close(timeout_s=WAIT_S)


class StuckStore:
    """A store whose every question waits for a gate. Only what these tests call."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.closed = False

    def usage(self) -> Usage:
        self.gate()
        return Usage(0, 0, 0, 1)

    def close(self) -> None:
        self.closed = True


async def test_a_question_that_comes_too_late_is_undone_when_its_answer_arrives() -> None:
    gate = Gate()
    undone: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    storage = Storage(StuckStore(), io_threads=1)  # type: ignore[arg-type]  # see StuckStore

    def undo(late: str) -> None:
        loop.call_soon_threadsafe(undone.put_nowait, late)

    with pytest.raises(TimeoutError):
        await storage.ask(gate, timeout_s=0.01, too_late=undo)
    gate.opened.set()
    assert await asyncio.wait_for(undone.get(), WAIT_S) == "done"
    assert await asyncio.to_thread(storage.close, timeout_s=WAIT_S)


async def test_a_store_that_is_in_use_is_not_closed() -> None:
    store = StuckStore()
    storage = Storage(store, io_threads=1)  # type: ignore[arg-type]  # see StuckStore
    with pytest.raises(TimeoutError):
        await storage.ask(store.usage, timeout_s=0.01)
    assert not await asyncio.to_thread(storage.close, timeout_s=0.01)
    assert not store.closed
    store.gate.opened.set()
    assert await asyncio.to_thread(storage.close, timeout_s=WAIT_S)
    assert store.closed


async def test_a_cancellation_that_meets_the_answer_of_the_store_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(StuckStore(), io_threads=1)  # type: ignore[arg-type]  # see StuckStore
    answer: Future[int] = Future()
    monkeypatch.setattr(storage.control, "submit", lambda work: Job(work, answer))
    asking = asyncio.ensure_future(storage.ask(lambda: 1, timeout_s=WAIT_S))
    await asyncio.sleep(0)  # it waits
    answer.set_result(1)
    await asyncio.sleep(0)  # the answer is on its way to it
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
