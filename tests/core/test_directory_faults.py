"""The directory when copies fail, or outlive the request that they were made for."""

from __future__ import annotations

from hicache.jobs import CopyKind
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.slots import slot_of
from tests.core.simulated_executor import failing
from tests.core.situations import HYBRID, evict_all, prompt
from tests.core.world import FULL, STATE, World


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
