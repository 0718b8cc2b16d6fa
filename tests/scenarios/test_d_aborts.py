"""Requests that are given up, at whatever point, give back all they held."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache.jobs import LookupJob
from hicache.node import Tier
from hicache.outcome import Outcome
from tests.core.simulated_executor import Fault, failing, no_fault
from tests.core.situations import HYBRID, evict_all, loaded_pages, prompt, slots_free
from tests.core.world import Live, World


def until_looking_up(world: World, live: Live) -> None:
    world.prefetch(live)


def until_fetching(world: World, live: Live) -> None:
    until_looking_up(world, live)
    world.executor.run_kind(LookupJob)


def until_half_arrived(world: World, live: Live) -> None:
    until_fetching(world, live)
    for _ in range(5):
        world.executor.run(len(world.executor.waiting) // 2)


def until_arrived(world: World, live: Live) -> None:
    until_fetching(world, live)
    world.run_all()


def until_loading(world: World, live: Live) -> None:
    until_arrived(world, live)
    world.load(live)


def until_loaded(world: World, live: Live) -> None:
    until_arrived(world, live)
    world.load_whole(live)


def until_storing(world: World, live: Live) -> None:
    world.load_whole(live)
    world.compute(live, pages=20, snapshot=True)


ABORTED = [until_looking_up, until_fetching, until_half_arrived, until_arrived, until_loading, until_loaded]


@pytest.mark.parametrize("fault", [no_fault, failing(Outcome.IO_ERROR), failing(Outcome.ABSENT, 3)])
@pytest.mark.parametrize("until", [*ABORTED, until_storing], ids=lambda until: until.__name__)
def test_br_051_aborts_give_back_all_they_held(until: Callable[[World, Live], None], fault: Fault) -> None:
    world = World(HYBRID, l1=48, l2=48, job_items_max=4)
    start = slots_free(world)
    for _ in range(25):
        world.fill_l3(prompt(20))
        live = world.open(prompt(20))
        until(world, live)
        world.release(live)
        world.run_all(fault)
        world.check()
        assert slots_free(world) == start
        evict_all(world, Tier.L1)
        evict_all(world, Tier.L2)
    world.fill_l3(prompt(20))
    last = world.open(prompt(20))
    world.prefetch(last)
    world.run_all()
    world.load_whole(last)
    assert loaded_pages(last) == 20
    world.wind_up()
