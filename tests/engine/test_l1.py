"""L1: tensors of ours, or the engine's own when they are what the spec says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache.errors import ConfigError, SpecError, UsageError
from hicache.pools import L1Pool
from tests.engine.specs import hybrid_spec, paged_spec


def engine_tensors() -> dict[int, Any]:
    """What an engine with the hybrid spec may hold, each group in another way."""
    return {
        0: [[torch.zeros(6, 4, 2, 16, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2)],
        1: [torch.zeros(9, 1, 4, 1, 33, dtype=torch.float8_e4m3fn)],
        2: {
            "conv": [torch.zeros(5, 7, 3, dtype=torch.int8) for _ in range(3)],
            "temporal": torch.zeros(3, 5, 2, 8, 8),
            "ring_d": torch.zeros(3, 5, 4, 5),
            "ring_k": torch.zeros(3, 5, 4, 6, dtype=torch.bfloat16),
        },
    }


def test_owned_pools_are_zeroed_tensors_of_the_promised_shapes() -> None:
    pool = L1Pool(hybrid_spec(), pages={0: 10, 1: 20}, state_slots=3)
    assert pool.slot_counts == (10, 20, 3)
    assert pool.paged[0].shape == (2, 10, 2, 4, 2, 16)
    assert pool.paged[1].dtype == torch.float8_e4m3fn
    assert pool.state[2]["ring_k"].shape == (3, 3, 4, 6)
    assert all(not tensor.view(torch.uint8).any() for tensor in (*pool.paged.values(), *pool.state[2].values()))
    assert pool.device == torch.device("cpu")


def test_fields_come_in_the_order_of_the_spec_transient_ones_apart() -> None:
    pool = L1Pool(hybrid_spec(), pages=8, state_slots=2)
    state = pool.state[2]
    for transient, names in ((False, ("conv", "temporal")), (True, ("ring_d", "ring_k"))):
        fields = pool.fields(2, transient=transient)
        assert [id(field) for field in fields] == [id(state[name]) for name in names]


def test_asking_for_the_wrong_kind_of_group_is_refused() -> None:
    pool = L1Pool(hybrid_spec(), pages=8, state_slots=2)
    with pytest.raises(UsageError):
        pool.pages(2)
    with pytest.raises(UsageError):
        pool.fields(0, transient=False)


@pytest.mark.parametrize(("pages", "state_slots", "setting"), [(0, 2, "l1_pages"), ({0: 4}, 2, "l1_pages"),
                                                              (4, 0, "l1_state_slots")])  # fmt: skip
def test_a_group_without_slots_is_refused(pages: Any, state_slots: int, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        L1Pool(hybrid_spec(), pages=pages, state_slots=state_slots)


def test_more_slots_than_there_is_memory_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="l1_pages = 1099511627776"):
        L1Pool(paged_spec(), pages=1 << 40)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_br_050_a_device_that_is_not_there_is_refused_with_one_that_is() -> None:
    with pytest.raises(ConfigError, match="device = 'cuda': expected cpu"):
        L1Pool(paged_spec(), pages=4, device="cuda")


def test_a_device_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="device = 'meta'"):
        L1Pool(paged_spec(), pages=4, device="meta")


def test_pools_made_in_inference_mode_are_ordinary_tensors() -> None:
    with torch.inference_mode():
        pool = L1Pool(paged_spec(), pages=4)
    pool.paged[0][0, 0] = 1


def test_adopted_tensors_are_used_as_they_are() -> None:
    tensors = engine_tensors()
    pool = L1Pool.adopt(hybrid_spec(), tensors)
    assert pool.slot_counts == (6, 9, 5)
    assert pool.pages(0) is tensors[0]
    assert pool.fields(2, transient=False) == [tensors[2]["conv"], tensors[2]["temporal"]]
    assert pool.state[2]["temporal"] is tensors[2]["temporal"]
    assert not pool.paged


def drop_a_group(tensors: dict[int, Any]) -> None:
    del tensors[1]


def drop_a_layer(tensors: dict[int, Any]) -> None:
    tensors[0].pop()


def drop_a_plane(tensors: dict[int, Any]) -> None:
    tensors[0][1].pop()


def swap_kinds(tensors: dict[int, Any]) -> None:
    tensors[1], tensors[2] = tensors[2], tensors[1]


def other_dtype(tensors: dict[int, Any]) -> None:
    tensors[1] = [tensors[1][0].view(torch.float8_e5m2)]


def other_shape(tensors: dict[int, Any]) -> None:
    tensors[1] = [tensors[1][0][..., :32]]


def other_page_count_in_one_layer(tensors: dict[int, Any]) -> None:
    tensors[0][1][0] = tensors[0][1][0][:5]


def pages_that_overlap(tensors: dict[int, Any]) -> None:
    tensors[1] = [tensors[1][0][:1].expand(9, 1, 4, 1, 33)]


def other_slot_count_in_one_field(tensors: dict[int, Any]) -> None:
    tensors[2]["ring_d"] = tensors[2]["ring_d"][:, :4]


def a_field_is_missing(tensors: dict[int, Any]) -> None:
    del tensors[2]["ring_k"]


def other_device(tensors: dict[int, Any]) -> None:
    tensors[1] = [tensors[1][0].to("meta")]


def no_pages(tensors: dict[int, Any]) -> None:
    tensors[1] = [tensors[1][0][:0]]


@pytest.mark.parametrize(
    "change",
    [
        drop_a_group,
        drop_a_layer,
        drop_a_plane,
        swap_kinds,
        other_dtype,
        other_shape,
        other_page_count_in_one_layer,
        pages_that_overlap,
        other_slot_count_in_one_field,
        a_field_is_missing,
        other_device,
        no_pages,
    ],
    ids=lambda change: change.__name__,
)
def test_tensors_that_are_not_what_the_spec_says_are_refused(change: Callable[[dict[int, Any]], None]) -> None:
    tensors = engine_tensors()
    change(tensors)
    with pytest.raises(SpecError, match="adopted"):
        L1Pool.adopt(hybrid_spec(), tensors)
