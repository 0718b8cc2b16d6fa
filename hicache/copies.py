"""The copies of one rank between its pools, by group and slot: what the executor asks for, whoever does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hicache.errors import UsageError
from hicache.kernels.direct import mean_run_bytes
from hicache.kernels.legs import page_legs, state_legs
from hicache.kernels.quantised_reference import dequantise_pages, quantise_pages
from hicache.kernels.reference import clear_states, copy_states
from hicache.moves import KERNEL, REFERENCE, Moves, checked_copies, choose_moves
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


class PoolCopies:
    """Copies between two pools, each group by a back end of its own (``hicache.moves``)."""

    def __init__(self, l1: L1Pool, l2: L2Pool | None, *, setting: str = "auto") -> None:
        """``setting`` names the back end of all groups; ``auto``: whichever is fastest for the group. Raises
        ConfigError.
        """
        self._l1 = l1
        self._l2 = l2  # its views are made for each call: none keeps the memory alive after the pool was closed
        groups = [(index, group) for index, group in enumerate(l1.rank.groups) if group is not None]
        paged = {index: group for index, group in groups if isinstance(group, PagedGroup)}
        self._pages = {index: l1.page_parts(index) for index, group in paged.items() if group.stored_dtype is None}
        self._quantised = {index: l1.page_parts(index) for index in paged.keys() - self._pages.keys()}
        self._states = {index: l1.state_parts(index) for index, group in groups if isinstance(group, StateGroup)}
        checked_copies(setting)
        moved = [] if l2 is None else [*self._pages, *self._states]
        self._moves = {index: self._choose(setting, l2, index) for index in moved if l2 is not None}
        self.name = ", ".join(sorted({moves.name for moves in self._moves.values()})) or REFERENCE.name

    def _choose(self, setting: str, l2: L2Pool, group: int) -> Moves:
        objects = l2.view(group)
        if group in self._pages:
            legs = list(page_legs(self._pages[group][0], objects))
        else:
            legs = list(state_legs(self._states[group][0], objects))
        return choose_moves(
            setting,
            run_bytes=mean_run_bytes(legs),
            by_layer=not isinstance(legs[0].layered, torch.Tensor),
            device=self._l1.device,
        )

    def backup(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        l2, moves = self._second_tier(), self._moves.get(group, REFERENCE)
        for part, pool in enumerate(self._quantised.get(group, ())):
            pages, scales = l2.view(group, part), l2.scales(group, part)
            quantise_pages(pool, pages, scales, sources=sources, targets=targets)
        for part, pool in enumerate(self._pages.get(group, ())):
            moves.gather_pages(pool, l2.view(group, part), sources=sources, targets=targets)
        for part, fields in enumerate(self._states.get(group, ())):
            moves.gather_states(fields, l2.view(group, part), sources=sources, targets=targets)

    def load(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        l2, moves = self._second_tier(), self._moves.get(group, REFERENCE)
        for part, pool in enumerate(self._quantised.get(group, ())):
            pages, scales = l2.view(group, part), l2.scales(group, part)
            dequantise_pages(pages, scales, pool, sources=sources, targets=targets)
        for part, pool in enumerate(self._pages.get(group, ())):
            moves.scatter_pages(l2.view(group, part), pool, sources=sources, targets=targets)
        for part, fields in enumerate(self._states.get(group, ())):
            moves.scatter_states(l2.view(group, part), fields, sources=sources, targets=targets)
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


def copies_for(l1: L1Pool, l2: L2Pool | None, setting: str = "auto") -> Copies:
    """The copies of two pools by a setting of ``hicache.moves``. Raises ConfigError for an unknown one, and ValueError
    for pools that kernels cannot copy between."""
    if checked_copies(setting) != KERNEL:
        return PoolCopies(l1, l2, setting=setting)
    from hicache.kernel_copies import KernelCopies  # Triton is loaded only where its kernels run

    return KernelCopies(l1, l2)
