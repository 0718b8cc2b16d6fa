"""States between pools and their objects, and within a pool, by kernels; in plain torch: ``reference``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from hicache.kernels.legs import Joined, Layered, Slots
from hicache.kernels.tile_copies import clear_tiles, copy_tiles, gather_tiles, scatter_tiles
from hicache.kernels.tiles import Piece, TileTable, cut_bytes


def state_table(fields: Sequence[Layered | Joined], objects: torch.Tensor) -> TileTable:
    """Where every byte of a state's object lies in the fields: all layers of all of them in one table, one launch.

    Arguments are those of ``reference.gather_states``. Serves all objects of equal alignment. Raises ValueError.
    """
    if objects.dtype != torch.uint8 or objects.dim() != 2 or objects.stride(1) != 1:
        raise ValueError(f"state objects must be rows of uint8, not {objects.dtype} of shape {tuple(objects.shape)}")
    by_part: list[list[Piece]] = []
    offset_bytes = 0
    for field in fields:
        parts, axis = (field.pieces, field.axis) if isinstance(field, Joined) else ([field], -1)
        by_part += _field_pieces(parts, axis, offset_bytes)
        offset_bytes += sum(slots[0].numel() * slots.element_size() for part in parts for slots in part)
    if offset_bytes != objects.shape[1]:
        raise ValueError(f"state objects have {objects.shape[1]} bytes, their fields {offset_bytes}")
    return cut_bytes(_by_layer(by_part), objects, layers=len(by_part[0]))


def field_table(fields: Sequence[Layered]) -> TileTable:
    """Where every byte of a slot lies in the fields, for copies within the pool. Raises ValueError."""
    by_field = [[Piece(slots, 0, slots.stride()[1:]) for slots in field] for field in fields]
    return cut_bytes(_by_layer(by_field), None, layers=len(by_field[0]))


def _by_layer(by_part: Sequence[Sequence[Piece]]) -> list[Piece]:
    """All pieces of the first layer, then of the next. Raises ValueError for parts that differ in their layers."""
    if len({len(part) for part in by_part}) != 1:
        raise ValueError(f"fields differ in their layers: {[len(part) for part in by_part]}")
    return [piece for layer in zip(*by_part, strict=True) for piece in layer]


def gather_states(fields: Sequence[Layered | Joined], objects: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
    """Write states into objects, by the rules of ``reference.gather_states``.

    Enqueued on the current stream. To copy more than once, keep the ``state_table`` and use ``gather_tiles``.
    """
    gather_tiles(state_table(fields, objects), objects, sources=sources, targets=targets)


def scatter_states(
    objects: torch.Tensor, fields: Sequence[Layered | Joined], *, sources: Slots, targets: Slots
) -> None:
    """Read states out of objects: the way back of ``gather_states``, with equal rules."""
    scatter_tiles(state_table(fields, objects), objects, sources=sources, targets=targets)


def copy_states(fields: Sequence[Layered], *, sources: Slots, targets: Slots) -> None:
    """``field[layer][targets[i]] = field[layer][sources[i]]`` by the rules of ``reference.copy_states``."""
    copy_tiles(field_table(fields), sources=sources, targets=targets)


def clear_states(fields: Sequence[Layered], *, slots: Slots) -> None:
    """Zero the named slots of every field, in all layers."""
    clear_tiles(field_table(fields), slots=slots)


def _field_pieces(parts: Sequence[Layered], axis: int, offset_bytes: int) -> Iterator[list[Piece]]:
    """By part the pieces of one field, whose parts lie side by side along ``axis`` in the object, from
    ``offset_bytes``."""
    first = parts[0][0]
    inner = list(first.shape[1:])
    inner[axis] = sum(part[0].shape[axis] for part in parts)
    strides = torch.empty(inner, device="meta").stride()
    begin = 0
    for part in parts:
        expected = [*inner]
        expected[axis] = part[0].shape[axis]
        pieces: list[Piece] = []
        for layer, slots in enumerate(part):
            if list(slots.shape[1:]) != expected or slots.dtype != first.dtype or len(part) != len(parts[0]):
                raise ValueError(f"layers differ: {tuple(slots.shape[1:])} {slots.dtype}, {expected} {first.dtype}")
            elements = layer * math.prod(inner) + begin * strides[axis]
            pieces.append(Piece(slots, offset_bytes + elements * slots.element_size(), strides))
        yield pieces
        begin += expected[axis]
