"""Pages stored as float8_e4m3fn, by kernels; in plain torch, with what is promised: ``quantised_reference``.

Numbers are converted by integer arithmetic: the same bits on every GPU, also on those that have no float8, and in the
interpreter.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from hicache.kernels.legs import PagedPool, Slots
from hicache.kernels.pages import page_pieces
from hicache.kernels.quantised_reference import SCALE_EXPONENT_MIN
from hicache.kernels.tile_copies import BUS_PROGRAMS_MAX, OPTIONS, block_place, checked_slots, on_device_of, slots_on
from hicache.kernels.tiles import TILE_FIELDS, TileTable, cut_elements

_ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def quantised_table(pool: PagedPool, pages: torch.Tensor) -> TileTable:
    """Where every element of one of the float8 ``pages`` lies in the pool. Raises ValueError as ``page_table``."""
    first = pool[0] if isinstance(pool[0], torch.Tensor) else pool[0][0]
    if first.dtype not in _ELEMENTS or pages.dtype != torch.float8_e4m3fn:
        raise ValueError(f"layers of {first.dtype} and pages of {pages.dtype}: {[*_ELEMENTS]} become float8_e4m3fn")
    return cut_elements(list(page_pieces(pool, pages, dtype=first.dtype)), pages, layers=len(pool))


def quantise_tiles(
    table: TileTable, pages: torch.Tensor, scales: torch.Tensor, *, sources: Slots, targets: Slots
) -> None:
    """``quantised_reference.quantise_pages``, enqueued on the current stream. Raises as ``gather_tiles`` does."""
    pairs = checked_slots(sources, targets, source_count=table.slot_count, target_count=len(pages))
    _launch(table, pages, scales, pairs, quantises=True)


def dequantise_tiles(
    table: TileTable,
    pages: torch.Tensor,
    scales: torch.Tensor,
    *,
    sources: Slots,
    targets: Slots,
    layers: slice | None = None,
) -> None:
    """``quantised_reference.dequantise_pages``, of ``layers`` or of all, enqueued on the current stream. Raises as
    ``scatter_tiles`` does."""
    pairs = checked_slots(sources, targets, source_count=len(pages), target_count=table.slot_count)
    _launch(table, pages, scales, pairs, quantises=False, layers=layers)


def _launch(
    table: TileTable,
    pages: torch.Tensor,
    scales: torch.Tensor,
    pairs: np.ndarray,
    *,
    quantises: bool,
    layers: slice | None = None,
) -> None:
    if scales.dtype != torch.float32 or scales.shape != pages.shape[:3] or not scales[0].is_contiguous():
        raise ValueError(f"scales are {tuple(scales.shape)} {scales.dtype}, not {tuple(pages.shape[:3])} float32")
    if pairs.size == 0:
        return
    piece_starts = table.piece_starts
    if layers is not None:
        piece_starts = piece_starts[layers.start * table.layer_pieces : layers.stop * table.layer_pieces + 1]
        scales = scales[:, layers]
    piece_count = len(piece_starts) - 1
    address, stride = block_place(table, pages, word_bytes=1)
    with on_device_of(table):
        _convert_kernel[(min(pairs.shape[1] * piece_count, BUS_PROGRAMS_MAX),)](
            table.tiles,
            piece_starts,
            slots_on(table, pairs),
            pairs.shape[1],
            piece_count,
            address,
            stride,
            scales.data_ptr(),
            scales.stride(0),
            QUANTISES=quantises,
            ELEMENT=_ELEMENTS[table.pool[0].dtype],
            LARGEST=torch.finfo(table.pool[0].dtype).max,
            SCALE_BIASED_MIN=SCALE_EXPONENT_MIN + 127,
            ALIGNMENT=table.alignment,
            TILE_ROWS=table.tile_rows,
            TILE_RUN=table.tile_run,
            TILE_FIELDS=TILE_FIELDS,
            **OPTIONS,
        )


def _place(  # type: ignore[no-untyped-def]  # as all kernels: Triton types what is not a constant
    tile,
    slot,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RUN: tl.constexpr,
):
    """Of one tile: pointers into the slot, offsets in the block, and which of them are inside."""
    ELEMENT_BYTES: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    row = tl.arange(0, TILE_ROWS).to(tl.int64)[:, None]
    column = tl.arange(0, TILE_RUN).to(tl.int64)[None, :]
    address = tl.load(tile) + slot * tl.load(tile + 1) * ELEMENT_BYTES
    first = tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), ALIGNMENT * ELEMENT_BYTES)
    inside = (row < tl.load(tile + 3)) & (column < tl.multiple_of(tl.load(tile + 4), ALIGNMENT))
    in_slot = row * tl.multiple_of(tl.load(tile + 5), ALIGNMENT) + column
    block_offset = tl.multiple_of(tl.load(tile + 2), ALIGNMENT)
    in_block = block_offset + row * tl.multiple_of(tl.load(tile + 6), ALIGNMENT) + column
    return first + in_slot, in_block, inside


_place_in_tile = triton.jit(_place)


def _quantise_plane(  # type: ignore[no-untyped-def]
    tiles,
    tile_start,
    tile_stop,
    slot,
    block,
    scale_at,
    ELEMENT: tl.constexpr,
    SCALE_BIASED_MIN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RUN: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
):
    """A plane is read for its peak, and again to be stored."""
    peaks = tl.zeros([TILE_ROWS, TILE_RUN], tl.int32)  # bits of magnitudes, which are ordered as these are
    tile = tile_start
    while tile < tile_stop:
        at, _, inside = _place_in_tile(tiles + tile * TILE_FIELDS, slot, ELEMENT, ALIGNMENT, TILE_ROWS, TILE_RUN)
        bits = tl.load(at, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        peaks = tl.maximum(peaks, tl.where(bits < 0x7F800000, bits, 0))
        tile += 1
    peak = tl.max(tl.max(peaks, 1), 0)
    biased = (peak >> 23) - 8 + ((peak & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 = 1.75 * 2^8
    biased = tl.maximum(biased, SCALE_BIASED_MIN)
    scale = (biased << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - biased) << 23).to(tl.float32, bitcast=True)
    tl.store(scale_at, scale)
    tile = tile_start
    while tile < tile_stop:
        at, in_block, inside = _place_in_tile(tiles + tile * TILE_FIELDS, slot, ELEMENT, ALIGNMENT, TILE_ROWS, TILE_RUN)
        bits = tl.load(at, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        is_finite = (bits & 0x7FFFFFFF) < 0x7F800000
        scaled = tl.where(is_finite, bits & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True) * inverse
        size = scaled.to(tl.int32, bitcast=True)
        # To the nearest of 3 bits of mantissa, ties to even; exponents count from -7 in the place of -127.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 the steps are 2^-9, as are those of a float32 at 2^14.
        small = (scaled + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal)
        code = tl.where(is_finite, code | ((bits >> 24) & 0x80), 0x7F)
        tl.store(block + in_block, code.to(tl.uint8), mask=inside)
        tile += 1


def _dequantise_plane(  # type: ignore[no-untyped-def]
    tiles,
    tile_start,
    tile_stop,
    slot,
    block,
    scale_at,
    ELEMENT: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RUN: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
):
    scale = tl.load(scale_at)
    tile = tile_start
    while tile < tile_stop:
        at, in_block, inside = _place_in_tile(tiles + tile * TILE_FIELDS, slot, ELEMENT, ALIGNMENT, TILE_ROWS, TILE_RUN)
        code = tl.load(block + in_block, mask=inside, other=0).to(tl.int32)
        size = code & 0x7F
        small = size.to(tl.float32) * 0.001953125  # 2^-9, the steps below 2^-6
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        half = tl.where(size < 8, small, normal) * (scale * 0.5)  # the whole of it may be beyond any float32
        value = tl.where(half > LARGEST / 2, LARGEST / 2, half) * 2.0
        bits = tl.where(size == 0x7F, 0x7FC00000, value.to(tl.int32, bitcast=True)) | ((code & 0x80) << 24)
        tl.store(at, bits.to(tl.float32, bitcast=True).to(ELEMENT), mask=inside)
        tile += 1


_quantise_plane_jit = triton.jit(_quantise_plane)
_dequantise_plane_jit = triton.jit(_dequantise_plane)


def _convert(  # type: ignore[no-untyped-def]
    tiles,
    piece_starts,
    slots,
    pair_count,
    piece_count,
    block_address,
    block_stride,
    scale_address,
    scale_stride,
    QUANTISES: tl.constexpr,
    ELEMENT: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_BIASED_MIN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RUN: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
):
    """Item ``pair * piece_count + piece`` is one plane of one page: from its slot to its block, or back."""
    pair_count = pair_count.to(tl.int64)
    piece_count = piece_count.to(tl.int64)
    item = tl.program_id(0).to(tl.int64)
    while item < pair_count * piece_count:
        pair = item // piece_count
        piece = item % piece_count
        source_slot = tl.load(slots + pair)
        target_slot = tl.load(slots + pair_count + pair)
        if QUANTISES:
            slot = source_slot
            block_slot = target_slot
        else:
            slot = target_slot
            block_slot = source_slot
        scale_at = (scale_address + (block_slot * scale_stride + piece) * 4).to(tl.pointer_type(tl.float32))
        block = tl.multiple_of((block_address + block_slot * block_stride).to(tl.pointer_type(tl.uint8)), ALIGNMENT)
        start = tl.load(piece_starts + piece)
        stop = tl.load(piece_starts + piece + 1)
        if QUANTISES:
            _quantise_plane_jit(
                tiles,
                start,
                stop,
                slot,
                block,
                scale_at,
                ELEMENT,
                SCALE_BIASED_MIN,
                ALIGNMENT,
                TILE_ROWS,
                TILE_RUN,
                TILE_FIELDS,
            )
        else:
            _dequantise_plane_jit(
                tiles, start, stop, slot, block, scale_at, ELEMENT, LARGEST, ALIGNMENT, TILE_ROWS, TILE_RUN, TILE_FIELDS
            )
        item += tl.num_programs(0)


_convert_kernel = triton.jit(
    _convert,
    do_not_specialize=["pair_count", "piece_count", "block_address", "block_stride", "scale_address", "scale_stride"],
)
