"""The directory when copies fail, or outlive the request that they were made for."""

from __future__ import annotations

from hicache.jobs import CopyKind
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.slots import slot_of
from tests.core.simulated_executor import failing
from tests.core.situations import HYBRID, evict_all, prompt
from tests.core.world import FULL, PAGE, STATE, World


def test_br_142_a_snapshot_that_was_not_written_does_not_exist() -> None:
    world = World(HYBRID, l1=8, l2=8)
    live = world.open(prompt(2))
    world.load_whole(live)
    world.compute(live, pages=1, snapshot=True)
    world.compute(live, pages=1, snapshot=True, fault=failing(Outcome.IO_ERROR))
    world.run_all()
    world.check()
    world.release(live)
    again = world.open(prompt(2))
    assert again.record.local_tokens == {"l1": PAGE, "l2": 0}
    assert sum(1 for _, group, _ in world.entries() if group == 1) == 2  # page 0 in L1 and L2
    world.wind_up()


def test_br_103_no_slot_of_l2_is_given_out_again_before_its_copy_has_ended() -> None:
    world = World((FULL,), l1=40, l2=10, has_l3=False)
    first = world.open(prompt(10))
    world.load_whole(first)
    world.compute(first, pages=10, snapshot=False)
    second = world.open(prompt(20, seed=1))
    world.load(second)
    world.compute(second, pages=20, snapshot=False)
    targets = [item.target for task in world.executor.waiting for item in task.job.items]
    assert len(targets) == len(set(targets)) == 10
    assert world.directory.stats.skipped["backup.no_host_capacity"] == 1
    world.run_all()
    world.check()
    assert world.directory.index.pools[Tier.L2][0].used_count == 10
    world.wind_up()


def test_a_load_keeps_its_slots_although_its_request_is_gone() -> None:
    world = World(HYBRID, l1=5, l2=5)
    world.serve(prompt(3))
    evict_all(world, Tier.L1)
    live = world.open(prompt(3))
    world.load(live)
    held = [world.directory.index.pools[Tier.L1][group].used_count for group in range(2)]
    assert held == [3, 1]
    world.release(live)
    assert [world.directory.index.pools[Tier.L1][group].used_count for group in range(2)] == held
    assert world.directory.index.acquire(Tier.L1, 0, 3) is None
    assert world.directory.index.acquire(Tier.L2, 0, 3) is None  # nor are its sources
    world.run_all()
    assert [world.directory.index.pools[Tier.L1][group].used_count for group in range(2)] == [0, 0]
    world.check()
    world.wind_up()


def test_a_load_that_a_rank_has_done_before_it_dies_is_still_one_of_the_whole_prompt() -> None:
    world = World((FULL, STATE), l1=12, l2=12, ranks=2)
    world.serve(prompt(4))
    evict_all(world, Tier.L1)
    live = world.open(prompt(4))
    world.load(live)
    for position in reversed([at for at, task in enumerate(world.executor.waiting) if task.rank == 1]):
        world.executor.run(position)
    world.lose_rank(0)
    assert not live.record.is_loaded
    world.directory.load(live.record)
    world.run_all()
    assert live.record.loaded_pages == 4
    assert live.record.shared_pages == 4
    world.check()
    world.wind_up()


def test_a_load_that_failed_on_one_rank_goes_on_in_states_that_no_rank_still_writes_to() -> None:
    world = World(HYBRID, l1=8, l2=8, layerwise=True, ranks=2)
    world.fill_l3(prompt(4))
    live = world.open([*prompt(4), 0])
    world.prefetch(live)
    world.run_all()
    world.load(live)
    world.executor.run_kind(CopyKind.LOAD, failing(Outcome.IO_ERROR, 0))
    written_to = {(item.group, item.target) for _, items in world.executor.in_flight for item in items}
    assert written_to, "it is still in flight"
    world.load(live)
    assert all((group, slot_of(slot)) not in written_to for group, slot in live.record.live.items())
    world.run_all()
    assert live.record.loaded_pages == 0
    world.wind_up()
