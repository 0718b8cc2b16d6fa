"""Copies run by run: a run is what is contiguous on both sides, and neighbours that are so together are one.

The same functions as in `hicache.kernels.reference`, with equal rules. In host memory a run is a memmove in the
calling thread, which lets others run meanwhile. To and from a CUDA device it is a cudaMemcpyAsync on the current
stream, within one slot: memory is pinned in regions that end between slots, and no copy may be in two. Both sides have
to stay until the caller has waited for the stream.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from hicache.kernels.legs import (
    Integers,
    Joined,
    Layered,
    Layers,
    Leg,
    PagedPool,
    Slots,
    checked_slots,
    page_legs,
    state_legs,
)


class Runs(NamedTuple):
    """``sizes[i]`` bytes from the address ``sources[i]`` to ``targets[i]``."""

    sources: Integers
    targets: Integers
    sizes: Integers


def gather_pages(pool: PagedPool, pages: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
    """See hicache.kernels.reference."""
    _gather(list(page_legs(pool, pages)), sources, targets)


def scatter_pages(pages: torch.Tensor, pool: PagedPool, *, sources: Slots, targets: Slots) -> None:
    """See hicache.kernels.reference."""
    _scatter(list(page_legs(pool, pages)), sources, targets)


def gather_states(fields: Sequence[Layered | Joined], objects: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
    """See hicache.kernels.reference."""
    _gather(list(state_legs(fields, objects)), sources, targets)


def scatter_states(
    objects: torch.Tensor, fields: Sequence[Layered | Joined], *, sources: Slots, targets: Slots
) -> None:
    """See hicache.kernels.reference."""
    _scatter(list(state_legs(fields, objects)), sources, targets)


def gather_runs(leg: Leg, sources: Sequence[int], targets: Sequence[int]) -> Runs:
    """From layers to blocks. The slots have been checked, and no target is named twice."""
    source_slots, target_slots = _by_target(sources, targets)
    run_bytes, layered, blocks = _addresses(leg, source_slots, target_slots)
    return _merged(layered, blocks, run_bytes, within_slots=not _is_on_host(leg))


def scatter_runs(leg: Leg, sources: Sequence[int], targets: Sequence[int]) -> Runs:
    """From blocks to layers, as ``gather_runs``."""
    source_slots, target_slots = _by_target(sources, targets)
    run_bytes, layered, blocks = _addresses(leg, target_slots, source_slots)
    return _merged(blocks, layered, run_bytes, within_slots=not _is_on_host(leg))


def mean_run_bytes(legs: Sequence[Leg]) -> int:
    """How long the runs of one slot are before any is merged: its bytes in all legs, by its runs."""
    size_bytes = run_count = 0
    for leg in legs:
        run_bytes, runs, _ = _addresses(leg, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
        size_bytes += run_bytes * runs.size
        run_count += runs.size
    return size_bytes // run_count


def _gather(legs: Sequence[Leg], sources: Slots, targets: Slots) -> None:
    slots = checked_slots(legs, sources, targets, to_blocks=True)
    for leg in legs:
        _mover(leg)(gather_runs(leg, *slots))


def _scatter(legs: Sequence[Leg], sources: Slots, targets: Slots) -> None:
    slots = checked_slots(legs, sources, targets, to_blocks=False)
    for leg in legs:
        _mover(leg)(scatter_runs(leg, *slots))


def _by_target(sources: Sequence[int], targets: Sequence[int]) -> tuple[Integers, Integers]:
    order = np.argsort(targets)
    return np.asarray(sources, dtype=np.int64)[order], np.asarray(targets, dtype=np.int64)[order]


def _addresses(leg: Leg, layered_slots: Integers, block_slots: Integers) -> tuple[int, Integers, Integers]:
    """Bytes of one run before any is merged, and where each begins: [slots, layers, runs of one in the other]."""
    item_bytes = leg.blocks.element_size()
    layers, slot_strides, layer_strides = _layers(leg.layered)
    _, in_block, *block_strides = leg.blocks.stride()
    run_items, offsets = _inner_runs(leg.blocks.shape[2:], [*layer_strides, tuple(block_strides)])
    layered = layers + layered_slots[:, None] * (slot_strides * item_bytes)
    blocks = block_slots[:, None] * leg.blocks.stride(0) + np.arange(len(layers)) * in_block
    return (
        run_items * item_bytes,
        layered[:, :, None] + offsets[:-1] * item_bytes,
        leg.blocks.data_ptr() + (blocks[:, :, None] + offsets[-1]) * item_bytes,
    )


def _layers(layered: torch.Tensor | Layers) -> tuple[Integers, Integers, list[tuple[int, ...]]]:
    """Of each layer its address, slot stride and inner strides in items; one for all, where they are one tensor."""
    if isinstance(layered, torch.Tensor):
        step, slot_stride, *inner = layered.stride()
        layers = layered.data_ptr() + np.arange(len(layered)) * (step * layered.element_size())
        return layers, np.array([slot_stride]), [tuple(inner)]
    addresses, strides = layered.places
    return addresses, np.array([of[0] for of in strides]), [of[1:] for of in strides]


def _inner_runs(shape: Sequence[int], strides: Sequence[tuple[int, ...]]) -> tuple[int, Integers]:
    """Items of one run, which is contiguous under all ``strides``, and where runs begin, in items: [strides, runs]."""
    axis, run_items = len(shape), 1
    while axis and all(shape[axis - 1] == 1 or of[axis - 1] == run_items for of in strides):
        axis -= 1
        run_items *= shape[axis]
    offsets = np.zeros((len(strides), 1), dtype=np.int64)
    for outer in range(axis):
        steps = np.array([of[outer] for of in strides])[:, None] * np.arange(shape[outer])
        offsets = (offsets[:, :, None] + steps[:, None, :]).reshape(len(strides), -1)
    return run_items, offsets


def _merged(sources: Integers, targets: Integers, run_bytes: int, *, within_slots: bool) -> Runs:
    """Runs of ``run_bytes``, slot by slot, those joined that follow each other on both sides. Where none do, layer by
    layer, in which they are nearer to each other.
    """
    begins = np.ones(sources.size, dtype=bool)
    begins[1:] = (np.diff(sources.reshape(-1)) != run_bytes) | (np.diff(targets.reshape(-1)) != run_bytes)
    if within_slots:
        begins.reshape(sources.shape)[:, :1, :1] = True
    if begins.all():
        by_layer = sources.transpose(1, 0, 2).reshape(-1), targets.transpose(1, 0, 2).reshape(-1)
        return Runs(*by_layer, np.full(sources.size, run_bytes))
    first = np.flatnonzero(begins)
    return Runs(sources.flat[first], targets.flat[first], np.diff(first, append=sources.size) * run_bytes)


def _is_on_host(leg: Leg) -> bool:
    return leg.layered[0].device.type == leg.blocks.device.type == "cpu"


def _mover(leg: Leg) -> Callable[[Runs], None]:
    if _is_on_host(leg):
        return _move_in_host_memory
    devices = leg.layered[0].device, leg.blocks.device
    if sorted(device.type for device in devices) != ["cpu", "cuda"]:
        raise ValueError(f"direct copies go between host memory and a CUDA device, not between {devices}")
    return functools.partial(_enqueue, device=max(devices, key=lambda device: device.type))


_memory_move = ctypes.CDLL(None).memmove
_memory_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memory_move.restype = None


def _move_in_host_memory(runs: Runs) -> None:
    deque(map(_memory_move, *_columns(runs)), maxlen=0)  # the loop is map's own: no bytecode between two runs


_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the driver tells from the addresses which way it goes


def _enqueue(runs: Runs, *, device: torch.device) -> None:
    """On the current stream of ``device``. Raises RuntimeError with the answer of CUDA to the first copy it refused."""
    stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device):
        answers = map(_memcpy_async(), *_columns(runs), repeat(_MEMCPY_DEFAULT), repeat(stream))
        refused = next(filter(None, answers), None)
    if refused is not None:
        raise RuntimeError(f"cudaMemcpyAsync answered {refused}")


@functools.cache
def _memcpy_async() -> Callable[..., int]:
    """Of the CUDA runtime that torch has loaded, under the name of its major version. Raises OSError."""
    major = str(torch.version.cuda).partition(".")[0]
    call = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyAsync
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    call.restype = ctypes.c_int
    return call


def _columns(runs: Runs) -> tuple[list[int], list[int], list[int]]:
    """As memmove and cudaMemcpyAsync take them: targets, sources, sizes."""
    return runs.targets.tolist(), runs.sources.tolist(), runs.sizes.tolist()
