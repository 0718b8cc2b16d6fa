"""The copies of one rank between its pools, by group and slot: what the executor asks for, whoever does it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hicache.errors import UsageError
from hicache.kernels.direct import mean_run_bytes
from hicache.kernels.legs import Layered, PagedPool, Slots, page_legs, state_legs
from hicache.kernels.quantised_reference import dequantise_pages, quantise_pages
from hicache.kernels.reference import clear_states, copy_states
from hicache.moves import KERNEL, REFERENCE, STAGED, Mover, Moves, checked_copies, choose_moves, quantises_by_kernels
from hicache.pools.l1 import L1Pool
from hicache.pools.l2 import L2Pool
from hicache.spec import PagedGroup, StateGroup
from hicache.staging import STAGING_BYTES, Staging

_LOG = logging.getLogger(__name__)


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

    def load(self, group: int, sources: Sequence[int], targets: Sequence[int], *, layers: slice | None = None) -> None:
        """L2 -> L1; the transient fields of a state are emptied. Of ``layers``, by their place in the rank's group, or
        of all of them.
        """
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


class QuantisedMover(Protocol):
    """A Mover of pages that are stored as float8, with their scales."""

    def gather(self, pages: torch.Tensor, scales: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
        """See ``quantised_reference.quantise_pages``."""
        ...

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
        ...


class StateSlots(Protocol):
    """The states of one group within L1."""

    def copy(self, *, sources: Slots, targets: Slots) -> None:
        """The persistent fields."""
        ...

    def clear_persistent(self, slots: Slots) -> None:
        """Zero the persistent fields."""
        ...

    def clear_transient(self, slots: Slots, *, layers: slice | None = None) -> None:
        """Zero the transient fields, in ``layers`` or in all."""
        ...


@dataclass(frozen=True, slots=True)
class _PlainQuantised:
    pool: PagedPool

    def gather(self, pages: torch.Tensor, scales: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
        quantise_pages(self.pool, pages, scales, sources=sources, targets=targets)

    def scatter(
        self,
        pages: torch.Tensor,
        scales: torch.Tensor,
        *,
        sources: Slots,
        targets: Slots,
        layers: slice | None = None,
    ) -> None:
        pool = self.pool
        if layers is not None:
            pool, pages, scales = pool[layers], pages[:, layers], scales[:, layers]
        dequantise_pages(pages, scales, pool, sources=sources, targets=targets)


@dataclass(frozen=True, slots=True)
class _PlainStates:
    persistent: Sequence[Layered]
    transient: Sequence[Layered]

    def copy(self, *, sources: Slots, targets: Slots) -> None:
        copy_states(self.persistent, sources=sources, targets=targets)

    def clear_persistent(self, slots: Slots) -> None:
        clear_states(self.persistent, slots=slots)

    def clear_transient(self, slots: Slots, *, layers: slice | None = None) -> None:
        fields = self.transient if layers is None else [field[layers] for field in self.transient]
        clear_states(fields, slots=slots)


class PoolCopies:
    """Copies between two pools, each group by a back end of its own (``hicache.moves``).

    What back ends prepare for a pool is made here, once. Those of kernels need an L2 that is pinned for the device.
    """

    def __init__(
        self, l1: L1Pool, l2: L2Pool | None, *, setting: str = "auto", staging_bytes: int = STAGING_BYTES
    ) -> None:
        """``setting`` names the back end of all groups; ``auto``: whichever is fastest for the group. Raises
        ConfigError, and ValueError for pools that a named back end cannot copy between.

        ``staging_bytes`` of the device for each direction, or one object where that is larger, if any group is staged.
        """
        self._l1 = l1
        self._l2 = l2  # its views are made for each call: none keeps the memory alive after the pool was closed
        self._setting = checked_copies(setting)
        self._staging = Staging(l1.device, size_bytes=staging_bytes)
        groups = [(index, group) for index, group in enumerate(l1.rank.groups) if group is not None]
        self._moves: dict[int, str] = {}  # by group, the name of its back end
        self._movers: dict[int, list[Mover]] = {}  # by group, one for each shard, as everything here
        self._quantised: dict[int, list[QuantisedMover]] = {}
        for index, group in groups if l2 is not None else ():
            assert l2 is not None
            if isinstance(group, PagedGroup) and group.stored_dtype is not None:
                self._quantised[index] = self._quantised_movers(l2, index)
            else:
                self._movers[index] = self._group_movers(l2, index)
        self._states = {index: self._state_slots(index) for index, group in groups if isinstance(group, StateGroup)}
        self.name = ", ".join(sorted(set(self._moves.values()))) or (
            REFERENCE.name if setting == "auto" else self._setting
        )

    def _group_movers(self, l2: L2Pool, group: int) -> list[Mover]:
        """By the best back end that can serve the pools of the group."""
        *best, last = self._choose(l2, group)
        for moves in best:
            try:
                return self._made_by(moves, l2, group)
            except (RuntimeError, ValueError) as error:  # no memory for staging, or strides that it cannot walk
                _LOG.warning("no copies of group %d through %r: %r", group, moves.name, error)
        return self._made_by(last, l2, group)

    def _made_by(self, moves: Moves, l2: L2Pool, group: int) -> list[Mover]:
        if isinstance(self._l1.rank.groups[group], StateGroup):
            parts = self._l1.state_parts(group)
            movers = [moves.of_states(of, l2.view(group, part), self._staging) for part, of in enumerate(parts)]
        else:
            pools = self._l1.page_parts(group)
            movers = [moves.of_pages(pool, l2.view(group, part), self._staging) for part, pool in enumerate(pools)]
        self._moves[group] = moves.name
        return movers

    def _choose(self, l2: L2Pool, group: int) -> Sequence[Moves]:
        objects = l2.view(group)
        if isinstance(self._l1.rank.groups[group], StateGroup):
            legs = list(state_legs(self._l1.state_parts(group)[0], objects))
        else:
            legs = list(page_legs(self._l1.page_parts(group)[0], objects))
        return choose_moves(
            self._setting,
            run_bytes=mean_run_bytes(legs),
            by_layer=not isinstance(legs[0].layered, torch.Tensor),
            device=self._l1.device,
        )

    def _quantised_movers(self, l2: L2Pool, group: int) -> list[QuantisedMover]:
        """By kernels where they are asked for, or found to be right on CUDA."""
        parts = self._l1.page_parts(group)
        is_kernel = self._setting in (KERNEL, STAGED)
        if not is_kernel and not (self._setting == "auto" and quantises_by_kernels(self._l1.device)):
            return [_PlainQuantised(pool) for pool in parts]
        from hicache.kernel_moves import KernelQuantised  # Triton is loaded only where its kernels run

        self._moves[group] = KERNEL
        return [KernelQuantised(pool, l2.view(group, part)) for part, pool in enumerate(parts)]

    def _state_slots(self, group: int) -> StateSlots:
        """By kernels where those move the group to L2, too."""
        fields = [self._l1.fields(group, transient=transient) for transient in (False, True)]
        if self._moves.get(group, self._setting) not in (KERNEL, STAGED):
            return _PlainStates(*fields)
        from hicache.kernel_moves import KernelStates

        return KernelStates(*fields)

    def backup(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        l2 = self._second_tier()
        for part, quantised in enumerate(self._quantised.get(group, ())):
            quantised.gather(l2.view(group, part), l2.scales(group, part), sources=sources, targets=targets)
        for part, mover in enumerate(self._movers.get(group, ())):
            mover.gather(l2.view(group, part), sources=sources, targets=targets)

    def load(self, group: int, sources: Sequence[int], targets: Sequence[int], *, layers: slice | None = None) -> None:
        """See Copies."""
        l2 = self._second_tier()
        for part, quantised in enumerate(self._quantised.get(group, ())):
            pages, scales = l2.view(group, part), l2.scales(group, part)
            quantised.scatter(pages, scales, sources=sources, targets=targets, layers=layers)
        for part, mover in enumerate(self._movers.get(group, ())):
            mover.scatter(l2.view(group, part), sources=sources, targets=targets, layers=layers)
        if group in self._states:
            self._states[group].clear_transient(targets, layers=layers)

    def snapshot(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        self._state(group).copy(sources=sources, targets=targets)

    def restore(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Copies."""
        self._state(group).copy(sources=sources, targets=targets)
        self._state(group).clear_transient(targets)

    def reset(self, group: int, targets: Sequence[int]) -> None:
        """See Copies."""
        self._state(group).clear_persistent(targets)
        self._state(group).clear_transient(targets)

    def clear(self, group: int, targets: Sequence[int]) -> None:
        """See Copies."""
        self._state(group).clear_transient(targets)

    def _state(self, group: int) -> StateSlots:
        if group not in self._states:
            raise UsageError(f"group {group} is not a state group of this L1")
        return self._states[group]

    def _second_tier(self) -> L2Pool:
        if self._l2 is None:
            raise UsageError("there is no L2 to copy from or to")
        return self._l2
