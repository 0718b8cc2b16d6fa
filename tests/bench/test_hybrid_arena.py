"""The table of the unified L1: what it compares is served by the production directory, and the shift is won."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.hybrid_arena import (
    L1_BYTES,
    SPEC,
    WORKLOADS,
    Phase,
    Row,
    measure_fresh,
    offered,
    simulate,
    slot_ns,
    split_of,
    unified,
)
from hicache.arena import slot_bytes


def served(workload: str, state_share: float | None) -> Row:
    """An eighth of the workload."""
    phases = [replace(phase, steps=phase.steps // 8) for phase in WORKLOADS[workload]]
    config = unified(L1_BYTES) if state_share is None else split_of(L1_BYTES, state_share)
    return simulate(workload, phases, config, state_share=state_share)


def test_every_split_and_the_arena_have_the_same_bytes() -> None:
    sizes = slot_bytes(SPEC)
    for share in (0.1, 0.5, 0.9):
        slots = split_of(L1_BYTES, share).l1_slots
        left = L1_BYTES - sum(count * size for count, size in zip(slots, sizes, strict=True))
        assert 0 <= left < sizes[0]
    layout = unified(L1_BYTES).l1_arena
    assert layout is not None
    assert 0 <= L1_BYTES - layout.size_bytes < layout.unit_bytes


def test_a_shift_between_short_and_long_requests_is_served_better_than_by_splits() -> None:
    arena = served("short, long, short", None)
    splits = [served("short, long, short", share) for share in (0.4, 0.6)]
    assert arena.served_share > max(row.served_share for row in splits)
    assert arena.running_short_max > splits[0].running_short_max
    assert arena.running_long_max > splits[-1].running_long_max
    assert arena.units_passed > 0
    assert not any(row.units_passed for row in splits)


def test_neither_side_is_starved_where_requests_grow() -> None:
    arena, split = (served("short that grow", share) for share in (None, 0.45))
    assert arena.served_share > 0.8 * split.served_share


@pytest.mark.parametrize("config", [unified(L1_BYTES), split_of(L1_BYTES, 0.5)], ids=["arena", "split"])
def test_a_page_has_a_cost(config: object) -> None:
    assert slot_ns(config, rounds=2) > 0  # type: ignore[arg-type]


def test_fresh_seeds_are_other_workloads_and_compare_with_the_best_split_of_each() -> None:
    phases = [Phase(25, short_per_step=10), Phase(25, long_per_step=0.5)]
    row = measure_fresh("brief", phases, seeds=(2, 3), shares=(0.3, 0.6))
    assert 0 < row.unified_min <= row.unified <= 1
    assert row.best_split in (0.3, 0.6)
    assert row.best_split_served <= row.best_split_of_each + 0.001
    assert 0 <= row.wins <= 2
    assert next(iter(offered(phases, seed=2)))[0].keys != next(iter(offered(phases, seed=3)))[0].keys
