"""Kernels keep the promises of Copies, staged or not: the tests of the reference, over a rank whose copies they are."""

from __future__ import annotations

import pytest

from hicache.copies import PoolCopies
from hicache.errors import UsageError
from hicache.pools import L1Pool
from tests.engine.test_executor_copies import (
    test_a_job_without_items_completes,
    test_a_slot_or_group_that_does_not_exist_is_an_outcome_and_changes_nothing,
    test_an_adopted_pool_goes_down_and_comes_back_bit_for_bit,
    test_pages_and_states_go_down_and_come_back_bit_for_bit,
    test_snapshots_restores_and_resets_keep_transient_fields_where_they_belong,
    test_transient_fields_never_reach_l2,
    test_without_l2_only_copies_within_l1_are_done,
)
from tests.engine.test_layerwise import adopted_by_layer, layers_bring_what_a_whole_load_brings
from tests.kernels.conftest import KernelRank

__all__ = [
    "test_a_job_without_items_completes",
    "test_a_slot_or_group_that_does_not_exist_is_an_outcome_and_changes_nothing",
    "test_an_adopted_pool_goes_down_and_comes_back_bit_for_bit",
    "test_pages_and_states_go_down_and_come_back_bit_for_bit",
    "test_snapshots_restores_and_resets_keep_transient_fields_where_they_belong",
    "test_transient_fields_never_reach_l2",
    "test_without_l2_only_copies_within_l1_are_done",
]


@pytest.mark.parametrize("as_list", [False, True], ids=["one tensor", "by layer"])
def test_layers_one_by_one_bring_what_a_whole_load_brings(rank: KernelRank, as_list: bool) -> None:
    if as_list:
        rank.l1 = adopted_by_layer(rank.l1)
    layers_bring_what_a_whole_load_brings(rank, rank.setting)


def test_br_050_a_line_at_start_names_the_kernels(rank: KernelRank) -> None:
    assert rank.executor().description.startswith(f"copies: {rank.setting} on ")


def test_a_cpu_without_a_word_is_served_by_the_reference(rank: KernelRank) -> None:
    l1 = L1Pool(rank.spec, pages=1, state_slots=1)
    assert PoolCopies(l1, None).name == "reference"


def test_a_group_without_states_has_none_to_copy(rank: KernelRank) -> None:
    copies = PoolCopies(rank.l1, rank.l2, setting=rank.setting)
    for call in (copies.reset, copies.clear):
        with pytest.raises(UsageError, match="group 0"):
            call(0, [1])


def test_tables_hold_no_view_of_l2(rank: KernelRank) -> None:
    """Else its memory would outlive it: close unmaps it."""
    copies = PoolCopies(rank.l1, rank.l2, setting=rank.setting)
    rank.l2.close()
    with pytest.raises(UsageError):
        copies.backup(0, [0], [0])
