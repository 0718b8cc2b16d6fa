"""The byte budgets: first come first served, nothing lost, nothing handed out twice."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all

import pytest

from hicache.daemon.budget import ByteBudget, Granted, Ticket


class Line:
    """Threads that want bytes, one after another in the line of a budget."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def join(self, budget: ByteBudget, size_bytes: int, order: list[str] | None = None) -> Future[Ticket]:
        """Returns when one more stands in the line. With ``order`` its size is noted there, and its ticket dropped."""
        standing = threading.Event()

        def wait(granted: Granted) -> None:
            standing.set()
            _wait_done(granted)

        def take() -> Ticket:
            ticket = budget.acquire(size_bytes, wait=wait)
            if order is not None:
                order.append(f"{size_bytes} bytes")
                ticket.drop()
            return ticket

        ticket = self._pool.submit(take)
        assert standing.wait(30)
        return ticket


@pytest.fixture
def line() -> Iterator[Line]:
    with ThreadPoolExecutor(4) as pool:
        yield Line(pool)


def _wait_done(granted: Granted) -> None:
    granted.result(timeout=30)


def _at_once(granted: Granted) -> None:
    raise AssertionError("the bytes are free")


def test_bytes_are_taken_and_given_back() -> None:
    budget = ByteBudget(10)
    ticket = budget.acquire(7, wait=_at_once)
    assert budget.try_acquire(4) is None
    small = budget.try_acquire(3)
    assert small is not None
    assert budget.used_bytes == 10
    ticket.drop()
    small.drop()
    assert budget.used_bytes == 0


def test_nobody_overtakes_who_waits(line: Line) -> None:
    budget = ByteBudget(10, parent=ByteBudget(10))
    held = budget.acquire(10, wait=_at_once)
    order: list[str] = []
    waiting = [line.join(budget, 10, order), line.join(budget, 1, order)]
    assert budget.waiting_count == 2
    assert budget.try_acquire(1) is None
    held.drop()
    wait_for_all(waiting, 30)
    assert order == ["10 bytes", "1 bytes"]
    assert budget.used_bytes == 0


def test_a_child_takes_from_its_parent_and_gives_back_to_both(line: Line) -> None:
    parent = ByteBudget(10)
    first, second = ByteBudget(8, parent=parent), ByteBudget(8, parent=parent)
    ticket = first.acquire(8, wait=_at_once)
    assert second.try_acquire(3) is None
    assert (parent.used_bytes, second.used_bytes) == (8, 0)
    waiting = line.join(second, 3)
    ticket.drop()
    waiting.result(30).drop()
    assert (parent.used_bytes, first.used_bytes, second.used_bytes) == (0, 0, 0)


def test_a_thread_that_gives_up_makes_way_at_every_level() -> None:
    parent = ByteBudget(10)
    budget = ByteBudget(10, parent=parent)
    held = parent.try_acquire(6)
    assert held is not None

    def give_up(granted: Granted) -> None:
        if not granted.done():
            raise TimeoutError

    with pytest.raises(TimeoutError):
        budget.acquire(5, wait=give_up)
    assert (parent.used_bytes, budget.used_bytes) == (6, 0)
    small = budget.try_acquire(4)
    assert small is not None, "nobody stands in the line any more"
    held.drop()
    small.drop()


@pytest.mark.parametrize("seed", range(3))
def test_bytes_are_conserved_between_threads(seed: int) -> None:
    parent = ByteBudget(20)
    children = [ByteBudget(15, parent=parent) for _ in range(3)]

    def use(number: int) -> None:
        chance = random.Random(seed * 100 + number)

        def wait(granted: Granted) -> None:
            if chance.random() < 0.3:
                raise TimeoutError
            _wait_done(granted)

        for _ in range(200):
            with contextlib.suppress(TimeoutError):
                ticket = chance.choice(children).acquire(chance.randint(1, 15), wait=wait)
                assert parent.used_bytes <= 20
                ticket.drop()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert [budget.used_bytes for budget in (parent, *children)] == [0, 0, 0, 0]
