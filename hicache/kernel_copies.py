"""The copies of one rank by Triton kernels: they read and write L2 over the bus, without staging."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hicache.errors import UsageError
from hicache.kernels.fp8_pages import dequantise_tiles, quantise_tiles, quantised_table
from hicache.kernels.legs import PagedPool
from hicache.kernels.pages import page_table
from hicache.kernels.states import field_table, state_table
from hicache.kernels.tile_copies import clear_tiles, copy_tiles, gather_tiles, scatter_tiles
from hicache.kernels.tiles import TileTable
from hicache.pools.l1 import L1Pool
from hicache.pools.l2 import L2Pool
from hicache.spec import StateGroup


class KernelCopies:
    """Copies on the device of L1, where each call enqueues one kernel per object and returns.

    The tables that the kernels walk are made here, once. L2 must be pinned for the device. Raises ValueError for pools
    that kernels cannot copy between; nothing else takes their place.
    """

    name = "kernel"

    def __init__(self, l1: L1Pool, l2: L2Pool | None) -> None:
        self._l2 = l2  # its views are made for each call: none keeps the memory alive after the pool was closed
        groups = [(index, group) for index, group in enumerate(l1.rank.groups) if group is not None]
        states = [index for index, group in groups if isinstance(group, StateGroup)]
        self._persistent = {index: field_table(l1.fields(index, transient=False)) for index in states}
        self._transient = {
            index: field_table(fields) for index in states if (fields := l1.fields(index, transient=True))
        }
        self._objects: dict[int, list[TileTable]] = {}  # by group, a table for each shard
        self._quantised: dict[int, list[TileTable]] = {}
        for index, group in groups if l2 is not None else ():
            assert l2 is not None
            if isinstance(group, StateGroup):
                self._objects[index] = _state_tables(l1, l2, index)
            elif group.stored_dtype is None:
                self._objects[index] = _page_tables(l1, l2, index, table=page_table)
            else:
                self._quantised[index] = _page_tables(l1, l2, index, table=quantised_table)

    def backup(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        l2 = self._second_tier()
        for part, table in enumerate(self._quantised.get(group, ())):
            pages, scales = l2.view(group, part), l2.scales(group, part)
            quantise_tiles(table, pages, scales, sources=sources, targets=targets)
        for part, table in enumerate(self._objects.get(group, ())):
            gather_tiles(table, l2.view(group, part), sources=sources, targets=targets)

    def load(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        l2 = self._second_tier()
        for part, table in enumerate(self._quantised.get(group, ())):
            pages, scales = l2.view(group, part), l2.scales(group, part)
            dequantise_tiles(table, pages, scales, sources=sources, targets=targets)
        for part, table in enumerate(self._objects.get(group, ())):
            scatter_tiles(table, l2.view(group, part), sources=sources, targets=targets)
        if group in self._persistent:
            self.clear(group, targets)

    def snapshot(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        copy_tiles(self._state(group), sources=sources, targets=targets)

    def restore(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        self.snapshot(group, sources, targets)
        self.clear(group, targets)

    def reset(self, group: int, targets: Sequence[int]) -> None:
        """See Copies."""
        clear_tiles(self._state(group), slots=targets)
        self.clear(group, targets)

    def clear(self, group: int, targets: Sequence[int]) -> None:
        """See Copies."""
        self._state(group)
        if group in self._transient:
            clear_tiles(self._transient[group], slots=targets)

    def _state(self, group: int) -> TileTable:
        if group not in self._persistent:
            raise UsageError(f"group {group} is not a state group of this L1")
        return self._persistent[group]

    def _second_tier(self) -> L2Pool:
        if self._l2 is None:
            raise UsageError("there is no L2 to copy from or to")
        return self._l2


def _page_tables(
    l1: L1Pool, l2: L2Pool, group: int, *, table: Callable[[PagedPool, torch.Tensor], TileTable]
) -> list[TileTable]:
    return [table(pool, l2.view(group, part)) for part, pool in enumerate(l1.page_parts(group))]


def _state_tables(l1: L1Pool, l2: L2Pool, group: int) -> list[TileTable]:
    return [state_table(fields, l2.view(group, part)) for part, fields in enumerate(l1.state_parts(group))]
