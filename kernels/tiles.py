"""Where the bytes of a pool lie, cut into tiles: the table that a kernel walks, made once for a pool.

A piece is one tensor of a pool (one layer; of pages one plane) beside its place in every block. Its dimensions are
merged where both sides allow, until what is left is rows of one run each; further dimensions are unrolled. So a kernel
knows nothing of K and V, of the order of heads and tokens, of strides, or of which tensors belong together.

    plane of a page, NHD     1 row of page_tokens * heads * head_dim
    plane of a page, HND     for each head page_tokens rows of head_dim, or the other way round
    slice of its heads       page_tokens rows of its heads * head_dim
    field of a state         1 row of all its elements
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# 8 warps of 32 threads, with 4 loads of 16 bytes in flight each: 8 such programs cover what PCIe 5 moves in 2 us.
TILE_BYTES = 16 * 1024
TILE_FIELDS = 7  # columns of TileTable.tiles
_WORD_BYTES_MAX = 8  # two of them make up the 16 bytes of one load
_ALIGNMENT_BYTES_MAX = 16


class Piece(NamedTuple):
    """One tensor of a pool, and where each of its elements lies in a block."""

    slots: torch.Tensor  # [n_slots, *inner]
    block_offset_bytes: int
    block_strides: tuple[int, ...]  # of the inner dimensions, in elements


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """All tiles of a block, in the order of its pieces.

    ``tiles``: int64 [n_tiles, TILE_FIELDS] on the device of the pool: address in slot 0 (bytes), and in words: slot
    stride, offset in the block, rows, run, row stride in the slot, row stride in the block.
    ``piece_starts``: int64 [n_pieces + 1]: where in it the tiles of each piece begin.
    ``layer_starts``: where those of each layer begin, and the end.
    ``pool``: the tensors that the addresses point into, which live as long as the table.
    """

    tiles: torch.Tensor
    piece_starts: torch.Tensor
    layer_starts: tuple[int, ...]
    slot_count: int
    word_bytes: int
    alignment: int  # in words, of every length in the table: what one load may take at once
    tile_rows: int  # powers of two, at least what any tile has
    tile_run: int
    pool: tuple[torch.Tensor, ...]

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self.tiles.device

    @property
    def layer_pieces(self) -> int:
        """Pieces of each layer."""
        return (len(self.piece_starts) - 1) // (len(self.layer_starts) - 1)

    def tiles_of(self, layers: slice | None) -> torch.Tensor:
        """The tiles of the layers ``[layers.start, layers.stop)``, or of all."""
        if layers is None:
            return self.tiles
        return self.tiles[self.layer_starts[layers.start] : self.layer_starts[layers.stop]]


class _Axis(NamedTuple):
    size: int
    stride: int
    block_stride: int


class _Rows(NamedTuple):
    """``rows`` rows of ``run`` units, a unit being a byte or an element; ``address`` in bytes."""

    rows: int
    address: int
    slot_stride: int
    block_offset: int
    run: int
    stride: int
    block_stride: int


def cut_bytes(pieces: Sequence[Piece], blocks: torch.Tensor | None, *, layers: int) -> TileTable:
    """The table of a copy of bits: words as wide as every address, stride and length allows.

    ``pieces``: layer by layer, equally many of each of the ``layers``.
    ``blocks`` [n_blocks, ...]: elements as those of the pieces, or bytes; None where no block takes part. Blocks that
    are copied to or from later must be aligned as these are. Raises ValueError for pieces that do not go together.
    """
    rows = [list(_rows(piece, units=piece.slots.element_size())) for piece in pieces]
    begins = [] if blocks is None else [blocks.data_ptr(), blocks.stride(0) * blocks.element_size()]
    alignment_bytes = math.gcd(_ALIGNMENT_BYTES_MAX, *begins, *_lengths(rows))
    word_bytes = min(alignment_bytes, _WORD_BYTES_MAX)
    scaled = [[_in_words(row, word_bytes) for row in group] for group in rows]
    return _table(pieces, scaled, word_bytes=word_bytes, alignment=alignment_bytes // word_bytes, layers=layers)


def cut_elements(pieces: Sequence[Piece], blocks: torch.Tensor, *, layers: int) -> TileTable:
    """The table of a copy that converts: words are elements, of the pieces here and of one byte in ``blocks``."""
    element_bytes = pieces[0].slots.element_size()
    rows = [list(_rows(piece, units=1)) for piece in pieces]
    in_elements = [[row._replace(address=row.address // element_bytes) for row in group] for group in rows]
    alignment_max = _ALIGNMENT_BYTES_MAX // element_bytes
    alignment = math.gcd(alignment_max, blocks.data_ptr(), blocks.stride(0), *_lengths(in_elements))
    return _table(pieces, rows, word_bytes=element_bytes, alignment=alignment, layers=layers)


def _table(
    pieces: Sequence[Piece], rows: Sequence[Sequence[_Rows]], *, word_bytes: int, alignment: int, layers: int
) -> TileTable:
    pool = tuple(piece.slots for piece in pieces)
    if not pool:
        raise ValueError("a pool needs at least one layer")
    slot_count, device = _common(pool)
    run_max = max((row.run for group in rows for row in group), default=1)
    rows_max = max((row.rows for group in rows for row in group), default=1)
    words_max = TILE_BYTES // word_bytes
    tile_run = min(_power_of_two(run_max), words_max)
    tile_rows = min(_power_of_two(rows_max), words_max // tile_run)
    tiles = [
        [tile for row in group for tile in _tiles(row, tile_rows, tile_run, word_bytes=word_bytes)] for group in rows
    ]
    starts = [*itertools.accumulate((len(group) for group in tiles), initial=0)]
    return TileTable(
        tiles=_int64([*itertools.chain(*tiles)], device).view(-1, TILE_FIELDS),
        piece_starts=_int64(starts, device),
        layer_starts=tuple(starts[:: len(pieces) // layers]),
        slot_count=slot_count,
        word_bytes=word_bytes,
        alignment=alignment,
        tile_rows=tile_rows,
        tile_run=tile_run,
        pool=pool,
    )


def _common(pool: Sequence[torch.Tensor]) -> tuple[int, torch.device]:
    """Slots and device of all tensors of a pool."""
    first = pool[0]
    for tensor in pool:
        if tensor.device != first.device or len(tensor) != len(first):
            raise ValueError(
                f"layers differ: {len(tensor)} slots on {tensor.device}, {len(first)} slots on {first.device}"
            )
    return len(first), first.device


def _rows(piece: Piece, *, units: int) -> Iterator[_Rows]:
    """The rows of a piece, with ``units`` to an element: all of one count and run."""
    slots = piece.slots
    inner = zip(slots.shape[1:], slots.stride()[1:], piece.block_strides, strict=True)
    axes = [_Axis(size, stride * units, block_stride * units) for size, stride, block_stride in inner]
    *outer, last = _merged([*axes, _Axis(units, 1, 1)])
    if (last.stride, last.block_stride) != (1, 1):
        outer, last = [*outer, last], _Axis(1, 1, 1)
    row_axis = max(outer, key=lambda axis: axis.size, default=_Axis(1, 0, 0))
    unrolled = [axis for axis in outer if axis is not row_axis]
    unit_bytes = slots.element_size() // units
    for indices in itertools.product(*(range(axis.size) for axis in unrolled)):
        offset = sum(index * axis.stride for index, axis in zip(indices, unrolled, strict=True))
        block_offset = sum(index * axis.block_stride for index, axis in zip(indices, unrolled, strict=True))
        yield _Rows(
            rows=row_axis.size,
            address=slots.data_ptr() + offset * unit_bytes,
            slot_stride=slots.stride(0) * units,
            block_offset=piece.block_offset_bytes + block_offset,
            run=last.size,
            stride=row_axis.stride,
            block_stride=row_axis.block_stride,
        )


def _merged(axes: Sequence[_Axis]) -> list[_Axis]:
    """The axes without those of size 1, neighbours made one where both sides step over the inner one exactly."""
    merged: list[_Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if merged:
            size, stride, block_stride = merged[-1]
            if (stride, block_stride) == (axis.size * axis.stride, axis.size * axis.block_stride):
                merged[-1] = _Axis(size * axis.size, axis.stride, axis.block_stride)
                continue
        merged.append(axis)
    return merged or [_Axis(1, 1, 1)]


def _lengths(rows: Sequence[Sequence[_Rows]]) -> Iterator[int]:
    """Everything that must be a multiple of the alignment."""
    return (length for group in rows for row in group for length in row[1:])


def _in_words(row: _Rows, word_bytes: int) -> _Rows:
    rows, address, *lengths = row
    return _Rows(rows, address, *(length // word_bytes for length in lengths))


def _tiles(row: _Rows, tile_rows: int, tile_run: int, *, word_bytes: int) -> Iterator[tuple[int, ...]]:
    for first in range(0, row.rows, tile_rows):
        for start in range(0, row.run, tile_run):
            yield (
                row.address + (first * row.stride + start) * word_bytes,
                row.slot_stride,
                row.block_offset + first * row.block_stride + start,
                min(tile_rows, row.rows - first),
                min(tile_run, row.run - start),
                row.stride,
                row.block_stride,
            )


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()


def _int64(numbers: Sequence[object], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device)
