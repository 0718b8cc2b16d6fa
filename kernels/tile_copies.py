"""Copies between slots of a pool and blocks, and within a pool, by one kernel that walks a table of tiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from operator import index

import numpy as np
import torch
import triton
import triton.language as tl

from hicache.kernels.legs import Slots
from hicache.kernels.tiles import TILE_FIELDS, TileTable

# Copies over the bus wait for it: more programs than fill it would only take multiprocessors from the model.
BUS_PROGRAMS_MAX = 16
# Copies within device memory are bound by it: two programs for each multiprocessor of the largest device there is.
DEVICE_PROGRAMS_MAX = 320
# Warps: see TILE_BYTES. A product that is fused with a sum is not rounded, and so not the reference's.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def gather_tiles(table: TileTable, blocks: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
    """``blocks[targets[i]] = slot sources[i]`` for every i, in all tiles. A target may not be named twice.

    ``blocks`` [n_blocks, ...]: on the device of the pool, or in host memory that is pinned for it. Enqueued on the
    current stream. Raises IndexError, TypeError and ValueError before the first byte moves.
    """
    pairs = checked_slots(sources, targets, source_count=table.slot_count, target_count=len(blocks))
    _launch(table, pairs, blocks, reads_block=False, writes_block=True)


def scatter_tiles(
    table: TileTable, blocks: torch.Tensor, *, sources: Slots, targets: Slots, layers: slice | None = None
) -> None:
    """``slot targets[i] = blocks[sources[i]]``, of ``layers`` or of all: the way back, with equal rules."""
    pairs = checked_slots(sources, targets, source_count=len(blocks), target_count=table.slot_count)
    _launch(table, pairs, blocks, reads_block=True, writes_block=False, layers=layers)


def copy_tiles(table: TileTable, *, sources: Slots, targets: Slots) -> None:
    """``slot targets[i] = slot sources[i]``. A slot may not be source and target at once."""
    pairs = checked_slots(sources, targets, source_count=table.slot_count, target_count=table.slot_count)
    both = np.intersect1d(pairs[0], pairs[1])
    if len(both):
        raise ValueError(f"slot {both[0]} is both source and target")
    _launch(table, pairs, None, reads_block=False, writes_block=False)


def clear_tiles(table: TileTable, *, slots: Slots, layers: slice | None = None) -> None:
    """Zero the named slots, in ``layers`` or in all."""
    cleared = np.unique(_slot_array(slots))
    _check_range(cleared, table.slot_count, "slot")
    _launch(
        table, np.stack([cleared, cleared]), None, reads_block=False, writes_block=False, layers=layers, is_clear=True
    )


def checked_slots(sources: Slots, targets: Slots, *, source_count: int, target_count: int) -> np.ndarray:
    """int64 [2, n_pairs]. Raises TypeError, ValueError or IndexError for what is not a copy from slots to slots."""
    source_slots, target_slots = _slot_array(sources), _slot_array(targets)
    if len(source_slots) != len(target_slots):
        raise ValueError(f"{len(source_slots)} sources and {len(target_slots)} targets")
    if len(np.unique(target_slots)) != len(target_slots):
        raise ValueError("a target slot is named twice")
    _check_range(source_slots, source_count, "source slot")
    _check_range(target_slots, target_count, "target slot")
    return np.stack([source_slots, target_slots])


def slots_on(table: TileTable, pairs: np.ndarray) -> torch.Tensor:
    """The slots beside the table, in the order of the current stream."""
    slots = torch.from_numpy(pairs)
    if table.device.type == "cpu":
        return slots
    return slots.pin_memory().to(table.device, non_blocking=True)


def block_place(table: TileTable, blocks: torch.Tensor, *, word_bytes: int) -> tuple[int, int]:
    """Address of the first block, and words from one to the next. Raises ValueError where kernels cannot go there."""
    if not blocks.is_cuda and table.device.type == "cuda" and not blocks.is_pinned():
        raise ValueError(f"blocks in host memory must be pinned for {table.device}: register the memory with CUDA")
    if blocks.is_cuda and blocks.device != table.device:
        raise ValueError(f"blocks are on {blocks.device}, their layers on {table.device}")
    stride_bytes = blocks.stride(0) * blocks.element_size()
    alignment_bytes = table.alignment * word_bytes
    for what, length in (("address", blocks.data_ptr()), ("stride", stride_bytes)):
        if length % alignment_bytes:
            raise ValueError(f"blocks have the {what} {length}: no multiple of {alignment_bytes} bytes, as they had")
    return blocks.data_ptr(), stride_bytes // word_bytes


def on_device_of(table: TileTable) -> AbstractContextManager[object]:
    """Kernels run on the current device: that of the pool. Raises ValueError where there is nothing to run them on."""
    if table.device.type == "cuda":
        return torch.cuda.device(table.device)
    if isinstance(_copy_tiles_kernel, triton.JITFunction):
        raise ValueError(f"kernels run on CUDA, not on {table.device}: set TRITON_INTERPRET=1 to interpret them there")
    return nullcontext()


def _slot_array(slots: Slots) -> np.ndarray:
    if not isinstance(slots, torch.Tensor):
        return np.fromiter((index(slot) for slot in slots), dtype=np.int64)
    if slots.dim() != 1 or slots.is_floating_point() or slots.dtype == torch.bool:
        raise ValueError(f"slots must be a vector of integers, not {slots.dtype} of shape {tuple(slots.shape)}")
    return slots.to("cpu", torch.int64).numpy()


def _check_range(slots: np.ndarray, count: int, what: str) -> None:
    outside = slots[(slots < 0) | (slots >= count)]
    if len(outside):
        raise IndexError(f"{what} {outside[0]} is outside of [0, {count})")


def _launch(
    table: TileTable,
    pairs: np.ndarray,  # int64 [2, n_pairs]: sources, targets
    blocks: torch.Tensor | None,
    *,
    reads_block: bool,
    writes_block: bool,
    layers: slice | None = None,
    is_clear: bool = False,
) -> None:
    tiles = table.tiles_of(layers)
    if pairs.size == 0 or len(tiles) == 0:
        return
    address, stride = (0, 0) if blocks is None else block_place(table, blocks, word_bytes=table.word_bytes)
    items = pairs.shape[1] * len(tiles)
    programs_max = DEVICE_PROGRAMS_MAX if blocks is None or blocks.is_cuda else BUS_PROGRAMS_MAX
    with on_device_of(table):
        slots = slots_on(table, pairs)
        _copy_tiles_kernel[(min(items, programs_max),)](
            tiles,
            slots,
            pairs.shape[1],
            len(tiles),
            address,
            stride,
            WORD=_WORDS[table.word_bytes],
            ALIGNMENT=table.alignment,
            TILE_ROWS=table.tile_rows,
            TILE_RUN=table.tile_run,
            TILE_FIELDS=TILE_FIELDS,
            READS_BLOCK=reads_block,
            WRITES_BLOCK=writes_block,
            IS_CLEAR=is_clear,
            **OPTIONS,
        )


def _copy_tiles(  # type: ignore[no-untyped-def]  # Triton reads the annotations of constants, and types the rest itself
    tiles,
    slots,
    pair_count,
    tile_count,
    block_address,
    block_stride,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RUN: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    READS_BLOCK: tl.constexpr,
    WRITES_BLOCK: tl.constexpr,
    IS_CLEAR: tl.constexpr,
):
    """Item ``pair * tile_count + tile`` is one tile of one pair: neighbours in a block follow each other.

    Addresses are bytes, all else is in words. Both sides are one pointer and [TILE_ROWS, TILE_RUN] offsets.
    """
    pair_count = pair_count.to(tl.int64)
    tile_count = tile_count.to(tl.int64)
    row = tl.arange(0, TILE_ROWS).to(tl.int64)[:, None]
    word = tl.arange(0, TILE_RUN).to(tl.int64)[None, :]
    item = tl.program_id(0).to(tl.int64)
    while item < pair_count * tile_count:  # a range would do, but not in the interpreter of Triton 3.6
        pair = item // tile_count
        source_slot = tl.load(slots + pair)
        target_slot = tl.load(slots + pair_count + pair)
        tile = tiles + (item % tile_count) * TILE_FIELDS
        address = tl.load(tile)
        slot_stride = tl.load(tile + 1)
        block_offset = tl.load(tile + 2)
        inside = (row < tl.load(tile + 3)) & (word < tl.multiple_of(tl.load(tile + 4), ALIGNMENT))
        in_slot = row * tl.multiple_of(tl.load(tile + 5), ALIGNMENT) + word
        in_block = row * tl.multiple_of(tl.load(tile + 6), ALIGNMENT) + word
        WORD_BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
        if READS_BLOCK:
            source = block_address + (source_slot * block_stride + block_offset) * WORD_BYTES
            read_at = in_block
        else:
            source = address + source_slot * slot_stride * WORD_BYTES
            read_at = in_slot
        if WRITES_BLOCK:
            target = block_address + (target_slot * block_stride + block_offset) * WORD_BYTES
            write_at = in_block
        else:
            target = address + target_slot * slot_stride * WORD_BYTES
            write_at = in_slot
        target_words = tl.multiple_of(target.to(tl.pointer_type(WORD)), ALIGNMENT * WORD_BYTES)
        if IS_CLEAR:
            words = tl.zeros([TILE_ROWS, TILE_RUN], WORD)
        else:
            source_words = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGNMENT * WORD_BYTES)
            words = tl.load(source_words + read_at, mask=inside)
        tl.store(target_words + write_at, words, mask=inside)
        item += tl.num_programs(0)


# Counts and addresses differ from call to call: specialising on them would compile the kernel again.
_copy_tiles_kernel = triton.jit(
    _copy_tiles, do_not_specialize=["pair_count", "tile_count", "block_address", "block_stride"]
)
