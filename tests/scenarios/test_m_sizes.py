"""Group M: groups of any sizes in one cache, and prompts that fit but for one of them."""

from __future__ import annotations

import pytest

from hicache.arena import PADDING_SHARE_MAX, arena_layout, slot_bytes
from hicache.loader import Load
from hicache.outcome import Outcome
from hicache.pools import L1Pool
from hicache.spec import CacheSpec, PagedGroup
from tests.core.simulated_executor import failing
from tests.core.situations import HYBRID, prompt, slots_free
from tests.core.test_arena import paged, state
from tests.core.world import PAGE, World


@pytest.mark.parametrize("widths", [(4, 64, 3584), (16, 528), (7, 13), (1, 1000, 3), (48,)])
def test_br_149_groups_of_any_sizes_share_units_at_a_bounded_waste_or_are_refused(widths: tuple[int, ...]) -> None:
    groups = tuple(paged(str(width), 16 * width) for width in widths)
    spec = CacheSpec("m", "r", (*groups, state("s", (5, 31), (3,))), page_tokens=3)
    layout = arena_layout(spec, 1 << 26)
    for size, slots in zip(slot_bytes(spec), layout.slots_per_unit, strict=True):
        assert 0 <= 1 - size * slots / layout.unit_bytes <= PADDING_SHARE_MAX


def test_br_149_groups_of_any_sizes_need_no_common_multiple() -> None:
    groups = tuple(
        PagedGroup(str(width), (index,), heads=1, head_dim=width, dtype="uint8")
        for index, width in enumerate((4, 64, 3584, 16, 528, 7, 1))
    )
    spec = CacheSpec("m", "1", groups, page_tokens=3)
    pool = L1Pool(spec, pages=5)
    assert [pool.paged[index].shape[-1] for index in range(7)] == [4, 64, 3584, 16, 528, 7, 1]


def test_br_150_a_prompt_that_l1_cannot_hold_is_told_so_and_holds_nothing() -> None:
    world = World(HYBRID, l1=4, l2=4)
    live = world.open(prompt(6))
    world.load_whole(live)
    free = slots_free(world)
    assert not world.directory.extend(live.record, tokens=6 * PAGE)
    assert slots_free(world) == free
    assert world.directory.extend(live.record, tokens=4 * PAGE)
    others = [world.open(prompt(1, seed=number)) for number in range(1, 5)]
    answers = [world.directory.load(other.record) for other in others]
    assert answers == [Load.STARTED] * 3 + [Load.BUSY]
    world.executor.collect()
    world.run_all()
    world.release(live)
    assert world.directory.load(others[3].record) is Load.STARTED
    world.executor.collect()
    world.wind_up()


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
