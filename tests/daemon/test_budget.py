"""The byte budgets: first come first served, nothing lost, nothing handed out twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.daemon.budget import ByteBudget, Granted, Ticket


def soon() -> float:
    return asyncio.get_running_loop().time() + 30


async def test_bytes_are_taken_and_given_back() -> None:
    budget = ByteBudget(10)
    ticket = await budget.acquire(7, deadline=soon())
    assert budget.try_acquire(4) is None
    small = budget.try_acquire(3)
    assert small is not None
    assert budget.used_bytes == 10
    ticket.drop()
    small.drop()
    assert budget.used_bytes == 0


async def test_nobody_overtakes_who_waits() -> None:
    budget = ByteBudget(10)
    held = await budget.acquire(10, deadline=soon())
    order: list[str] = []

    async def want(name: str, size_bytes: int) -> None:
        ticket = await budget.acquire(size_bytes, deadline=soon())
        order.append(name)
        ticket.drop()

    waiting = [asyncio.create_task(want("large", 9)), asyncio.create_task(want("small", 1))]
    await asyncio.sleep(0)
    assert budget.try_acquire(1) is None
    held.drop()
    await asyncio.gather(*waiting)
    assert order == ["large", "small"]
    assert budget.used_bytes == 0


async def test_who_waits_past_the_deadline_gets_a_timeout_and_makes_way() -> None:
    budget = ByteBudget(10)
    held = await budget.acquire(5, deadline=soon())
    large = asyncio.create_task(budget.acquire(10, deadline=asyncio.get_running_loop().time() + 0.02))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.acquire(5, deadline=soon()))
    with pytest.raises(TimeoutError):
        await large
    (await small).drop()
    held.drop()
    assert budget.used_bytes == 0


async def test_a_child_takes_from_its_parent_and_gives_back_to_both() -> None:
    parent = ByteBudget(10)
    first, second = ByteBudget(8, parent=parent), ByteBudget(8, parent=parent)
    ticket = await first.acquire(8, deadline=soon())
    assert second.try_acquire(3) is None
    assert (parent.used_bytes, second.used_bytes) == (8, 0)
    waiting = asyncio.create_task(second.acquire(3, deadline=soon()))
    await asyncio.sleep(0)
    ticket.drop()
    (await waiting).drop()
    assert (parent.used_bytes, first.used_bytes, second.used_bytes) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(5))
async def test_bytes_are_conserved_whoever_is_cancelled_and_when(seed: int) -> None:
    chance = random.Random(seed)
    parent = ByteBudget(20)
    children = [ByteBudget(15, parent=parent) for _ in range(3)]
    held: list[Ticket] = []

    async def use(budget: ByteBudget) -> None:
        ticket = await budget.acquire(chance.randint(1, 15), deadline=soon())
        held.append(ticket)
        assert parent.used_bytes <= 20
        assert all(child.used_bytes <= 15 for child in children)
        try:
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
        finally:
            ticket.drop()

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(use(chance.choice(children))))
        if chance.random() < 0.4:
            chance.choice(tasks).cancel()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [budget.used_bytes for budget in (parent, *children)] == [0, 0, 0, 0]
    assert len(held) > 50


def _wait_done(granted: Granted) -> None:
    granted.result(timeout=30)


async def test_threads_and_tasks_stand_in_one_line() -> None:
    budget = ByteBudget(10, parent=ByteBudget(10))
    held = await budget.acquire(10, deadline=soon())
    standing = threading.Event()
    order: list[str] = []

    def wait(granted: Granted) -> None:
        standing.set()
        _wait_done(granted)

    def in_a_thread() -> None:
        ticket = budget.acquire_blocking(10, wait=wait)
        order.append("thread")
        ticket.drop()

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    assert standing.wait(30)
    task = asyncio.create_task(budget.acquire(10, deadline=soon()))
    await asyncio.sleep(0)
    held.drop()
    (await task).drop()
    thread.join(30)
    assert order == ["thread"]
    assert budget.used_bytes == 0


def test_a_thread_that_gives_up_makes_way_at_every_level() -> None:
    parent = ByteBudget(10)
    budget = ByteBudget(10, parent=parent)
    held = parent.try_acquire(6)
    assert held is not None

    def give_up(granted: Granted) -> None:
        if not granted.done():
            raise TimeoutError

    with pytest.raises(TimeoutError):
        budget.acquire_blocking(5, wait=give_up)
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
                ticket = chance.choice(children).acquire_blocking(chance.randint(1, 15), wait=wait)
                assert parent.used_bytes <= 20
                ticket.drop()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert [budget.used_bytes for budget in (parent, *children)] == [0, 0, 0, 0]
