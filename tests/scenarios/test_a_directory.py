"""Silent corruption: copies that fail, or outlive their request, where the directory decides what may be used."""

from __future__ import annotations

import pytest

from hicache.jobs import CopyJob, CopyKind, FetchJob, Job, LookupJob
from hicache.loader import Load
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.slots import slot_of
from hicache.spec import Group
from tests.core.simulated_executor import failing
from tests.core.situations import (
    HYBRID,
    evict_all,
    fill_with_sentinel,
    loaded_pages,
    prompt,
    restore,
    slots_free,
)
from tests.core.world import FULL, PAGE, STATE, WINDOW, World


def test_br_012_what_the_engine_holds_is_neither_fetched_nor_loaded_over() -> None:
    world = World((FULL,), l1=16, l2=16, prefetch_l2_share=1.0)
    world.serve(prompt(3))
    world.executor.done.clear()
    world.fill_l3(prompt(5))
    shared = {slot_of(entry.handle) for tier, _, entry in world.entries() if tier is Tier.L1}
    live = world.open(prompt(5))
    assert live.record.local_tokens == {"l1": 3 * PAGE, "l2": 0}
    world.prefetch(live)
    restore(world, live)
    assert loaded_pages(live) == 5
    fetched = [i.block_key for task in world.executor.done if isinstance(task.job, FetchJob) for i in task.job.items]
    assert fetched == live.record.keys[3:5]
    written = {item.target for task in world.executor.done if isinstance(task.job, CopyJob) for item in task.job.items}
    assert len(written) == 2
    assert not written & shared
    world.check()


@pytest.mark.parametrize("when", ["settled", "half arrived", "at once"])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["attention", "window"])
def test_br_001_a_failed_fetch_cuts_the_prefix_back(groups: tuple[Group, ...], when: str) -> None:
    world = World(groups, l1=16, l2=16, prefetch_l2_share=1.0)
    fill_with_sentinel(world, *Tier)
    world.fill_l3(prompt(8))
    live = world.open(prompt(8))
    world.prefetch(live)
    world.executor.run_kind(LookupJob)
    broken = live.record.keys[3]

    def fault(job: Job, item: int) -> Outcome | None:
        is_broken = isinstance(job, FetchJob) and job.items[item].block_key == broken and job.items[item].group == 0
        return Outcome.IO_ERROR if is_broken else None

    if when != "at once":
        world.executor.run(0, fault)
    if when == "settled":
        world.executor.run_kind(FetchJob, fault)
        assert world.directory.is_settled(live.record)
    world.load(live)
    world.executor.run_kind(CopyKind.LOAD)
    # the first plan brought the window of page 8; that of page 3 is fetched when it has failed
    whole = when == "settled" or (when == "half arrived" and groups == (FULL,))
    assert loaded_pages(live) == (3 if whole else 0)
    world.executor.run_all(fault)
    world.check()
    assert world.directory.stats.objects["fetch.io_error"] == 1
    assert world.compute(live, pages=8, snapshot=True)
    world.check()
    world.wind_up()


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.CORRUPT, Outcome.DEADLINE, Outcome.SIZE_MISMATCH])
def test_br_001_every_bad_outcome_of_a_fetch_is_a_miss_with_its_reason(outcome: Outcome) -> None:
    world = World((FULL,), l1=16, l2=16, prefetch_l2_share=1.0)
    world.fill_l3(prompt(8))
    live = world.open(prompt(8))
    world.prefetch(live)
    world.executor.run_kind(LookupJob)
    world.executor.run_all(failing(outcome, 3))
    world.load_whole(live)
    assert loaded_pages(live) == 3
    assert world.directory.stats.prefetch_dropped == {outcome.name.lower(): 5 * PAGE}
    assert live.record.by_source == {"l1": 0, "l2": 0, "l3": 3 * PAGE, "computed": 5 * PAGE + 1}
    world.check()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["attention", "window"])
def test_br_001_a_failed_load_cuts_the_prefix_back(groups: tuple[Group, ...]) -> None:
    world = World(groups, l1=16, l2=16)
    world.serve(prompt(8))
    evict_all(world, Tier.L1)
    fill_with_sentinel(world, Tier.L1)
    live = world.open(prompt(8))
    world.load(live)
    page_3 = next(position for position, part in enumerate(world.directory.index.rule.needed(8)) if part == (3, 0))
    world.executor.run(0, failing(Outcome.IO_ERROR, page_3))
    assert not live.record.is_loaded
    world.check()
    world.load_whole(live)
    assert loaded_pages(live) == 3  # all windows are in L2 here
    assert world.directory.stats.objects["load.io_error"] == 1
    world.check()
    world.wind_up()


@pytest.mark.parametrize("source", [CopyKind.RESTORE, CopyKind.LOAD], ids=["from L1", "from L2"])
def test_br_001_a_state_that_cannot_be_restored_cuts_the_prefix_back_to_the_one_before(source: CopyKind) -> None:
    world = World(HYBRID, l1=16, l2=16)
    world.serve(prompt(4))
    if source is CopyKind.LOAD:
        evict_all(world, Tier.L1)
    live = world.open(prompt(4))
    assert live.record.local_tokens["l1" if source is CopyKind.RESTORE else "l2"] == 4 * PAGE
    world.load(live)
    last_page_state = len(world.executor.waiting[0].job.items) - 1
    assert world.executor.run(0, failing(Outcome.IO_ERROR, last_page_state)).kind is source
    assert not live.record.is_loaded
    assert live.record.live, "the live slot is kept for the next attempt"
    world.load_whole(live)
    assert loaded_pages(live) == 3
    world.check()
    world.wind_up()


def test_br_001_a_state_that_cannot_even_be_emptied_is_not_used() -> None:
    world = World(HYBRID, l1=4, l2=4)
    free = slots_free(world)
    live = world.open(prompt(2))
    assert world.directory.load(live.record) is Load.STARTED
    world.executor.collect()
    world.executor.run(0, failing(Outcome.IO_ERROR))
    assert world.directory.load(live.record) is Load.BUSY
    assert slots_free(world) == free
    world.load_whole(live)
    assert loaded_pages(live) == 0
    world.check()
    world.wind_up()


@pytest.mark.parametrize("groups", [(FULL,), HYBRID, (FULL, WINDOW)], ids=["attention", "hybrid", "window"])
def test_br_003_pages_stay_while_they_are_copied_although_their_request_is_gone(groups: tuple[Group, ...]) -> None:
    world = World(groups, l1=6, l2=6)
    live = world.open(prompt(4))
    world.load_whole(live)
    world.compute(live, pages=4, snapshot=False)
    backups = world.executor.waiting_for(CopyKind.BACKUP)
    copied = {(item.group, item.source) for position in backups for item in world.executor.waiting[position].job.items}
    assert {group for group, _ in copied} == {g for g, group in enumerate(groups) if group is not STATE}
    world.release(live)
    thief = world.open(prompt(6, seed=1))
    world.load(thief)
    world.executor.run_kind(CopyKind.RESET)
    while world.compute(thief, pages=1, snapshot=True) and thief.computed < 6 * PAGE:
        pass
    taken = {(group, slot_of(handle)) for group, table in enumerate(thief.record.tables) for handle in table if handle}
    assert not taken & copied
    world.run_all()
    for key in live.record.keys:
        assert world.executor.l3[key, 0, 0] == (world.truth[key], 0)
    world.check()
    world.wind_up()
