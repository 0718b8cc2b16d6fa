"""Slots of an engine that are being copied from or to, by the jobs that do it."""

from __future__ import annotations

from collections.abc import Iterable

from hicache.slot_request import EngineSlot


class SlotUse:
    """An engine may give a slot to somebody else while a job still reads it: this tells which jobs to wait for.

    With ``one_numbering`` slot ``n`` of one group lies on the same bytes as slot ``n`` of any other.
    """

    def __init__(self, *, one_numbering: bool = False) -> None:
        self._one_numbering = one_numbering
        self._jobs: dict[EngineSlot, set[int]] = {}
        self._reading: set[int] = set()

    def slot(self, group: int, index: int) -> EngineSlot:
        """A slot, such that two are equal when they share bytes."""
        return (0 if self._one_numbering else group), index

    def begin(self, job_id: int, slots: Iterable[EngineSlot], *, reads: bool) -> None:
        """A job reads these slots, or writes to them."""
        for slot in slots:
            self._jobs.setdefault(slot, set()).add(job_id)
        if reads:
            self._reading.add(job_id)

    def end(self, job_id: int, slots: Iterable[EngineSlot]) -> None:
        """It does not any more."""
        self._reading.discard(job_id)
        for slot in slots:
            jobs = self._jobs[slot]
            jobs.discard(job_id)
            if not jobs:
                del self._jobs[slot]

    def touching(self, slots: Iterable[EngineSlot]) -> set[int]:
        """The jobs that read or write any of these slots."""
        if not self._jobs:
            return set()
        return {job_id for slot in slots for job_id in self._jobs.get(slot, ())}

    @property
    def reading(self) -> set[int]:
        """The jobs that read any slot."""
        return set(self._reading)

    @property
    def slots(self) -> set[EngineSlot]:
        """All slots that any job touches."""
        return set(self._jobs)
