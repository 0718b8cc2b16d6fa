"""L1 in one arena: one uint8 tensor in which every group sees slots of its own."""

from __future__ import annotations

from typing import Any

import torch

from hicache.arena import ArenaLayout, arena_layout, field_offsets
from hicache.errors import ConfigError
from hicache.pools.dtypes import torch_dtype
from hicache.pools.l1 import L1Pool, checked_device, page_shape
from hicache.spec import CacheSpec, Group, PagedGroup


class ArenaPool(L1Pool):
    """An L1Pool whose groups share ``memory``: uint8 [layout.size_bytes], zeroed at first.

    ``paged`` and ``state`` are views of the shapes of every L1Pool, over all of the memory: slots of two groups that
    lie in one unit have the same bytes, and the directory never gives out both. A page is one run of bytes, layer after
    layer; so is a field of a state. What a slot holds before it is written is rubbish, in any bit pattern.
    """

    layout: ArenaLayout
    memory: torch.Tensor
    l1_bytes: int

    @classmethod
    def allocate(
        cls, spec: CacheSpec, l1_bytes: int, *, rank: int | None = None, device: str | torch.device = "cpu"
    ) -> ArenaPool:
        """As many whole units as every rank can have of ``l1_bytes``. Raises ConfigError."""
        described = spec.rank(rank)
        layout = arena_layout(spec, l1_bytes, stage=described.stage)
        place = checked_device(device)
        try:
            with torch.inference_mode(mode=False):  # as in L1Pool
                memory = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=place)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError("l1_bytes", l1_bytes, f"no more than {place} has memory for: {error}") from error
        views = {
            index: _views(group, layout, memory, index, page_tokens=spec.page_tokens)
            for index, group in enumerate(described.groups)
            if group is not None
        }
        pool = cls.adopt(spec, views, rank=rank)
        assert isinstance(pool, ArenaPool)
        pool.layout, pool.memory, pool.l1_bytes = layout, memory, l1_bytes
        return pool


def open_l1(spec: CacheSpec, *, rank: int, pages: int, state_slots: int, size_bytes: int, device: str) -> L1Pool:
    """An L1 of ``pages`` and ``state_slots`` for each group, or of ``size_bytes`` for all. Raises ConfigError."""
    if size_bytes:
        for setting, value in (("l1_pages", pages), ("l1_state_slots", state_slots)):
            if value:
                raise ConfigError(setting, value, f"0 with l1_bytes = {size_bytes}, which all groups share as needed")
        return ArenaPool.allocate(spec, size_bytes, rank=rank, device=device)
    if spec.has_state and state_slots < 1:
        raise ConfigError("l1_state_slots", state_slots, "at least 1, since the model has state groups, or l1_bytes")
    return L1Pool(spec, rank=rank, pages=pages, state_slots=state_slots, device=device)


def _views(
    group: Group, layout: ArenaLayout, memory: torch.Tensor, index: int, *, page_tokens: int
) -> Any:  # as L1Pool.adopt takes them
    count, stride_bytes = layout.slot_counts[index], layout.stride_bytes(index)
    if isinstance(group, PagedGroup):
        shape = (len(group.layers), count, *page_shape(group, page_tokens))
        return _slots(memory, group.dtype, shape, stride_bytes=stride_bytes, offset_bytes=0)
    offsets, _ = field_offsets(group)
    return {
        field.name: _slots(
            memory,
            field.dtype,
            (len(group.layers), count, *field.shape),
            stride_bytes=stride_bytes,
            offset_bytes=offset,
        )
        for field, offset in zip(group.fields, offsets, strict=True)
    }


def _slots(
    memory: torch.Tensor, dtype: str, shape: tuple[int, ...], *, stride_bytes: int, offset_bytes: int
) -> torch.Tensor:
    """[layers, n_slots, *inner] over the memory: a slot every ``stride_bytes``, its layers one after the other."""
    elements = memory.view(torch_dtype(dtype))
    layers, count, *inner = shape
    row = torch.Size(inner).numel()
    item_bytes = elements.element_size()
    strides = (row, stride_bytes // item_bytes, *torch.empty(inner, device="meta").stride())
    return elements.as_strided((layers, count, *inner), strides, offset_bytes // item_bytes)
