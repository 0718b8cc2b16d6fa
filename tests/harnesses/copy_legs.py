"""The copies of an engine that the fault matrix goes through: each leg as one job, over every back end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache.copies import Copies, PoolCopies
from hicache.jobs import CopyItem, CopyJob, CopyKind
from tests.engine.conftest import Rank
from tests.engine.specs import as_bytes, fill_with_noise

SOURCES, TARGETS = (3, 1), (2, 0)
PAGES, STATES = 0, 2  # groups of the rank
STAGING_BYTES = 1100


@dataclass(frozen=True, slots=True)
class Leg:
    """One way of a copy. ``is_beside``: in a thread of its own, beside compute."""

    name: str
    kind: CopyKind
    group: int
    is_beside: bool = False
    options: tuple[tuple[str, bool], ...] = ()

    def job(self, job_id: int) -> CopyJob:
        """Two slots of the group."""
        targets = SOURCES if self.kind is CopyKind.RESET else TARGETS
        items = tuple(CopyItem(self.group, *pair) for pair in zip(SOURCES, targets, strict=True))
        return CopyJob(job_id, self.kind, items, **dict(self.options))


LEGS = {
    leg.name: leg
    for leg in (
        Leg("backup", CopyKind.BACKUP, PAGES, is_beside=True),
        Leg("load", CopyKind.LOAD, PAGES),
        Leg("load by layer", CopyKind.LOAD, PAGES, options=(("by_layer", True),)),
        Leg("load beside compute", CopyKind.LOAD, PAGES, is_beside=True, options=(("beside_compute", True),)),
        Leg("snapshot", CopyKind.SNAPSHOT, STATES),
        Leg("restore", CopyKind.RESTORE, STATES),
        Leg("reset", CopyKind.RESET, STATES),
    )
}
BACK_ENDS = ("reference", "direct", "staged", "kernel")


def back_ends_of(leg: Leg) -> tuple[str, ...]:
    """Those that a leg may go through; states within L1 are copied in one way."""
    return BACK_ENDS if leg.group == PAGES else BACK_ENDS[:1]


def copies_of(rank: Rank, back_end: str) -> PoolCopies:
    """Between the pools of the rank; staged, with room for one object at a time."""
    return PoolCopies(rank.l1, rank.l2, setting=back_end, staging_bytes=STAGING_BYTES)


def fill(rank: Rank) -> None:
    """Noise everywhere."""
    tensors = [*rank.l1.paged.values(), *rank.l1.state[STATES].values()]
    for seed, tensor in enumerate([*tensors, rank.l2.view(PAGES)]):
        fill_with_noise(tensor, seed)


def is_copied(rank: Rank, leg: Leg, before: dict[str, list[bytes]]) -> bool:
    """Whether the targets have what the sources had, and the sources have it still."""
    after = contents(rank)
    if leg.kind is CopyKind.RESET:
        return not any(any(after["states"][slot]) for slot in SOURCES)
    source, target = {
        CopyKind.BACKUP: ("l1", "l2"),
        CopyKind.LOAD: ("l2", "l1"),
        CopyKind.SNAPSHOT: ("states", "states"),
        CopyKind.RESTORE: ("states", "states"),
    }[leg.kind]
    pairs = zip(SOURCES, TARGETS, strict=True)
    return all(before[source][one] == after[target][other] == after[source][one] for one, other in pairs)


def contents(rank: Rank) -> dict[str, list[bytes]]:
    """The bytes of every slot: pages in L1 and L2, persistent fields of states."""
    fields = [field.name for field in rank.spec.groups[STATES].persistent_fields]  # type: ignore[union-attr]  # a state group
    return {
        "l1": [as_bytes(rank.l1.paged[PAGES][:, slot]) for slot in range(6)],
        "l2": [as_bytes(rank.l2.view(PAGES)[slot]) for slot in range(6)],
        "states": [b"".join(as_bytes(rank.l1.state[STATES][name][:, slot]) for name in fields) for slot in range(6)],
    }


class MeetingCopies:
    """The copies of ``inner``, each of which ``meet`` may hold up, or stop after some slots by an error."""

    name = "faulty"

    def __init__(self, inner: Copies, meet: Callable[[], Exception | None]) -> None:
        self._inner = inner
        self._meet = meet

    def __getattr__(self, leg: str) -> Callable[..., None]:
        copy = getattr(self._inner, leg)

        def met(group: int, *slots: Sequence[int], **options: Any) -> None:  # Any: layers, of loads
            error = self._meet()
            if error is None:
                copy(group, *slots, **options)
                return
            if isinstance(error, HalfDone):
                copy(group, *(some[: len(some) // 2] for some in slots), **options)
            raise error

        return met


class HalfDone(RuntimeError):
    """A device that stops in the middle."""


ERRORS: dict[str, Callable[[], Exception]] = {
    "short": lambda: HalfDone("an illegal memory access was encountered"),
    "EIO": lambda: RuntimeError("an illegal memory access was encountered"),
    "ENOSPC": lambda: torch.OutOfMemoryError("out of memory"),
}
