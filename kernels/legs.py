"""What copies between layer-first pools and page-first blocks are made of, checked: whoever moves the bytes.

Shapes, with ``inner`` the shape of one page (or state) in one layer:

    layered   [layers, n_slots, *inner], or one tensor [n_slots, *inner] per layer, of any slot stride     (L1)
    blocks    [n_blocks, layers, *inner], one block contiguous                                              (L2)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from operator import index
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Slots: TypeAlias = Sequence[int] | torch.Tensor
Layered: TypeAlias = torch.Tensor | Sequence[torch.Tensor]  # [layers, n_slots, *inner], or [n_slots, *inner] per layer
Integers: TypeAlias = npt.NDArray[np.int64]
PagedPool: TypeAlias = Layered | Sequence[Sequence[torch.Tensor]]  # or [n_slots, *inner] per layer and plane


class Joined(NamedTuple):
    """A field of a state that is more than one piece: in an object they are one tensor, side by side along ``axis``."""

    pieces: Sequence[Layered]
    axis: int  # of one state in one layer, counted from the end: -1 is the last


class Layers(list[torch.Tensor]):
    """A tensor for each layer, found alike once and for all: not to be changed. Copies of it need no further check."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises ValueError for tensors that differ in shape, dtype or device."""
        super().__init__(tensors)
        _check_alike(list(self))
        self._in_words: dict[int, Layers] = {}

    @functools.cached_property
    def places(self) -> tuple[Integers, list[tuple[int, ...]]]:
        """The address of each layer, and its strides in items: one for all where they are equal."""
        strides = [layer.stride() for layer in self]
        addresses = np.array([layer.data_ptr() for layer in self])
        return addresses, strides[:1] if len(set(strides)) == 1 else strides

    @functools.cached_property
    def word_bytes(self) -> int:
        """Of the widest integers in which all layers can be seen."""
        return min(_word_bytes(layer) for layer in self)

    def in_words(self, word_bytes: int) -> Layers:
        """The same memory as integers of ``word_bytes``, no more than the property says; made once."""
        if word_bytes not in self._in_words:
            self._in_words[word_bytes] = Layers([layer.view(_WORDS[word_bytes]) for layer in self])
        return self._in_words[word_bytes]


class Leg(NamedTuple):
    """One checked copy: layers beside their blocks, of one dtype."""

    layered: torch.Tensor | Layers
    blocks: torch.Tensor  # [n_blocks, layers, *inner]


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def page_legs(pool: PagedPool, pages: torch.Tensor) -> Iterator[Leg]:
    """The copies that make up one of pages: one, or one per plane where the planes are tensors of their own."""
    if isinstance(pool, torch.Tensor) or isinstance(pool[0], torch.Tensor):
        yield _leg(pool, pages)  # type: ignore[arg-type]  # a first layer that is a tensor makes it Layered
        return
    layers: list[Sequence[torch.Tensor]] = list(pool)  # type: ignore[arg-type]  # as is its contrary
    plane_count = pages.shape[2] if pages.dim() > 2 else 0
    if any(len(planes) != plane_count for planes in layers):
        raise ValueError(f"every layer needs {plane_count} planes, as the pages of shape {tuple(pages.shape)} have")
    for plane in range(plane_count):
        yield _leg([planes[plane] for planes in layers], pages[:, :, plane])


def state_legs(fields: Sequence[Layered | Joined], objects: torch.Tensor) -> Iterator[Leg]:
    """One copy per field, or piece of one, with its bytes in the objects viewed in the field's own shape."""
    if objects.dtype != torch.uint8 or objects.dim() != 2 or objects.stride(1) != 1:
        raise ValueError(f"state objects must be rows of uint8, not {objects.dtype} of shape {tuple(objects.shape)}")
    offset = 0
    for field in fields:
        pieces, axis = (field.pieces, field.axis) if isinstance(field, Joined) else ([field], -1)
        field_bytes = sum(_piece_bytes(piece) for piece in pieces)
        rows = objects[:, offset : offset + field_bytes]
        if rows.shape[1] != field_bytes:
            raise ValueError(f"state objects of {objects.shape[1]} bytes are too small for their fields")
        yield from _field_legs(pieces, axis, rows)
        offset += field_bytes
    if offset != objects.shape[1]:
        raise ValueError(f"state objects have {objects.shape[1]} bytes, their fields {offset}")


def slot_list(slots: Slots) -> list[int]:
    if isinstance(slots, torch.Tensor):
        if slots.dim() != 1 or slots.is_floating_point() or slots.dtype == torch.bool:
            raise ValueError(f"slots must be a vector of integers, not {slots.dtype} of shape {tuple(slots.shape)}")
        return [int(slot) for slot in slots.tolist()]
    return [index(slot) for slot in slots]


def checked_slots(
    legs: Sequence[Leg], sources: Slots, targets: Slots, *, to_blocks: bool
) -> tuple[list[int], list[int]]:
    """Both as lists, when they may be copied. Raises ValueError or IndexError."""
    source_slots, target_slots = slot_list(sources), slot_list(targets)
    for leg in legs:
        counts = slot_count(leg.layered), len(leg.blocks)
        source_count, target_count = counts if to_blocks else reversed(counts)
        check_slots(source_slots, target_slots, source_count=source_count, target_count=target_count)
    return source_slots, target_slots


def check_slots(sources: list[int], targets: list[int], *, source_count: int, target_count: int) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
    if len(set(targets)) != len(targets):
        raise ValueError("a target slot is named twice")
    check_range(sources, source_count, "source slot")
    check_range(targets, target_count, "target slot")


def check_range(slots: list[int], count: int, what: str) -> None:
    for slot in slots:
        if not 0 <= slot < count:
            raise IndexError(f"{what} {slot} is outside of [0, {count})")


def slot_count(layered: Layered) -> int:
    return layered[0].shape[0]


def block_bytes(leg: Leg) -> int:
    return math.prod(leg.blocks.shape[1:]) * leg.blocks.element_size()


def layer_bytes(leg: Leg) -> int:
    return math.prod(leg.blocks.shape[2:]) * leg.blocks.element_size()


def in_widest_words(leg: Leg) -> Leg:
    """The same memory as integers, the widest in which both sides can be seen."""
    layered, blocks = leg
    layers_fit = layered.word_bytes if isinstance(layered, Layers) else _word_bytes(layered)
    word_bytes = min(layers_fit, _word_bytes(blocks))  # what can be seen in wide words can be in narrower ones
    word = _WORDS[word_bytes]
    return Leg(
        layered.view(word) if isinstance(layered, torch.Tensor) else layered.in_words(word_bytes), blocks.view(word)
    )


def _word_bytes(tensor: torch.Tensor) -> int:
    return max(size for size in _WORDS if _fits(tensor, size))


def as_words(layered: Layered) -> Layered:
    """The same memory as integers, as wide as the elements."""
    _check_alike(layered)
    return _map_layers(layered, lambda tensor: tensor.view(_WORDS[tensor.element_size()]))


def _field_legs(pieces: Sequence[Layered], axis: int, rows: torch.Tensor) -> Iterator[Leg]:
    """The copies of one field, whose bytes in the objects are ``rows``."""
    dtype = pieces[0][0].dtype
    if not _fits(rows, dtype.itemsize):  # a field of wider elements after an odd number of bytes: byte by byte
        pieces = [_map_layers(piece, lambda tensor: tensor.view(torch.uint8)) for piece in pieces]
        dtype = torch.uint8
    lengths = [piece[0].shape[axis] for piece in pieces]
    inner = list(pieces[0][0].shape[1:])
    inner[axis] = sum(lengths)
    blocks = rows.view(dtype).view(len(rows), len(pieces[0]), *inner)
    for piece, block in zip(pieces, torch.split(blocks, lengths, dim=axis), strict=True):
        yield _leg(piece, block)


def _piece_bytes(piece: Layered) -> int:
    return len(piece) * math.prod(piece[0].shape[1:]) * piece[0].element_size()


def _leg(layered: Layered, blocks: torch.Tensor) -> Leg:
    """Check that layers and blocks fit together."""
    if len(layered) == 0:
        raise ValueError("a pool needs at least one layer")
    expected = (len(layered), *layered[0].shape[1:])
    if tuple(blocks.shape[1:]) != expected:
        raise ValueError(f"blocks have shape {tuple(blocks.shape[1:])}, their layers {expected}")
    if not isinstance(layered, torch.Tensor | Layers):
        layered = Layers(layered)
    if layered[0].dtype != blocks.dtype:
        raise ValueError(f"layers are {layered[0].dtype}, blocks {blocks.dtype}")
    return Leg(layered, blocks)


def _check_alike(layered: Layered) -> None:
    first = layered[0]
    for tensor in _tensors(layered):
        if tensor.device != first.device or tensor.dtype != first.dtype:
            raise ValueError(f"layers differ: {tensor.dtype} on {tensor.device}, {first.dtype} on {first.device}")
        if not isinstance(layered, torch.Tensor) and tensor.shape != first.shape:
            raise ValueError(f"layers differ: {tuple(tensor.shape)} and {tuple(first.shape)}")


def _fits(tensor: torch.Tensor, word_bytes: int) -> bool:
    """Whether ``tensor`` can be viewed as integers of ``word_bytes``, whole elements each."""
    element_bytes = tensor.element_size()
    if word_bytes == element_bytes:
        return True
    if word_bytes < element_bytes or tensor.dim() == 0 or tensor.stride(-1) != 1:
        return False
    lengths = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return all(length * element_bytes % word_bytes == 0 for length in lengths)


def _tensors(layered: Layered) -> Sequence[torch.Tensor]:
    return [layered] if isinstance(layered, torch.Tensor) else layered


def _map_layers(layered: Layered, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | Layers:
    return view(layered) if isinstance(layered, torch.Tensor) else Layers([view(tensor) for tensor in layered])
