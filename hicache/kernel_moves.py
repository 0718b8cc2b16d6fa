"""The back ends of Triton kernels: straight over the bus to pinned L2, or through staging on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from hicache.kernels import direct, quantised_reference
from hicache.kernels.fp8_pages import dequantise_tiles, quantise_tiles, quantised_table
from hicache.kernels.legs import Layered, PagedPool, Slots, slot_list
from hicache.kernels.pages import page_table
from hicache.kernels.states import field_table, state_table
from hicache.kernels.tile_copies import checked_slots, clear_tiles, copy_tiles, gather_tiles, scatter_tiles
from hicache.kernels.tiles import TileTable
from hicache.moves import Extent, Fields, Moves, field_extents
from hicache.staging import Staging

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Straight:
    """One launch moves all objects of a call: the kernel reads or writes L2 over the bus."""

    table: TileTable

    def gather(self, objects: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
        gather_tiles(self.table, objects, sources=sources, targets=targets)

    def scatter(self, objects: torch.Tensor, *, sources: Slots, targets: Slots, layers: slice | None = None) -> None:
        scatter_tiles(self.table, objects, sources=sources, targets=targets, layers=layers)


@dataclass(frozen=True, slots=True)
class _Staged:
    """The kernel moves objects within the device, to or from rows of ``staging``; each crosses the bus in one copy.

        L1 -> kernel -> | row 0 | row 1 | ... | -> one copy for each object -> L2     as many at a time as rows

    All on one stream: the next objects wait until the rows have been read. ``table`` is that of rows. ``extents`` tells
    which bytes of an object are those of some layers.
    """

    table: TileTable
    staging: Staging
    object_bytes: int
    extents: Callable[[slice], Sequence[Extent]]

    def gather(self, objects: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
        self._check(sources, targets, source_count=self.table.slot_count, target_count=len(objects))
        rows = self.staging.rows("gather", self.object_bytes)
        for some_sources, some_targets in _batches(sources, targets, len(rows)):
            taken = range(len(some_sources))
            gather_tiles(self.table, rows, sources=some_sources, targets=taken)
            direct.gather_states([rows.unsqueeze(0)], _as_bytes(objects), sources=taken, targets=some_targets)

    def scatter(self, objects: torch.Tensor, *, sources: Slots, targets: Slots, layers: slice | None = None) -> None:
        self._check(sources, targets, source_count=len(objects), target_count=self.table.slot_count)
        rows, blocks = self.staging.rows("scatter", self.object_bytes), _as_bytes(objects)
        extents = [(0, self.object_bytes)] if layers is None else self.extents(layers)
        for some_sources, some_targets in _batches(sources, targets, len(rows)):
            taken = range(len(some_sources))
            for first, stop in extents:
                part = rows[:, first:stop].unsqueeze(0)
                direct.scatter_states(blocks[:, first:stop], [part], sources=some_sources, targets=taken)
            scatter_tiles(self.table, rows, sources=taken, targets=some_targets, layers=layers)

    @staticmethod
    def _check(sources: Slots, targets: Slots, *, source_count: int, target_count: int) -> None:
        """Of the whole call, before the first batch moves."""
        checked_slots(sources, targets, source_count=source_count, target_count=target_count)


def _batches(sources: Slots, targets: Slots, size: int) -> list[tuple[list[int], list[int]]]:
    """Of ``size`` pairs, the last one of fewer."""
    all_sources, all_targets = slot_list(sources), slot_list(targets)
    starts = range(0, len(all_sources), size)
    return [(all_sources[start : start + size], all_targets[start : start + size]) for start in starts]


def _as_bytes(objects: torch.Tensor) -> torch.Tensor:
    """uint8 [n_slots, object_bytes] of the same memory: an object is contiguous."""
    return objects if objects.dim() == 2 else objects.view(torch.uint8).view(len(objects), -1)


def _staged_pages(pool: PagedPool, pages: torch.Tensor, staging: Staging) -> _Staged:
    object_bytes = pages[0].numel() * pages.element_size()
    staging.reserve(object_bytes)
    rows = staging.rows("gather", object_bytes)
    like = rows.view(pages.dtype).view(len(rows), *pages.shape[1:])
    layer_bytes = object_bytes // pages.shape[1]
    return _Staged(
        page_table(pool, like),
        staging,
        object_bytes,
        lambda layers: [(layers.start * layer_bytes, layers.stop * layer_bytes)],
    )


def _staged_states(fields: Fields, objects: torch.Tensor, staging: Staging) -> _Staged:
    object_bytes = objects.shape[1]
    staging.reserve(object_bytes)
    table = state_table(fields, staging.rows("gather", object_bytes))
    return _Staged(table, staging, object_bytes, lambda layers: [*field_extents(fields, layers)])


KERNEL = Moves(
    "kernel",
    lambda pool, pages, staging: _Straight(page_table(pool, pages)),
    lambda fields, objects, staging: _Straight(state_table(fields, objects)),
)
STAGED = Moves("staged", _staged_pages, _staged_states)


class KernelQuantised:
    """Pages that are stored as float8, converted by the kernel on their way over the bus."""

    def __init__(self, pool: PagedPool, pages: torch.Tensor) -> None:
        self._table = quantised_table(pool, pages)

    def gather(self, pages: torch.Tensor, scales: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
        """See ``quantised_reference.quantise_pages``."""
        quantise_tiles(self._table, pages, scales, sources=sources, targets=targets)

    def scatter(
        self,
        pages: torch.Tensor,
        scales: torch.Tensor,
        *,
        sources: Slots,
        targets: Slots,
        layers: slice | None = None,
    ) -> None:
        """See ``quantised_reference.dequantise_pages``."""
        dequantise_tiles(self._table, pages, scales, sources=sources, targets=targets, layers=layers)


class KernelStates:
    """The states of one group within L1: all layers and fields in one launch."""

    def __init__(self, persistent: Sequence[Layered], transient: Sequence[Layered]) -> None:
        self._persistent = field_table(persistent)
        self._transient = field_table(transient) if transient else None

    def copy(self, *, sources: Slots, targets: Slots) -> None:
        """The persistent fields."""
        copy_tiles(self._persistent, sources=sources, targets=targets)

    def clear_persistent(self, slots: Slots) -> None:
        """Zero the persistent fields."""
        clear_tiles(self._persistent, slots=slots)

    def clear_transient(self, slots: Slots, *, layers: slice | None = None) -> None:
        """Zero the transient fields, in ``layers`` or in all."""
        if self._transient is not None:
            clear_tiles(self._transient, slots=slots, layers=layers)


@cache
def quantises_right(device: torch.device) -> bool:
    """Whether the kernels of float8 pages do here what their reference does; found out once in each process."""
    generator = torch.Generator().manual_seed(8)
    wide = (torch.randn((2, 3, 2, 64, 2, 64), generator=generator) * 100).to(torch.bfloat16)
    pool, shape = wide.to(device), (3, 2, 2, 64, 2, 64)
    is_pinned = device.type == "cuda"
    pages = [torch.zeros(shape, dtype=torch.uint8, pin_memory=is_pinned).view(torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.zeros(shape[:3], pin_memory=is_pinned) for _ in range(2)]
    back, expected = torch.zeros_like(pool), torch.zeros_like(wide)
    try:
        KernelQuantised(pool, pages[0]).gather(pages[0], scales[0], sources=[2, 0], targets=[0, 1])
        KernelQuantised(back, pages[0]).scatter(pages[0], scales[0], sources=[1, 0], targets=[0, 1])
        loaded = back.cpu()  # after all of it
    except Exception as error:
        _LOG.warning("no float8 pages through kernels on %s: %r", device, error)
        return False
    quantised_reference.quantise_pages(wide, pages[1], scales[1], sources=[2, 0], targets=[0, 1])
    quantised_reference.dequantise_pages(pages[1], scales[1], expected, sources=[1, 0], targets=[0, 1])
    stored = [each.view(torch.uint8) for each in pages]
    if torch.equal(*stored) and torch.equal(*scales) and torch.equal(loaded, expected):
        return True
    _LOG.warning("no float8 pages through kernels on %s: they moved wrong bytes", device)
    return False
