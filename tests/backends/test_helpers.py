"""Large batches are shared out between threads: each item once, and nobody waits for a stranger."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest

from hicache.backends import helpers
from hicache.backends.helpers import SHARED_BYTES_MIN, Helpers
from hicache.errors import BackendError
from hicache.workers import Job, Workers

WAIT_S = 20.0

T = TypeVar("T")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helpers]:
    """Helpers as on a machine with two cores."""
    monkeypatch.setattr(helpers.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(helpers, "CLOSE_WAIT_S", WAIT_S)
    helping = Helpers("test")
    yield helping
    helping.close()


def test_each_item_is_done_once_by_two_threads_and_results_keep_their_order(shared: Helpers) -> None:
    both = threading.Barrier(2)
    threads: list[int] = []

    def work(number: int) -> int:
        threads.append(threading.get_ident())
        if number < 2:
            both.wait(WAIT_S)
        return number * number

    assert shared.map(work, range(100), size_bytes=SHARED_BYTES_MIN) == [number * number for number in range(100)]
    assert len(threads) == 100
    assert len(set(threads)) == 2


def test_a_small_batch_wakes_nobody(shared: Helpers) -> None:
    here = threading.get_ident()
    assert shared.map(lambda _: threading.get_ident(), range(9), size_bytes=SHARED_BYTES_MIN - 1) == [here] * 9
    assert shared.map(lambda _: threading.get_ident(), range(1), size_bytes=SHARED_BYTES_MIN) == [here]


def test_a_stuck_helper_holds_up_the_call_that_it_helps_and_no_other(shared: Helpers) -> None:
    asking: set[int] = set()
    is_stuck, may_go_on = threading.Event(), threading.Event()

    def work(number: int) -> int:
        if threading.get_ident() not in asking:
            is_stuck.set()
            may_go_on.wait(WAIT_S)
        else:
            is_stuck.wait(WAIT_S)
        return number

    def call() -> None:
        asking.add(threading.get_ident())
        results.append(shared.map(work, range(8), size_bytes=SHARED_BYTES_MIN))

    results: list[list[int]] = []
    held_up = threading.Thread(target=call)
    held_up.start()
    assert is_stuck.wait(WAIT_S)
    call()
    assert results == [list(range(8))]
    may_go_on.set()
    held_up.join()
    assert results == [list(range(8))] * 2


def test_an_error_is_raised_when_no_thread_touches_an_item_any_more(shared: Helpers) -> None:
    here = threading.get_ident()
    is_inside, has_failed = threading.Event(), threading.Event()
    touched: list[int] = []

    def work(number: int) -> None:
        if threading.get_ident() == here:
            is_inside.wait(WAIT_S)
            has_failed.set()
            raise ValueError(number)
        is_inside.set()
        has_failed.wait(WAIT_S)
        touched.append(number)

    with pytest.raises(ValueError, match=r"^[01]$"):
        shared.map(work, range(50), size_bytes=SHARED_BYTES_MIN)
    count = len(touched)
    assert count >= 1
    assert shared.map(lambda number: number, [1, 2], size_bytes=0) == [1, 2]
    assert len(touched) == count


def test_an_error_of_a_helper_is_raised_too(shared: Helpers) -> None:
    here = threading.get_ident()
    has_failed = threading.Event()

    def work(number: int) -> None:
        if threading.get_ident() != here:
            has_failed.set()
            raise IndexError(number)
        has_failed.wait(WAIT_S)

    with pytest.raises(IndexError):
        shared.map(work, range(2), size_bytes=SHARED_BYTES_MIN)


def test_an_error_of_one_helper_is_raised_when_the_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers.os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(helpers, "Workers", _NumberedWorkers)
    helping = Helpers("test")
    all_inside = threading.Barrier(3)
    was_raised = threading.Event()
    is_alone: list[bool] = []

    def work(number: int) -> None:
        all_inside.wait(WAIT_S)
        if _job.number == 0:
            raise IndexError(number)
        if _job.number == 1:
            is_alone.append(was_raised.wait(0.1))

    with pytest.raises(IndexError):
        helping.map(work, range(3), size_bytes=SHARED_BYTES_MIN)
    was_raised.set()
    assert is_alone == [False]
    helping.close()


class _JobNumber(threading.local):
    """Which job this thread runs."""

    number: int | None = None


_job = _JobNumber()


class _NumberedWorkers(Workers):
    """Tells each job its number."""

    def submit(self, work: Callable[[], T]) -> Job[T]:
        number = self._submitted = getattr(self, "_submitted", -1) + 1

        def numbered() -> T:
            _job.number = number
            return work()

        return super().submit(numbered)


def test_memory_is_let_go_of_though_a_helper_has_failed(shared: Helpers) -> None:
    here = threading.get_ident()
    both = threading.Barrier(2)

    def work(part: memoryview) -> None:
        filled = np.frombuffer(part, dtype=np.uint8)
        both.wait(WAIT_S)
        if threading.get_ident() != here:
            raise BackendError(f"{len(filled)} bytes cannot be read")

    gc.disable()
    try:
        memories = [bytearray(4), bytearray(4)]
        views = [memoryview(memory) for memory in memories]
        with pytest.raises(BackendError):
            shared.map(work, views, size_bytes=SHARED_BYTES_MIN)
        for memory, view in zip(memories, views, strict=True):
            view.release()
            memory.clear()  # BufferError while somebody has a part of it
    finally:
        gc.enable()


def test_after_the_end_a_call_goes_on_alone(shared: Helpers) -> None:
    shared.close()
    here = threading.get_ident()
    assert shared.map(lambda _: threading.get_ident(), range(9), size_bytes=SHARED_BYTES_MIN) == [here] * 9
