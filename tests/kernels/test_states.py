"""The state kernels move the bits that their reference moves, all layers and fields in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hicache.kernels import reference
from hicache.kernels.reference import Joined
from hicache.kernels.states import (
    clear_states,
    copy_states,
    field_table,
    gather_states,
    scatter_states,
    state_table,
)
from tests.engine.specs import POISON, fill_with_noise
from tests.engine.test_reference import noisy
from tests.kernels.devices import DEVICE, assert_same_memory, pinned_twin, twin

LAYERS, SLOTS = 3, 5


def fields_of(*shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype], as_list: bool) -> list[Any]:
    fields = [
        noisy(LAYERS, SLOTS, *shape, dtype=dtype, seed=seed) for seed, (shape, dtype) in enumerate(shapes_and_dtypes)
    ]
    return [[layer.clone() for layer in field] if as_list else field for field in fields]


def joined_twin(fields: list[Any]) -> list[Any]:
    tensors = twin(tensors_of(fields))
    return [
        Joined(held, field.axis) if isinstance(field, Joined) else held
        for field, held in zip(fields, tensors, strict=True)
    ]


def tensors_of(fields: list[Any]) -> list[Any]:
    return [field.pieces if isinstance(field, Joined) else field for field in fields]


def assert_equals_reference(fields: list[Any], object_bytes: int) -> None:
    """There and back, by kernels between twins of what the reference copies between."""
    objects = torch.full((4, object_bytes + 5), POISON, dtype=torch.uint8)[:, :object_bytes]
    kernel_fields, kernel_objects = joined_twin(fields), pinned_twin(objects)
    reference.gather_states(fields, objects, sources=[4, 0], targets=[1, 3])
    gather_states(kernel_fields, kernel_objects, sources=[4, 0], targets=[1, 3])
    assert_same_memory(kernel_objects, objects)
    reference.scatter_states(objects, fields, sources=[1, 1], targets=[2, 3])
    scatter_states(kernel_objects, kernel_fields, sources=[1, 1], targets=[2, 3])
    assert_same_memory(tensors_of(kernel_fields), tensors_of(fields))
    assert_same_memory(kernel_objects, objects)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("first", [torch.int8, torch.bfloat16, torch.float32])
def test_states_become_the_concatenation_of_their_fields_and_come_back(first: torch.dtype, *, as_list: bool) -> None:
    """Also where a field of wide elements begins at an odd byte."""
    fields = fields_of(((3, 7), first), ((2, 4, 4), torch.float32), as_list=as_list)
    assert_equals_reference(fields, LAYERS * (21 * first.itemsize + 128))


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_pieces_of_a_field_are_one_tensor_in_the_object(axis: int, *, as_list: bool) -> None:
    """Heads that a slice has of several sections; strides that do not merge in any of three dimensions."""
    pad, field = fields_of(((1,), torch.uint8), ((6, 8, 7), torch.bfloat16), as_list=as_list)
    spans = ((1, 3), (5, 6))

    def narrowed(start: int, stop: int) -> Any:
        if isinstance(field, torch.Tensor):
            return field.narrow(axis, start, stop - start)
        return [layer.narrow(axis, start, stop - start) for layer in field]

    pieces = [narrowed(*span) for span in spans]
    elements = 6 * 8 * 7 // field[0].shape[axis] * 3
    assert_equals_reference([pad, Joined(pieces, axis)], LAYERS * (1 + 2 * elements))


def test_a_state_of_many_layers_is_one_table_of_full_loads() -> None:
    """As Kimi-K3 has them, in small: conv and temporal of every layer in one launch, in 16-byte loads of 16 KiB."""
    fields = fields_of(((64, 3), torch.bfloat16), ((4, 64, 65), torch.float32), as_list=True)
    object_bytes = LAYERS * (384 + 66560)
    table = state_table(twin(fields), pinned_twin(torch.zeros(4, object_bytes, dtype=torch.uint8)))
    assert (table.word_bytes * table.alignment, table.tile_rows, table.tile_run) == (16, 1, 2048)
    assert len(table.tiles) == LAYERS * (1 + 5)
    assert len(table.piece_starts) == 2 * LAYERS + 1
    assert_equals_reference(fields, object_bytes)


@pytest.mark.parametrize("as_list", [False, True])
def test_states_are_copied_and_cleared_within_their_pool(*, as_list: bool) -> None:
    fields = fields_of(((3, 7), torch.float8_e5m2), ((2, 8), torch.float32), as_list=as_list)
    kernel_fields = twin(fields)
    for module_copy, module_clear, held in (
        (reference.copy_states, reference.clear_states, fields),
        (copy_states, clear_states, kernel_fields),
    ):
        module_copy(held, sources=[4, 4], targets=[0, 1])
        module_clear(held, slots=[2, 2])
    assert_same_memory(kernel_fields, fields)


@pytest.mark.parametrize(
    ("sources", "targets", "error"),
    [([0], [5], IndexError), ([-1], [0], IndexError), ([0, 1], [1, 2], ValueError), ([0, 1], [2, 2], ValueError)],
)
def test_copies_between_slots_that_cannot_be_are_refused_before_any_byte_moves(
    sources: list[int], targets: list[int], error: type[Exception]
) -> None:
    fields = fields_of(((3,), torch.float32), as_list=False)
    held = twin(fields)
    with pytest.raises(error):
        copy_states(held, sources=sources, targets=targets)
    with pytest.raises(IndexError):
        clear_states(held, slots=[0, 5])
    assert_same_memory(held, fields)


@pytest.mark.parametrize("object_bytes", [LAYERS * 12 - 1, LAYERS * 12 + 1])
def test_objects_that_are_not_as_large_as_the_fields_are_refused(object_bytes: int) -> None:
    fields = twin(fields_of(((3,), torch.float32), as_list=False))
    with pytest.raises(ValueError, match="bytes"):
        state_table(fields, torch.zeros(2, object_bytes, dtype=torch.uint8))


def test_fields_with_different_numbers_of_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        field_table([torch.zeros(1, 4, 3), torch.zeros(1, 5, 3)])


@pytest.mark.skipif(DEVICE != "cpu", reason="the states would have to be touched on a device")
def test_br_005_states_above_two_to_the_31_bytes_are_copied_right() -> None:
    """28 MiB states reach 2^31 bytes with 77 slots; fields and objects are reserved, not touched."""
    elements = 7 * 1024 * 1024
    slots = 2**31 // (4 * elements) + 3
    field = torch.empty(1, slots, elements, dtype=torch.float32).narrow(2, 0, 1024)  # a slot touches 4 KiB
    objects = torch.empty(slots, 4 * elements, dtype=torch.uint8)[:, :4096]
    fill_with_noise(field[0, slots - 1], 1)
    gather_states([field], objects, sources=[slots - 1], targets=[slots - 2])
    assert torch.equal(objects[slots - 2], field[0, slots - 1].view(torch.uint8))
    scatter_states(objects, [field], sources=[slots - 2], targets=[slots - 3])
    copy_states([field], sources=[slots - 3], targets=[slots - 2])
    assert torch.equal(field[0, slots - 2].view(torch.uint8), objects[slots - 2])
