"""Copies between layer-first pools and page-first blocks in plain torch, on any device: what kernels are compared with.

Shapes, with ``inner`` the shape of one page (or state) in one layer:

    layered   [layers, n_slots, *inner], or one tensor [n_slots, *inner] per layer, of any slot stride     (L1)
    blocks    [n_blocks, layers, *inner], one block contiguous                                              (L2)

Every function checks shapes, dtypes and slot ranges, and raises ValueError or IndexError before the first byte moves.
Bits are moved, not numbers: tensors are viewed as integers, so that NaN payloads survive.

Where all is in host memory, NumPy copies, over the same memory and in the calling thread: one thread reaches the speed
of memory, and torch's own would take cores from the model, and wait for each other where there are none to spare
(measured: 20 times slower beside a busy neighbour). With an accelerator, copies are enqueued on its current stream, and
the caller waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import index
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

Slots: TypeAlias = Sequence[int] | torch.Tensor
Layered: TypeAlias = torch.Tensor | Sequence[torch.Tensor]  # [layers, n_slots, *inner], or [n_slots, *inner] per layer
PagedPool: TypeAlias = Layered | Sequence[Sequence[torch.Tensor]]  # or [n_slots, *inner] per layer and plane


class Joined(NamedTuple):
    """A field of a state that is more than one piece: in an object they are one tensor, side by side along ``axis``."""

    pieces: Sequence[Layered]
    axis: int  # of one state in one layer, counted from the end: -1 is the last


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# Bounds the temporary of an indexed copy in one layer; a larger one falls out of the processor's caches.
_LAYER_STAGING_BYTES = 4 * 1024 * 1024
# Bounds the whole blocks that are assembled beside the layers before they cross to another device.
_DEVICE_STAGING_BYTES = 64 * 1024 * 1024


class _Leg(NamedTuple):
    """One checked copy: layers beside their blocks, both as integers of one size."""

    layered: Layered
    blocks: torch.Tensor  # [n_blocks, layers, *inner]


def gather_pages(pool: PagedPool, pages: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
    """``pages[targets[i], layer] = pool[layer][sources[i]]`` for every i and layer.

    ``pool``: [layers, n_pages, planes, page_tokens, heads, head_dim], or per layer [n_pages, planes, ...], or per layer
    the planes as tensors of their own [n_pages, page_tokens, heads, head_dim]. ``pages``: [n_slots, layers, planes,
    page_tokens, heads, head_dim]. Only the named targets change. A source may be named twice, a target may not.
    """
    legs = list(_page_legs(pool, pages))
    _run_gather(legs, sources, targets)


def scatter_pages(pages: torch.Tensor, pool: PagedPool, *, sources: Slots, targets: Slots) -> None:
    """``pool[layer][targets[i]] = pages[sources[i], layer]``: the way back of ``gather_pages``, with equal rules."""
    legs = list(_page_legs(pool, pages))
    _run_scatter(legs, sources, targets)


def gather_states(fields: Sequence[Layered | Joined], objects: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
    """Write states into objects: the bytes of ``fields`` one after the other, each ``[layers][inner]``.

    ``fields``: the fields that belong into an object, in its order. ``objects``: uint8 [n_slots, object_bytes], rows of
    any stride. Only the named target rows change.
    """
    legs = list(_state_legs(fields, objects))
    _run_gather(legs, sources, targets)


def scatter_states(
    objects: torch.Tensor, fields: Sequence[Layered | Joined], *, sources: Slots, targets: Slots
) -> None:
    """Read states out of objects: the way back of ``gather_states``, with equal rules."""
    legs = list(_state_legs(fields, objects))
    _run_scatter(legs, sources, targets)


def copy_states(fields: Sequence[Layered], *, sources: Slots, targets: Slots) -> None:
    """``field[layer][targets[i]] = field[layer][sources[i]]`` within one pool, for every field.

    A slot may not be source and target at once: the outcome would depend on the order.
    """
    words = [_as_words(field) for field in fields]
    source_slots, target_slots = _slot_list(sources), _slot_list(targets)
    for field in words:
        _check_slots(source_slots, target_slots, source_count=_slot_count(field), target_count=_slot_count(field))
    both = set(source_slots) & set(target_slots)
    if both:
        raise ValueError(f"slot {min(both)} is both source and target")
    with torch.inference_mode():
        for field in words:
            for layers in _slot_views(field):
                for source, target in zip(source_slots, target_slots, strict=True):
                    layers[:, target] = layers[:, source]


def clear_states(fields: Sequence[Layered], *, slots: Slots) -> None:
    """Zero the named slots of every field, in all layers."""
    words = [_as_words(field) for field in fields]
    cleared = _slot_list(slots)
    for field in words:
        _check_range(cleared, _slot_count(field), "slot")
    with torch.inference_mode():
        for field in words:
            for layers in _slot_views(field):
                for slot in cleared:
                    layers[:, slot] = 0


def _run_gather(legs: Sequence[_Leg], sources: Slots, targets: Slots) -> None:
    source_slots, target_slots = _slot_list(sources), _slot_list(targets)
    for leg in legs:
        counts = {"source_count": _slot_count(leg.layered), "target_count": len(leg.blocks)}
        _check_slots(source_slots, target_slots, **counts)
    with torch.inference_mode():
        for leg in legs:
            _gather(leg, source_slots, target_slots)


def _run_scatter(legs: Sequence[_Leg], sources: Slots, targets: Slots) -> None:
    source_slots, target_slots = _slot_list(sources), _slot_list(targets)
    for leg in legs:
        counts = {"source_count": len(leg.blocks), "target_count": _slot_count(leg.layered)}
        _check_slots(source_slots, target_slots, **counts)
    with torch.inference_mode():
        for leg in legs:
            _scatter(leg, source_slots, target_slots)


def _gather(leg: _Leg, sources: list[int], targets: list[int]) -> None:
    if _is_on_host(leg):
        _gather_on_host(leg, sources, targets)
    elif _crosses_devices(leg):
        _gather_across(leg, sources, targets)
    else:
        _gather_by_layer(leg, torch.tensor(sources), torch.tensor(targets))


def _scatter(leg: _Leg, sources: list[int], targets: list[int]) -> None:
    if _is_on_host(leg):
        _scatter_on_host(leg, sources, targets)
    elif _crosses_devices(leg):
        _scatter_across(leg, sources, targets)
    else:
        _scatter_by_layer(leg, torch.tensor(sources), torch.tensor(targets))


def _gather_on_host(leg: _Leg, sources: list[int], targets: list[int]) -> None:
    blocks = leg.blocks.numpy()
    if isinstance(leg.layered, torch.Tensor):
        layered = leg.layered.numpy()
        for source, target in zip(sources, targets, strict=True):
            blocks[target] = layered[:, source]
        return
    for chunk in _chunks(len(sources), item_bytes=_layer_bytes(leg), bytes_max=_LAYER_STAGING_BYTES):
        source_index, target_index = np.array(sources[chunk]), np.array(targets[chunk])
        for layer, tensor in enumerate(leg.layered):
            blocks[target_index, layer] = tensor.numpy()[source_index]


def _scatter_on_host(leg: _Leg, sources: list[int], targets: list[int]) -> None:
    blocks = leg.blocks.numpy()
    if isinstance(leg.layered, torch.Tensor):
        layered = leg.layered.numpy()
        for source, target in zip(sources, targets, strict=True):
            layered[:, target] = blocks[source]
        return
    for chunk in _chunks(len(sources), item_bytes=_layer_bytes(leg), bytes_max=_LAYER_STAGING_BYTES):
        source_index, target_index = np.array(sources[chunk]), np.array(targets[chunk])
        for layer, tensor in enumerate(leg.layered):
            tensor.numpy()[target_index] = blocks[source_index, layer]


def _gather_across(leg: _Leg, sources: list[int], targets: list[int]) -> None:
    """Whole blocks cross over, each in one copy: assembled first where the layers are, unless they are one tensor."""
    layered, blocks = leg
    if isinstance(layered, torch.Tensor):
        for source, target in zip(sources, targets, strict=True):
            blocks[target].copy_(layered[:, source], non_blocking=True)
        return
    for chunk in _chunks(len(sources), item_bytes=_block_bytes(leg), bytes_max=_DEVICE_STAGING_BYTES):
        staging = _staging(leg, len(sources[chunk]))
        _gather_by_layer(_Leg(layered, staging), torch.tensor(sources[chunk]), torch.arange(len(staging)))
        for block, target in zip(staging, targets[chunk], strict=True):
            blocks[target].copy_(block, non_blocking=True)


def _scatter_across(leg: _Leg, sources: list[int], targets: list[int]) -> None:
    layered, blocks = leg
    if isinstance(layered, torch.Tensor):
        for source, target in zip(sources, targets, strict=True):
            layered[:, target].copy_(blocks[source], non_blocking=True)
        return
    for chunk in _chunks(len(sources), item_bytes=_block_bytes(leg), bytes_max=_DEVICE_STAGING_BYTES):
        staging = _staging(leg, len(sources[chunk]))
        for block, source in zip(staging, sources[chunk], strict=True):
            block.copy_(blocks[source], non_blocking=True)
        _scatter_by_layer(_Leg(layered, staging), torch.arange(len(staging)), torch.tensor(targets[chunk]))


def _gather_by_layer(leg: _Leg, sources: torch.Tensor, targets: torch.Tensor) -> None:
    source_index, target_index = sources.to(leg.blocks.device), targets.to(leg.blocks.device)
    for layer, tensor in enumerate(leg.layered):
        leg.blocks[:, layer].index_copy_(0, target_index, tensor.index_select(0, source_index))


def _scatter_by_layer(leg: _Leg, sources: torch.Tensor, targets: torch.Tensor) -> None:
    source_index, target_index = sources.to(leg.blocks.device), targets.to(leg.blocks.device)
    for layer, tensor in enumerate(leg.layered):
        tensor.index_copy_(0, target_index, leg.blocks[:, layer].index_select(0, source_index))


def _chunks(count: int, *, item_bytes: int, bytes_max: int) -> Iterator[slice]:
    """Ranges of ``count`` items that take up to ``bytes_max`` together, or one item where that is larger."""
    step = max(1, bytes_max // item_bytes)
    return (slice(start, start + step) for start in range(0, count, step))


def _block_bytes(leg: _Leg) -> int:
    return math.prod(leg.blocks.shape[1:]) * leg.blocks.element_size()


def _layer_bytes(leg: _Leg) -> int:
    return math.prod(leg.blocks.shape[2:]) * leg.blocks.element_size()


def _is_on_host(leg: _Leg) -> bool:
    return _device(leg.layered).type == leg.blocks.device.type == "cpu"


def _crosses_devices(leg: _Leg) -> bool:
    return _device(leg.layered) != leg.blocks.device


def _staging(leg: _Leg, count: int) -> torch.Tensor:
    """A contiguous [count, layers, *inner] tensor beside the layers, of the current stream."""
    shape = (count, *leg.blocks.shape[1:])
    return torch.empty(shape, dtype=leg.blocks.dtype, device=_device(leg.layered))


def _page_legs(pool: PagedPool, pages: torch.Tensor) -> Iterator[_Leg]:
    """The copies that make up one of pages: one, or one per plane where the planes are tensors of their own."""
    layers = list(pool)
    if isinstance(layers[0], torch.Tensor):
        yield _leg(pool, pages)  # type: ignore[arg-type]  # a first layer that is a tensor makes it Layered
        return
    plane_count = pages.shape[2] if pages.dim() > 2 else 0
    if any(len(planes) != plane_count for planes in layers):
        raise ValueError(f"every layer needs {plane_count} planes, as the pages of shape {tuple(pages.shape)} have")
    for plane in range(plane_count):
        yield _leg([planes[plane] for planes in layers], pages[:, :, plane])


def _state_legs(fields: Sequence[Layered | Joined], objects: torch.Tensor) -> Iterator[_Leg]:
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


def _field_legs(pieces: Sequence[Layered], axis: int, rows: torch.Tensor) -> Iterator[_Leg]:
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


def _leg(layered: Layered, blocks: torch.Tensor) -> _Leg:
    """Check that layers and blocks fit together, and view both in the widest words that both can be viewed in."""
    if len(layered) == 0:
        raise ValueError("a pool needs at least one layer")
    expected = (len(layered), *layered[0].shape[1:])
    if tuple(blocks.shape[1:]) != expected:
        raise ValueError(f"blocks have shape {tuple(blocks.shape[1:])}, their layers {expected}")
    for tensor in _tensors(layered):
        if tensor.dtype != blocks.dtype:
            raise ValueError(f"layers are {tensor.dtype}, blocks {blocks.dtype}")
    _check_alike(layered)
    word_bytes = max(size for size in _WORDS if all(_fits(tensor, size) for tensor in (*_tensors(layered), blocks)))
    word = _WORDS[word_bytes]
    return _Leg(_map_layers(layered, lambda tensor: tensor.view(word)), blocks.view(word))


def _as_words(layered: Layered) -> Layered:
    """The same memory as integers, as wide as the elements."""
    _check_alike(layered)
    return _map_layers(layered, lambda tensor: tensor.view(_WORDS[tensor.element_size()]))


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


def _slot_views(layered: Layered) -> Iterator[Any]:  # tensors, or NumPy arrays over them: either takes an assignment
    """What covers all layers as [layers, n_slots, *inner]: one, or one per layer."""
    views = [layered] if isinstance(layered, torch.Tensor) else [tensor.unsqueeze(0) for tensor in layered]
    return (view.numpy() if view.device.type == "cpu" else view for view in views)


def _map_layers(layered: Layered, view: Callable[[torch.Tensor], torch.Tensor]) -> Layered:
    return view(layered) if isinstance(layered, torch.Tensor) else [view(tensor) for tensor in layered]


def _device(layered: Layered) -> torch.device:
    return layered[0].device


def _slot_count(layered: Layered) -> int:
    return layered[0].shape[0]


def _slot_list(slots: Slots) -> list[int]:
    if isinstance(slots, torch.Tensor):
        if slots.dim() != 1 or slots.is_floating_point() or slots.dtype == torch.bool:
            raise ValueError(f"slots must be a vector of integers, not {slots.dtype} of shape {tuple(slots.shape)}")
        return [int(slot) for slot in slots.tolist()]
    return [index(slot) for slot in slots]


def _check_slots(sources: list[int], targets: list[int], *, source_count: int, target_count: int) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
    if len(set(targets)) != len(targets):
        raise ValueError("a target slot is named twice")
    _check_range(sources, source_count, "source slot")
    _check_range(targets, target_count, "target slot")


def _check_range(slots: list[int], count: int, what: str) -> None:
    for slot in slots:
        if not 0 <= slot < count:
            raise IndexError(f"{what} {slot} is outside of [0, {count})")
