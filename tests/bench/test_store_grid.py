"""What bench.store measures in full and in a hurry."""

from __future__ import annotations

import pytest

from bench.store_grid import MOONCAKE, UNCHECKED, full_plan, quick_plan, size_text

BACKENDS = ("lmdb", "file")
QUICK_S = 45.0
# Clients, daemon and the cell that began last; measured at 3 to 6 s on a busy machine.
QUICK_MARGIN_S = 10.0


def test_the_full_grid_is_complete():
    cells = [cell for cell in full_plan(BACKENDS).cells if cell.path != UNCHECKED]
    assert len(cells) == len(set(cells)) == 3 * 2 * 4 * 2 * 2
    assert {cell.object_bytes for cell in cells} == {64 << 10, 1 << 20, 8 << 20, 28 << 20}
    assert {cell.batch for cell in cells} == {1, 32}
    assert {cell.clients for cell in cells} == {1, 4}


@pytest.mark.parametrize("with_peers", [False, True])
def test_quick_leaves_time_to_end_within_45_s(with_peers):
    plan = quick_plan(BACKENDS, with_peers=with_peers)
    assert plan.budget_s + (plan.peers_budget_s if with_peers else 0) + QUICK_MARGIN_S < QUICK_S


def test_quick_measures_cells_of_the_full_grid_with_the_targets_first():
    quick, full = quick_plan(BACKENDS, with_peers=False).cells, full_plan(BACKENDS).cells
    assert set(quick) <= set(full)
    assert {(cell.path, cell.batch, cell.clients) for cell in quick[:8]} == {
        ("memory", 32, 1),
        ("unix", 32, 1),
        ("tcp", 32, 1),
    }


def test_mooncake_is_measured_after_the_targets_and_only_over_registered_memory():
    everything = (*BACKENDS, *MOONCAKE)
    quick, full = quick_plan(everything, with_peers=False).cells, full_plan(everything).cells
    assert quick[:8] == quick_plan(BACKENDS, with_peers=False).cells[:8]
    assert set(quick) <= set(full)
    shared = [cell for cell in full if cell.backend in MOONCAKE]
    assert {(cell.path, cell.clients) for cell in shared} == {("memory", 1)}
    assert len(shared) == len(MOONCAKE) * 4 * 2


def test_sizes_read_well():
    assert [size_text(size) for size in (64 << 10, 1 << 20, 28 << 20)] == ["64 KiB", "1 MiB", "28 MiB"]
