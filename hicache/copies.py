"""The copies of one rank between its pools, by group and slot: what the executor asks for, whoever does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hicache.errors import UsageError
from hicache.kernels.quantised_reference import dequantise_pages, quantise_pages
from hicache.kernels.reference import (
    clear_states,
    copy_states,
    gather_pages,
    gather_states,
    scatter_pages,
    scatter_states,
)
from hicache.pools.l1 import L1Pool
from hicache.pools.l2 import L2Pool
from hicache.spec import PagedGroup, StateGroup


class Copies(Protocol):
    """Each call copies ``sources[i]`` to ``targets[i]`` for every i, of one group.

    Called from two threads: ``backup`` from one, the others from the engine's. On an accelerator a call may return when
    its copies are enqueued on the current stream. Raises for whatever went wrong: some targets may have been written
    then, and nothing in them may be used.
    """

    name: str

    def backup(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """L1 -> L2; of a state its persistent fields."""
        ...

    def load(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """L2 -> L1; the transient fields of a state are emptied."""
        ...

    def snapshot(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """L1 -> L1: the persistent fields of live states; the transient ones of the targets keep what they had."""
        ...

    def restore(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """L1 -> L1: the persistent fields of snapshots; the transient fields of the targets are emptied."""
        ...

    def reset(self, group: int, targets: Sequence[int]) -> None:
        """Empty all fields of states."""
        ...

    def clear(self, group: int, targets: Sequence[int]) -> None:
        """Empty the transient fields of states."""
        ...


class ReferenceCopies:
    """Copies in plain torch, on any device."""

    name = "reference"

    def __init__(self, l1: L1Pool, l2: L2Pool | None) -> None:
        self._l1 = l1
        self._l2 = l2  # its views are made for each call: none keeps the memory alive after the pool was closed
        groups = [(index, group) for index, group in enumerate(l1.rank.groups) if group is not None]
        paged = {index: group for index, group in groups if isinstance(group, PagedGroup)}
        self._pages = {index: l1.page_parts(index) for index, group in paged.items() if group.stored_dtype is None}
        self._quantised = {index: l1.page_parts(index) for index in paged.keys() - self._pages.keys()}
        self._states = {index: l1.state_parts(index) for index, group in groups if isinstance(group, StateGroup)}

    def backup(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        l2 = self._second_tier()
        for part, pool in enumerate(self._quantised.get(group, ())):
            pages, scales = l2.view(group, part), l2.scales(group, part)
            quantise_pages(pool, pages, scales, sources=sources, targets=targets)
        for part, pool in enumerate(self._pages.get(group, ())):
            gather_pages(pool, l2.view(group, part), sources=sources, targets=targets)
        for part, fields in enumerate(self._states.get(group, ())):
            gather_states(fields, l2.view(group, part), sources=sources, targets=targets)

    def load(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        l2 = self._second_tier()
        for part, pool in enumerate(self._quantised.get(group, ())):
            pages, scales = l2.view(group, part), l2.scales(group, part)
            dequantise_pages(pages, scales, pool, sources=sources, targets=targets)
        for part, pool in enumerate(self._pages.get(group, ())):
            scatter_pages(l2.view(group, part), pool, sources=sources, targets=targets)
        for part, fields in enumerate(self._states.get(group, ())):
            scatter_states(l2.view(group, part), fields, sources=sources, targets=targets)
        if group in self._states:
            clear_states(self._l1.fields(group, transient=True), slots=targets)

    def snapshot(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        copy_states(self._l1.fields(group, transient=False), sources=sources, targets=targets)

    def restore(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        copy_states(self._l1.fields(group, transient=False), sources=sources, targets=targets)
        clear_states(self._l1.fields(group, transient=True), slots=targets)

    def reset(self, group: int, targets: Sequence[int]) -> None:
        """See Copies."""
        for transient in (False, True):
            clear_states(self._l1.fields(group, transient=transient), slots=targets)

    def clear(self, group: int, targets: Sequence[int]) -> None:
        """See Copies."""
        clear_states(self._l1.fields(group, transient=True), slots=targets)

    def _second_tier(self) -> L2Pool:
        if self._l2 is None:
            raise UsageError("there is no L2 to copy from or to")
        return self._l2


def copies_for(l1: L1Pool, l2: L2Pool | None) -> Copies:
    """The copies of pools on the device of ``l1``. Raises ValueError for pools that kernels cannot copy between."""
    if l1.device.type != "cuda":
        return ReferenceCopies(l1, l2)
    from hicache.kernel_copies import KernelCopies  # Triton is loaded only where its kernels run

    return KernelCopies(l1, l2)
