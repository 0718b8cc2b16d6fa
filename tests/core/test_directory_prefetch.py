"""The directory and L3: what a prefetch promises, brings and gives back."""

from __future__ import annotations

import pytest

from hicache.jobs import CopyKind, FetchJob, LookupJob
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.spec import StateField, StateGroup
from tests.core.simulated_executor import failing
from tests.core.situations import HYBRID, evict_all, loaded_pages, prefetching, prompt, restore
from tests.core.world import FULL, PAGE, WINDOW, Live, World


def test_a_page_of_the_prompt_is_always_left_to_compute() -> None:
    world = World((FULL,), l1=8, l2=8)
    world.serve(prompt(3))
    exact = prompt(3)[:-1]
    live = world.open(exact)
    assert live.record.local_tokens == {"l1": 2 * PAGE, "l2": 0}
    world.load_whole(live)
    assert loaded_pages(live) == 2
    assert live.record.by_source["computed"] == PAGE


@pytest.mark.parametrize("pages", range(1, 9))
def test_a_sliding_window_loads_its_last_window_only(pages: int) -> None:
    world = World((FULL, WINDOW), l1=16, l2=16)
    world.serve(prompt(8))
    evict_all(world, Tier.L1)
    live = world.open(prompt(pages))
    world.load_whole(live)
    assert loaded_pages(live) == pages
    assert None not in live.record.tables[0]
    window = [handle is not None for handle in live.record.tables[1]]
    reach = world.spec.reach_pages[1]
    assert window == [page >= pages - reach for page in range(pages)]
    world.check()


def test_pages_that_arrive_late_are_kept_for_the_next_request() -> None:
    world = World((FULL,), l1=16, l2=16, prefetch_l2_share=1.0)
    live = prefetching(world, prompt(6))
    world.executor.run_kind(LookupJob)
    world.load(live)
    assert loaded_pages(live) == 0
    world.release(live)
    assert world.directory.stats.prefetch_dropped == {"late": 6 * PAGE}
    world.run_all()
    again = world.open(prompt(6))
    assert again.record.local_tokens == {"l1": 0, "l2": 6 * PAGE}
    world.check()


def test_what_was_late_when_the_load_was_decided_is_counted_as_late() -> None:
    world = World((FULL,), l1=40, l2=40, prefetch_l2_share=1.0)
    live = prefetching(world, prompt(20))
    world.executor.run_kind(LookupJob)
    world.executor.run(0)
    world.load(live)  # 16 of 20 pages have arrived
    world.executor.run_kind(FetchJob)
    world.executor.run_kind(CopyKind.LOAD)
    assert loaded_pages(live) == 16
    assert world.directory.stats.prefetch_dropped == {"late": 4 * PAGE}
    assert world.directory.stats.prefetch_used == 16 * PAGE


def test_prefetches_hold_no_more_than_their_share_of_l2_while_their_requests_wait() -> None:
    world = World((FULL,), l1=40, l2=20, prefetch_l2_share=0.5)
    waiting = []
    for seed in range(4):
        world.fill_l3(prompt(4, seed=seed))
        waiting.append(world.open(prompt(4, seed=seed)))
        world.prefetch(waiting[-1])
        world.run_all()
    pool = world.directory.index.pools[Tier.L2][0]
    assert pool.used_count == 10
    assert world.directory.stats.prefetch_dropped == {"no_host_capacity": 6 * PAGE}
    world.serve(prompt(8, seed=9))
    assert sum(1 for key in world.page_keys(prompt(8, seed=9)) if (key, 0, 0) in world.executor.l3) == 8
    for live in waiting:
        world.load_whole(live)
    late = world.open(prompt(12, seed=8))
    world.fill_l3(prompt(12, seed=8))
    world.prefetch(late)
    restore(world, late)
    assert loaded_pages(late) == 10
    world.check()
    world.wind_up()


def test_what_is_evicted_between_lookup_and_plan_is_fetched_as_far_as_l3_has_acknowledged_it() -> None:
    world = World(HYBRID, l1=16, l2=16, prefetch_l2_share=1.0)
    world.serve(prompt(2), snapshot=False)
    live = prefetching(world, prompt(4))
    assert live.record.local_tokens == {"l1": 0, "l2": 0}  # attention without a state
    asked = {item.block_key for task in world.executor.waiting for item in task.job.items if item.group == 0}
    assert asked == set(live.record.keys[2:4])
    evict_all(world, Tier.L1)
    evict_all(world, Tier.L2)
    restore(world, live)
    assert loaded_pages(live) == 4
    world.check()
    world.release(live)
    world.wind_up()


def test_what_a_prefetch_has_brought_is_kept_until_its_request_takes_it() -> None:
    world = World(HYBRID, l1=20, l2=20, prefetch_l2_share=0.5)
    world.serve(prompt(2))
    evict_all(world, Tier.L1)
    world.fill_l3(prompt(8))
    live = world.open([*prompt(8)])
    world.prefetch(live)
    world.run_all()
    for seed in range(1, 6):
        world.serve(prompt(12, seed=seed))
    world.load_whole(live)
    assert loaded_pages(live) == 8
    assert live.record.by_source == {"l1": 0, "l2": 2 * PAGE, "l3": 6 * PAGE, "computed": 1}
    world.check()
    world.wind_up()


def test_pages_that_arrive_out_of_order_are_published_in_order() -> None:
    world = World((FULL,), l1=20, l2=20, prefetch_l2_share=1.0, job_items_max=2)
    prefetching(world, prompt(8))
    world.executor.run_kind(LookupJob)
    visible = []
    for position in (1, 2, 0, 0):  # pages 2 and 3, 6 and 7, 0 and 1, 4 and 5
        world.executor.run(position)
        visible.append(world.directory.index.pools[Tier.L2][0].used_count and len(world.directory.index.nodes))
        world.check()
    assert visible == [0, 0, 4, 8]
    world.wind_up()


def test_two_prefetches_of_one_prompt_end_in_one_copy() -> None:
    world = World((FULL,), l1=20, l2=20, prefetch_l2_share=1.0)
    world.fill_l3(prompt(8))
    twins = [world.open(prompt(8)) for _ in range(2)]
    for live in twins:
        world.prefetch(live)
    world.run_all()
    assert world.directory.index.pools[Tier.L2][0].used_count == 8
    for live in twins:
        world.load_whole(live)
        assert loaded_pages(live) == 8
    assert world.directory.stats.prefetch_used == 16 * PAGE
    assert [live.record.by_source["l3"] for live in twins] == [8 * PAGE, 0]
    assert world.directory.stats.objects["fetch.ok"] == 8
    world.wind_up()


def twins_on(world: World, first: list[int], second: list[int]) -> list[Live]:
    """Two requests whose plans are made, the second one's while the first one's fetches are under way."""
    world.fill_l3(max(first, second, key=len))
    twins = [world.open(first), world.open(second)]
    for live in twins:
        world.prefetch(live)
        world.executor.run_kind(LookupJob)
    return twins


def test_what_is_being_fetched_for_one_request_is_awaited_by_another_and_only_the_rest_is_fetched() -> None:
    world = World((FULL,), l1=20, l2=20, prefetch_l2_share=0.4, job_items_max=1)
    first, second = twins_on(world, prompt(4), prompt(8))
    assert sum(len(task.job.items) for task in world.executor.waiting) == 8
    assert world.prefetcher.fetches.held == [8]  # each page once: both fit in the share only so
    for _ in range(4):
        world.executor.run(-1)  # the pages that only the second one wants
    assert not world.directory.index.nodes
    assert not world.directory.is_settled(second.record)
    world.run_all()
    for live, pages in ((second, 8), (first, 4)):
        world.load_whole(live)
        assert loaded_pages(live) == pages
    assert world.directory.stats.prefetch_found == world.directory.stats.prefetch_used == 12 * PAGE
    world.check()
    world.wind_up()


def test_what_an_aborted_request_was_fetching_completes_for_the_one_that_waits() -> None:
    world = World(HYBRID, l1=20, l2=20, prefetch_l2_share=1.0, job_items_max=2)
    first, second = twins_on(world, prompt(8), prompt(8))
    world.executor.run(0)
    world.release(first)
    world.check()
    world.run_all()
    world.load_whole(second)
    assert loaded_pages(second) == 8
    assert world.directory.stats.objects["fetch.ok"] == 10  # 8 pages, the last snapshot and one earlier
    assert world.directory.stats.prefetch_dropped == {"late": 8 * PAGE}
    assert world.directory.stats.prefetch_used == 8 * PAGE
    world.wind_up()


def test_a_request_plans_anew_when_what_it_waits_for_fails() -> None:
    world = World((FULL,), l1=20, l2=20, prefetch_l2_share=1.0)
    first, second = twins_on(world, prompt(8), prompt(8))
    world.executor.run(0, failing(Outcome.IO_ERROR, 5))
    assert world.directory.is_settled(first.record)
    assert not world.directory.is_settled(second.record)
    world.run_all()
    for live, pages in ((first, 5), (second, 8)):
        world.load_whole(live)
        assert loaded_pages(live) >= pages
    world.check()
    world.wind_up()


def test_a_request_that_does_not_wait_any_longer_leaves_the_fetches_of_the_other_alone() -> None:
    world = World((FULL,), l1=20, l2=20, prefetch_l2_share=1.0, job_items_max=1)
    first, second = twins_on(world, prompt(8), prompt(8))
    for _ in range(3):
        world.executor.run(0)
    world.load(second)
    world.executor.run_kind(CopyKind.LOAD)
    assert loaded_pages(second) == 3
    assert world.directory.stats.prefetch_dropped == {"late": 5 * PAGE}
    world.check()
    world.run_all()
    world.load_whole(first)
    assert loaded_pages(first) == 8
    world.wind_up()


@pytest.mark.parametrize("arrived", [2, 5, 7])
def test_a_hybrid_prefix_that_is_half_there_when_the_time_is_over_is_used_up_to_an_earlier_snapshot(
    arrived: int,
) -> None:
    """Pages 0 to 7 and the snapshots after 4 and 8 of them are fetched, the snapshots first."""
    world = World(HYBRID, l1=16, l2=16, prefetch_l2_share=1.0, job_items_max=1)
    live = prefetching(world, prompt(8))
    world.executor.run_kind(LookupJob)
    fetched = [task.job.items[0] for task in world.executor.waiting]
    keys = live.record.keys
    assert [(keys.index(item.block_key), item.group) for item in fetched] == [
        (7, 1),
        (3, 1),
        *((page, 0) for page in range(8)),
    ]
    for _ in range(2 + arrived):
        world.executor.run(0)
    assert not world.directory.is_settled(live.record)
    world.load(live)
    world.executor.run_kind(CopyKind.RESET)
    world.executor.run_kind(CopyKind.LOAD)
    assert loaded_pages(live) == (4 if arrived > 4 else 0)
    assert world.directory.stats.prefetch_dropped == {"late": (8 - loaded_pages(live)) * PAGE}
    world.check()
    world.run_all()
    world.check()
    world.wind_up()


def test_an_earlier_snapshot_that_costs_much_beside_the_plan_is_not_fetched() -> None:
    large = StateGroup("gdn", (2,), (StateField("s", (64,), "float32"),))
    world = World((FULL, large), l1=16, l2=16, prefetch_l2_share=1.0, job_items_max=1)
    prefetching(world, prompt(8))
    world.executor.run_kind(LookupJob)
    assert len(world.executor.waiting) == 8 + 1
    world.run_all()
    world.wind_up()
