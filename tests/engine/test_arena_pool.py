"""The arena's memory: every group's views lie where the layout says, and copies go through them bit for bit."""

from __future__ import annotations

import pytest
import torch

from hicache.arena import ALIGNMENT_BYTES
from hicache.errors import ConfigError
from hicache.jobs import CopyKind
from hicache.outcome import Outcome
from hicache.pools import ArenaPool
from hicache.spec import PagedGroup
from tests.engine.conftest import Rank
from tests.engine.specs import POISON, as_bytes, fill_with_noise, hybrid_spec
from tests.engine.test_executor_copies import copy_job, state_bytes

UNITS = 12


@pytest.fixture
def pool() -> ArenaPool:
    layout = ArenaPool.allocate(hybrid_spec(), 1 << 20).layout
    return ArenaPool.allocate(hybrid_spec(), UNITS * layout.unit_bytes)


def views(pool: ArenaPool, group: int) -> list[torch.Tensor]:
    return [pool.paged[group]] if group in pool.paged else list(pool.state[group].values())


def test_a_slot_is_written_within_its_own_stride_and_nowhere_else(pool: ArenaPool) -> None:
    assert pool.slot_counts == pool.layout.slot_counts
    for group in range(3):
        stride = pool.layout.stride_bytes(group)
        for slot in (0, 1, pool.slot_counts[group] - 1):
            pool.memory.fill_(POISON)
            for view in views(pool, group):
                view[:, slot] = 1
            changed = (pool.memory != POISON).nonzero().view(-1)
            assert slot * stride <= int(changed.min())
            assert int(changed.max()) < (slot + 1) * stride


def test_a_page_is_one_run_of_bytes_layer_after_layer_and_slots_and_fields_are_aligned(pool: ArenaPool) -> None:
    for group, described in enumerate(pool.spec.groups):
        for view in views(pool, group):
            assert view.data_ptr() % ALIGNMENT_BYTES == 0
            assert view.stride(1) * view.element_size() == pool.layout.stride_bytes(group)
            assert view[:, 1].is_contiguous()
        if isinstance(described, PagedGroup):
            noise = pool.paged[group][:, 3].clone()
            fill_with_noise(noise, group)
            pool.paged[group][:, 3] = noise
            start = 3 * pool.layout.stride_bytes(group)
            run = pool.memory[start : start + described.object_bytes(pool.spec.page_tokens)]
            assert as_bytes(run) == as_bytes(noise)


def test_pages_and_states_of_an_arena_go_down_and_come_back_bit_for_bit(rank: Rank, pool: ArenaPool) -> None:
    rank.l1 = pool
    fill_with_noise(pool.memory, 7)
    page_slots = [pool.layout.slots_per_unit[group] * unit for group, unit in ((0, 1), (1, 2))]
    state_slot = pool.slot_counts[2] - 1
    expected = [as_bytes(pool.paged[group][:, slot]) for group, slot in enumerate(page_slots)]
    state = state_bytes(rank, state_slot, transient=False)
    executor = rank.executor()
    down = ((0, page_slots[0], 9), (1, page_slots[1], 0), (2, state_slot, 1))
    executor.submit(copy_job(1, CopyKind.BACKUP, *down))
    assert rank.completions.outcomes(1) == (Outcome.OK,) * 3
    pool.memory.fill_(POISON)
    executor.submit(copy_job(2, CopyKind.LOAD, *((group, target, source) for group, source, target in down)))
    assert rank.completions.outcomes(2) == (Outcome.OK,) * 3
    assert [as_bytes(pool.paged[group][:, slot]) for group, slot in enumerate(page_slots)] == expected
    assert state_bytes(rank, state_slot, transient=False) == state
    assert not any(state_bytes(rank, state_slot, transient=True)), "rings over bytes of former pages are emptied"
    assert as_bytes(pool.memory).count(POISON) > pool.memory.numel() // 2


def test_more_than_there_is_memory_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"l1_bytes = {1 << 60}: expected no more than cpu has memory for"):
        ArenaPool.allocate(hybrid_spec(), 1 << 60)
