"""Large batches are shared out between threads: each item once, and nobody waits for a stranger."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hicache.backends import helpers
from hicache.backends.helpers import SHARED_BYTES_MIN, Helpers

WAIT_S = 20.0


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


def test_after_the_end_a_call_goes_on_alone(shared: Helpers) -> None:
    shared.close()
    here = threading.get_ident()
    assert shared.map(lambda _: threading.get_ident(), range(9), size_bytes=SHARED_BYTES_MIN) == [here] * 9
