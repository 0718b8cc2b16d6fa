"""Pages between layer-first pools and page_first_direct blocks, by kernels; in plain torch: ``reference``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hicache.kernels.legs import PagedPool, Slots
from hicache.kernels.tile_copies import gather_tiles, scatter_tiles
from hicache.kernels.tiles import Piece, TileTable, cut_bytes


def page_table(pool: PagedPool, pages: torch.Tensor) -> TileTable:
    """Where every byte of one of ``pages`` lies in the pool. Shapes are those of ``reference.gather_pages``.

    Serves all pages of equal shape, strides and alignment, so it is made once. Raises ValueError for shapes and dtypes
    that do not fit together.
    """
    return cut_bytes(list(page_pieces(pool, pages, dtype=pages.dtype)), pages, layers=len(pool))


def gather_pages(pool: PagedPool, pages: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
    """``pages[targets[i], layer] = pool[layer][sources[i]]``, by the rules of ``reference.gather_pages``.

    Enqueued on the current stream. To copy more than once, keep the ``page_table`` and use ``gather_tiles``.
    """
    gather_tiles(page_table(pool, pages), pages, sources=sources, targets=targets)


def scatter_pages(pages: torch.Tensor, pool: PagedPool, *, sources: Slots, targets: Slots) -> None:
    """``pool[layer][targets[i]] = pages[sources[i], layer]``: the way back of ``gather_pages``, with equal rules."""
    scatter_tiles(page_table(pool, pages), pages, sources=sources, targets=targets)


def page_pieces(pool: PagedPool, pages: torch.Tensor, *, dtype: torch.dtype) -> Iterator[Piece]:
    """A piece for every plane of every layer, in the order of a page. ``dtype`` is that of the pool.

    Raises ValueError for what does not fit together.
    """
    layers = list(pool)
    if pages.dim() < 3 or len(layers) != pages.shape[1]:
        raise ValueError(f"a pool of {len(layers)} layers, pages of shape {tuple(pages.shape)}")
    for layer, held in enumerate(layers):
        planes = held.unbind(1) if isinstance(held, torch.Tensor) else held
        if len(planes) != pages.shape[2]:
            raise ValueError(f"a layer has {len(planes)} planes, pages of shape {tuple(pages.shape)} {pages.shape[2]}")
        for plane, slots in enumerate(planes):
            if slots.shape[1:] != pages.shape[3:] or slots.dtype != dtype:
                found, expected = (tuple(slots.shape[1:]), slots.dtype), (tuple(pages.shape[3:]), dtype)
                raise ValueError(f"layers have planes of {found}, pages of {expected}")
            offset = layer * pages.stride(1) + plane * pages.stride(2)
            yield Piece(slots, offset * pages.element_size(), pages.stride()[3:])
