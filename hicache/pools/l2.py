"""L2: the slots of every group in one piece of host memory, laid out so that an object is one extent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from hicache.errors import ConfigError
from hicache.groups import SCALE_BYTES
from hicache.memory_limits import AvailableMemory
from hicache.pools.dtypes import torch_dtype
from hicache.pools.host_memory import HostMemory
from hicache.pools.l1 import page_shape
from hicache.pools.numa import node_of
from hicache.pools.registration import HostRegistrar, registrar_for
from hicache.sizing import l2_size_bytes, l2_strides, slot_stride
from hicache.spec import CacheSpec, PagedGroup

REGION_BYTES = 1 << 30  # pinned in one call: a fraction of a second, for which a driver may keep others waiting


class L2Pool:
    """Slots for every group of one rank, group after group, and in each slot the rank's shards of one page or snapshot,
    each at a multiple of 4096 bytes.

        [group 0: slot 0 | slot 1 | ... ][group 1: slot 0 | ...]      slot = shard after shard, each with its padding

    A shard of a page is ``[layers][planes][page_tokens][heads x head_dim]`` (page_first_direct), of a state the bytes
    of its persistent fields; a page that is stored as float8 has its scales behind it. It is a SharedMemory for L3
    clients. Which slot holds what is not decided here.

    ``slot_counts[group_index]`` is 0 where the rank lacks the group.
    """

    def __init__(
        self,
        spec: CacheSpec,
        slot_counts: Sequence[int],
        *,
        rank: int | None = None,
        device: str | torch.device = "cpu",
        registrar: HostRegistrar | None = None,
        available: AvailableMemory | None = None,
    ) -> None:
        """Reserve exactly the memory of the slots, zeroed, touched, and pinned if ``device`` (of L1) wants it.

        ``slot_counts`` are those of the replica, at least 1 for every group. ``rank`` may be left out where there is
        only one.
        ``registrar`` pins in the place of what ``device`` would choose. ``available`` bounds the size; None asks the
        machine. Raises ConfigError or SpecError, and then holds nothing.
        """
        if len(slot_counts) != len(spec.groups) or min(slot_counts) < 1:
            raise ConfigError("l2 slot counts", tuple(slot_counts), f"at least 1 for each of {len(spec.groups)} groups")
        self.spec = spec
        self.rank = spec.rank(rank)
        self.slot_counts = tuple(0 if self.rank.lacks(group) else count for group, count in enumerate(slot_counts))
        self.strides = l2_strides(self.rank)
        sizes = (count * stride for count, stride in zip(self.slot_counts, self.strides, strict=True))
        self._starts = tuple(accumulate(sizes, initial=0))[:-1]
        self._memory = HostMemory(
            "hicache-l2",
            l2_size_bytes(self.rank, slot_counts),
            setting="l2_bytes",
            available=available,
            registrar=registrar or registrar_for(torch.device(device)),
            region_starts=self._region_starts(),
            numa_node=node_of(torch.device(device)),
        )
        self.size_bytes = self._memory.size_bytes
        self.description = f"L2: {self._memory.description}"

    @property
    def fd(self) -> int:
        """The memfd, for hicached to map. Raises UsageError after ``close``."""
        return self._memory.fd

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable; a view keeps the mapping alive. Raises UsageError after ``close``."""
        return self._memory.buffer

    def offset(self, group: int, slot: int) -> int:
        """Where ``slot``, and the first shard in it, begins within the memory. Raises IndexError for a slot that does
        not exist.
        """
        if not 0 <= group < len(self.slot_counts):
            raise IndexError(f"group {group} is outside of [0, {len(self.slot_counts)})")
        if not 0 <= slot < self.slot_counts[group]:
            raise IndexError(f"slot {slot} of group {group} is outside of [0, {self.slot_counts[group]})")
        return self._starts[group] + slot * self.strides[group]

    def view(self, group: int, part: int = 0) -> torch.Tensor:
        """The ``part``-th of the rank's shards in all slots of a group: pages [n_slots, layers, planes, page_tokens,
        heads, head_dim] in the dtype they are stored in, or states as bytes [n_slots, size_bytes]. It keeps the mapping
        alive.

        Raises IndexError, and UsageError after ``close``.
        """
        objects = self._objects(group, part)
        described = self.rank.groups[group]
        if not isinstance(described, PagedGroup):
            return objects
        planes, page_tokens, heads, head_dim = page_shape(described, self.spec.page_tokens)
        shape = (len(described.layers), planes, page_tokens, heads // len(self.rank.shards[group]), head_dim)
        dtype = torch_dtype(described.stored_dtype or described.dtype)
        return objects[:, : math.prod(shape) * dtype.itemsize].view(dtype).view(len(objects), *shape)

    def scales(self, group: int, part: int = 0) -> torch.Tensor:
        """The scales of pages that are stored as float8: [n_slots, layers, planes] float32. Raises as ``view`` does."""
        described = self.rank.groups[group]
        assert isinstance(described, PagedGroup)
        assert described.stored_dtype is not None
        shape = (len(described.layers), described.planes)
        objects = self._objects(group, part)
        return objects[:, -SCALE_BYTES * math.prod(shape) :].view(torch.float32).view(len(objects), *shape)

    def _objects(self, group: int, part: int) -> torch.Tensor:
        """uint8 [n_slots, size_bytes]."""
        start, count, stride = self.offset(group, 0), self.slot_counts[group], self.strides[group]
        slots = self._memory.tensor()[start : start + count * stride].view(count, stride)
        size_bytes = self.rank.shards[group][part].size_bytes
        first = part * slot_stride(size_bytes)
        return slots[:, first : first + size_bytes]

    def _region_starts(self) -> list[int]:
        """Where regions that are pinned by themselves begin: at a slot, so that no copy of a slot is in two."""
        return [
            start + first * stride
            for start, count, stride in zip(self._starts, self.slot_counts, self.strides, strict=True)
            for first in range(0, count, max(1, REGION_BYTES // max(1, stride)))
        ]

    def close(self) -> None:
        """Unpin and let go of the memory, which is unmapped with the last view of it. Idempotent.

        Only after the executor was closed: nothing may copy into or out of pinned memory any more.
        """
        self._memory.close()
