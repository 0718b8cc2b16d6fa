"""Hangs: waits, room and stages, where the directory decides who goes on with what."""

from __future__ import annotations

import itertools

import pytest

from hicache.jobs import CopyKind, FetchJob, LookupJob, StoreJob
from hicache.node import Tier
from hicache.outcome import Outcome
from tests.core.simulated_executor import failing
from tests.core.situations import (
    HYBRID,
    loaded_pages,
    prefetching,
    prompt,
    restore,
)
from tests.core.world import FULL, Live, World


def test_br_032_a_page_that_one_stage_lacks_is_no_hit_and_is_stored_again() -> None:
    world = World((FULL,), l1=16, l2=16, ranks=2, prefetch_l2_share=1.0, store_l2_share=1.0)
    world.fill_l3(prompt(6))
    for key in world.page_keys(prompt(6)):
        del world.executor.l3[key, 0, 1]
    world.serve(prompt(6))
    assert world.directory.stats.prefetch_found == 0
    assert all((key, 0, 1) in world.executor.l3 for key in world.page_keys(prompt(6)))
    world.wind_up()


def test_br_045_all_stages_act_on_the_shortest_of_their_prefixes() -> None:
    world = World((FULL,), l1=16, l2=16, ranks=2, prefetch_l2_share=1.0)
    live = prefetching(world, prompt(8))
    world.executor.run_kind(LookupJob)
    world.executor.l3.pop((live.record.keys[6], 0, 1))  # stage 1 loses its last two pages
    world.executor.l3.pop((live.record.keys[7], 0, 1))
    world.executor.run(0)
    assert not world.directory.is_settled(live.record)  # stage 0 is early
    assert world.directory.index.pools[Tier.L2][0].used_count == 8
    restore(world, live)
    assert loaded_pages(live) == 6
    assert world.directory.index.pools[Tier.L2][0].used_count == 6
    world.check()
    world.wind_up()


@pytest.mark.parametrize("first", [0, 1])
def test_br_045_an_abort_between_two_stages_frees_everything_once(first: int) -> None:
    world = World((FULL,), l1=16, l2=16, ranks=2, prefetch_l2_share=1.0)
    live = prefetching(world, prompt(8))
    world.executor.run_kind(LookupJob)
    world.executor.run(first)
    world.release(live)
    world.run_all(failing(Outcome.IO_ERROR))
    world.check()
    assert world.directory.index.pools[Tier.L2][0].used_count == 0
    world.wind_up()


def test_br_033_a_prefetch_is_not_settled_before_its_plan_exists_and_all_pages_have_arrived() -> None:
    world = World((FULL,), l1=16, l2=40, prefetch_l2_share=1.0)
    world.fill_l3(prompt(36))
    live = world.open(prompt(36))
    assert world.directory.is_settled(live.record)  # nothing has been asked for
    world.prefetch(live)
    assert not world.directory.is_settled(live.record)
    world.executor.run_kind(LookupJob)
    fetches = len(world.executor.waiting)
    assert fetches == 3
    for _ in range(fetches):
        assert not world.directory.is_settled(live.record)
        world.executor.run(len(world.executor.waiting) - 1)  # the last pages arrive first
    assert world.directory.is_settled(live.record)
    world.check()


def test_br_033_a_final_miss_settles_a_prefetch() -> None:
    world = World((FULL,), l1=16, l2=16)
    live = world.open(prompt(8))
    world.prefetch(live)
    assert not world.directory.is_settled(live.record)
    world.executor.run_kind(LookupJob)
    assert world.directory.is_settled(live.record)
    assert world.directory.stats.prefetch_found == 0


@pytest.mark.parametrize(
    ("stalled", "pages"),
    [({0}, 0), ({1}, 0), ({0, 1}, 0), (set(), 8)],
    ids=["attention", "state", "both", "neither"],
)
def test_br_034_a_stalled_pool_counts_as_not_arrived_and_drains_without_touching_anybody(
    stalled: set[int], pages: int
) -> None:
    world = World(HYBRID, l1=20, l2=20, prefetch_l2_share=1.0, job_items_max=1)
    live = prefetching(world, prompt(8), without=frozenset((page, 1) for page in range(7)))
    world.executor.run_kind(LookupJob)
    for position in reversed(world.executor.waiting_for(FetchJob)):
        if not stalled & {item.group for item in world.executor.waiting[position].job.items}:
            world.executor.run(position)
    world.load(live)  # the deadline has passed
    world.executor.run_kind(CopyKind.LOAD)
    world.executor.run_kind(CopyKind.RESET)
    assert loaded_pages(live) == pages
    world.check()
    assert world.compute(live, pages=8, snapshot=True)
    world.release(live)
    other = world.open(prompt(8, seed=1))
    world.load(other)
    world.executor.run_kind(CopyKind.RESET)
    world.compute(other, pages=8, snapshot=True)
    world.run_all()  # late bytes arrive
    world.check()
    world.wind_up()


def test_br_042_an_l2_smaller_than_l1_goes_on_writing_through_and_prefetching() -> None:
    world = World((FULL,), l1=100, l2=50)
    for number in range(100):
        world.serve(prompt(10, seed=number + 1))
    assert len(world.executor.l3) == 1000
    assert world.directory.stats.skipped == {}
    cold = prefetching(world, prompt(20))
    restore(world, cold)
    assert loaded_pages(cold) == 20
    world.wind_up()


def test_br_048_old_and_new_life_of_a_preempted_request_may_overlap_in_any_order() -> None:
    steps = ("backup", "store", "reopen", "finish", "abort")
    for order in itertools.permutations(steps):
        world = World(HYBRID, l1=12, l2=12)
        first = world.open(prompt(3))
        world.load_whole(first)
        world.compute(first, pages=3, snapshot=True)
        world.release(first)  # preempted, with its copies down still open
        lives: list[Live] = []
        for step in order:
            if step == "backup":
                world.executor.run_kind(CopyKind.BACKUP)
            elif step == "store":
                world.executor.run_kind(StoreJob)
            elif step == "reopen":
                lives.append(world.open(prompt(3)))
                world.load(lives[-1])
            elif step == "finish" and lives:
                world.executor.run_kind(CopyKind.RESTORE)
                world.compute(lives[-1], pages=1, snapshot=True)
            elif step == "abort" and lives:
                world.release(lives.pop())
            world.check()
        world.wind_up()
