"""Copies between layer-first pools and page-first blocks in plain torch, on any device: what kernels are compared with.

Shapes are those of `hicache.kernels.legs`.

Every function checks shapes, dtypes and slot ranges, and raises ValueError or IndexError before the first byte moves.
Bits are moved, not numbers: tensors are viewed as integers, so that NaN payloads survive.

Where all is in host memory, NumPy copies, over the same memory and in the calling thread: one thread reaches the speed
of memory, and torch's own would take cores from the model, and wait for each other where there are none to spare
(measured: 20 times slower beside a busy neighbour). With an accelerator, copies are enqueued on its current stream, and
the caller waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hicache.kernels.legs import (
    Joined,
    Layered,
    Leg,
    PagedPool,
    Slots,
    as_words,
    block_bytes,
    check_range,
    check_slots,
    checked_slots,
    in_widest_words,
    layer_bytes,
    page_legs,
    slot_count,
    slot_list,
    state_legs,
)

# Bounds the temporary of an indexed copy in one layer; a larger one falls out of the processor's caches.
_LAYER_STAGING_BYTES = 4 * 1024 * 1024
# Bounds the whole blocks that are assembled beside the layers before they cross to another device.
_DEVICE_STAGING_BYTES = 64 * 1024 * 1024


def gather_pages(pool: PagedPool, pages: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
    """``pages[targets[i], layer] = pool[layer][sources[i]]`` for every i and layer.

    ``pool``: [layers, n_pages, planes, page_tokens, heads, head_dim], or per layer [n_pages, planes, ...], or per layer
    the planes as tensors of their own [n_pages, page_tokens, heads, head_dim]. ``pages``: [n_slots, layers, planes,
    page_tokens, heads, head_dim]. Only the named targets change. A source may be named twice, a target may not.
    """
    legs = list(page_legs(pool, pages))
    _run_gather(legs, sources, targets)


def scatter_pages(pages: torch.Tensor, pool: PagedPool, *, sources: Slots, targets: Slots) -> None:
    """``pool[layer][targets[i]] = pages[sources[i], layer]``: the way back of ``gather_pages``, with equal rules."""
    legs = list(page_legs(pool, pages))
    _run_scatter(legs, sources, targets)


def gather_states(fields: Sequence[Layered | Joined], objects: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
    """Write states into objects: the bytes of ``fields`` one after the other, each ``[layers][inner]``.

    ``fields``: the fields that belong into an object, in its order. ``objects``: uint8 [n_slots, object_bytes], rows of
    any stride. Only the named target rows change.
    """
    legs = list(state_legs(fields, objects))
    _run_gather(legs, sources, targets)


def scatter_states(
    objects: torch.Tensor, fields: Sequence[Layered | Joined], *, sources: Slots, targets: Slots
) -> None:
    """Read states out of objects: the way back of ``gather_states``, with equal rules."""
    legs = list(state_legs(fields, objects))
    _run_scatter(legs, sources, targets)


def copy_states(fields: Sequence[Layered], *, sources: Slots, targets: Slots) -> None:
    """``field[layer][targets[i]] = field[layer][sources[i]]`` within one pool, for every field.

    A slot may not be source and target at once: the outcome would depend on the order.
    """
    words = [as_words(field) for field in fields]
    source_slots, target_slots = slot_list(sources), slot_list(targets)
    for field in words:
        check_slots(source_slots, target_slots, source_count=slot_count(field), target_count=slot_count(field))
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
    words = [as_words(field) for field in fields]
    cleared = slot_list(slots)
    for field in words:
        check_range(cleared, slot_count(field), "slot")
    with torch.inference_mode():
        for field in words:
            for layers in _slot_views(field):
                for slot in cleared:
                    layers[:, slot] = 0


def _run_gather(legs: Sequence[Leg], sources: Slots, targets: Slots) -> None:
    slots = checked_slots(legs, sources, targets, to_blocks=True)
    with torch.inference_mode():
        for leg in legs:
            _gather(in_widest_words(leg), *slots)


def _run_scatter(legs: Sequence[Leg], sources: Slots, targets: Slots) -> None:
    slots = checked_slots(legs, sources, targets, to_blocks=False)
    with torch.inference_mode():
        for leg in legs:
            _scatter(in_widest_words(leg), *slots)


def _gather(leg: Leg, sources: list[int], targets: list[int]) -> None:
    if _is_on_host(leg):
        _gather_on_host(leg, sources, targets)
    elif _crosses_devices(leg):
        _gather_across(leg, sources, targets)
    else:
        _gather_by_layer(leg, torch.tensor(sources), torch.tensor(targets))


def _scatter(leg: Leg, sources: list[int], targets: list[int]) -> None:
    if _is_on_host(leg):
        _scatter_on_host(leg, sources, targets)
    elif _crosses_devices(leg):
        _scatter_across(leg, sources, targets)
    else:
        _scatter_by_layer(leg, torch.tensor(sources), torch.tensor(targets))


def _gather_on_host(leg: Leg, sources: list[int], targets: list[int]) -> None:
    blocks = leg.blocks.numpy()
    if isinstance(leg.layered, torch.Tensor):
        layered = leg.layered.numpy()
        for source, target in zip(sources, targets, strict=True):
            blocks[target] = layered[:, source]
        return
    for chunk in _chunks(len(sources), item_bytes=layer_bytes(leg), bytes_max=_LAYER_STAGING_BYTES):
        source_index, target_index = _index(sources[chunk]), _index(targets[chunk])
        for layer, tensor in enumerate(leg.layered):
            blocks[target_index, layer] = tensor.numpy()[source_index]


def _scatter_on_host(leg: Leg, sources: list[int], targets: list[int]) -> None:
    blocks = leg.blocks.numpy()
    if isinstance(leg.layered, torch.Tensor):
        layered = leg.layered.numpy()
        for source, target in zip(sources, targets, strict=True):
            layered[:, target] = blocks[source]
        return
    for chunk in _chunks(len(sources), item_bytes=layer_bytes(leg), bytes_max=_LAYER_STAGING_BYTES):
        source_index, target_index = _index(sources[chunk]), _index(targets[chunk])
        for layer, tensor in enumerate(leg.layered):
            tensor.numpy()[target_index] = blocks[source_index, layer]


def _index(slots: list[int]) -> Any:  # what NumPy takes: an array makes it copy twice, through a temporary
    return slots[0] if len(slots) == 1 else np.array(slots)


def _gather_across(leg: Leg, sources: list[int], targets: list[int]) -> None:
    """Whole blocks cross over, each in one copy: assembled first where the layers are, unless they are one tensor."""
    layered, blocks = leg
    if isinstance(layered, torch.Tensor):
        for source, target in zip(sources, targets, strict=True):
            blocks[target].copy_(layered[:, source], non_blocking=True)
        return
    for chunk in _chunks(len(sources), item_bytes=block_bytes(leg), bytes_max=_DEVICE_STAGING_BYTES):
        staging = _staging(leg, len(sources[chunk]))
        _gather_by_layer(Leg(layered, staging), torch.tensor(sources[chunk]), torch.arange(len(staging)))
        for block, target in zip(staging, targets[chunk], strict=True):
            blocks[target].copy_(block, non_blocking=True)


def _scatter_across(leg: Leg, sources: list[int], targets: list[int]) -> None:
    layered, blocks = leg
    if isinstance(layered, torch.Tensor):
        for source, target in zip(sources, targets, strict=True):
            layered[:, target].copy_(blocks[source], non_blocking=True)
        return
    for chunk in _chunks(len(sources), item_bytes=block_bytes(leg), bytes_max=_DEVICE_STAGING_BYTES):
        staging = _staging(leg, len(sources[chunk]))
        for block, source in zip(staging, sources[chunk], strict=True):
            block.copy_(blocks[source], non_blocking=True)
        _scatter_by_layer(Leg(layered, staging), torch.arange(len(staging)), torch.tensor(targets[chunk]))


def _gather_by_layer(leg: Leg, sources: torch.Tensor, targets: torch.Tensor) -> None:
    source_index, target_index = sources.to(leg.blocks.device), targets.to(leg.blocks.device)
    for layer, tensor in enumerate(leg.layered):
        leg.blocks[:, layer].index_copy_(0, target_index, tensor.index_select(0, source_index))


def _scatter_by_layer(leg: Leg, sources: torch.Tensor, targets: torch.Tensor) -> None:
    source_index, target_index = sources.to(leg.blocks.device), targets.to(leg.blocks.device)
    for layer, tensor in enumerate(leg.layered):
        tensor.index_copy_(0, target_index, leg.blocks[:, layer].index_select(0, source_index))


def _chunks(count: int, *, item_bytes: int, bytes_max: int) -> Iterator[slice]:
    """Ranges of ``count`` items that take up to ``bytes_max`` together, or one item where that is larger."""
    step = max(1, bytes_max // item_bytes)
    return (slice(start, start + step) for start in range(0, count, step))


def _is_on_host(leg: Leg) -> bool:
    return _device(leg.layered).type == leg.blocks.device.type == "cpu"


def _crosses_devices(leg: Leg) -> bool:
    return _device(leg.layered) != leg.blocks.device


def _staging(leg: Leg, count: int) -> torch.Tensor:
    """A contiguous [count, layers, *inner] tensor beside the layers, of the current stream."""
    shape = (count, *leg.blocks.shape[1:])
    return torch.empty(shape, dtype=leg.blocks.dtype, device=_device(leg.layered))


def _slot_views(layered: Layered) -> Iterator[Any]:  # tensors, or NumPy arrays over them: either takes an assignment
    """What covers all layers as [layers, n_slots, *inner]: one, or one per layer."""
    views = [layered] if isinstance(layered, torch.Tensor) else [tensor.unsqueeze(0) for tensor in layered]
    return (view.numpy() if view.device.type == "cpu" else view for view in views)


def _device(layered: Layered) -> torch.device:
    return layered[0].device
