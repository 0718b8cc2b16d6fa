"""What the objects of a file store take, and what is set aside for those that are being written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hicache.backends.base import StoredBatch, Usage
from hicache.backends.file_layout import stored_bytes_of


class Counts(NamedTuple):
    """Of objects; also differences of such."""

    objects: int = 0
    payload_bytes: int = 0
    stored_bytes: int = 0

    def plus(self, other: Counts) -> Counts:
        """Their sum, field by field."""
        return Counts(
            self.objects + other.objects,
            self.payload_bytes + other.payload_bytes,
            self.stored_bytes + other.stored_bytes,
        )

    def minus(self, other: Counts) -> Counts:
        """Their difference, field by field."""
        return self.plus(Counts(-other.objects, -other.payload_bytes, -other.stored_bytes))


_NOTHING = Counts()


def _nobody() -> tuple[Counts, int]:
    return _NOTHING, 0


class Accounts:
    """Thread-safe. What a walk over the files counted, and what this process and others changed since then.

    ``others`` tells the changes of other processes, and what they keep in spare files.
    """

    def __init__(self, capacity_bytes: int, *, others: Callable[[], tuple[Counts, int]] = _nobody) -> None:
        self.capacity_bytes = capacity_bytes
        self._others = others
        self._lock = threading.Lock()
        self._found = self._own = _NOTHING
        self._reserved_bytes = 0

    @property
    def own(self) -> Counts:
        """What this process added, less what it removed, since it opened the store."""
        return self._own

    def settle(self, found: Counts, changes: Counts) -> None:
        """A walk has counted ``found``, when ``own`` and ``others`` together told ``changes``."""
        with self._lock:
            self._found = found.minus(changes)

    def add(self, change: Counts) -> None:
        """Objects came or went by this process."""
        with self._lock:
            self._own = self._own.plus(change)

    def total(self) -> Counts:
        """What is stored, by whomever. Not below zero, also while what others tell is late."""
        changes, _ = self._others()
        with self._lock:
            total = self._found.plus(self._own)
        if changes is not _NOTHING:
            total = total.plus(changes)
        return total if min(total) >= 0 else Counts(*(max(number, 0) for number in total))

    def set_capacity(self, capacity_bytes: int) -> bool:
        """Another capacity from now on; False when more than it is stored or set aside, and then the old one stays."""
        changes, _ = self._others()
        with self._lock:
            taken_bytes = self._found.stored_bytes + self._own.stored_bytes + changes.stored_bytes
            if taken_bytes + self._reserved_bytes > capacity_bytes:
                return False
            self.capacity_bytes = capacity_bytes
            return True

    def usage(self) -> Usage:
        """See ``Backend.usage``."""
        return Usage(*self.total(), self.capacity_bytes)

    def reserve(self, stored_bytes: int) -> int | None:
        """Set space aside; returns what is left for spare files of this process, None when it does not fit."""
        changes, others_spare_bytes = self._others()
        with self._lock:
            total_bytes = self._found.stored_bytes + self._own.stored_bytes + changes.stored_bytes
            left_bytes = self.capacity_bytes - total_bytes - self._reserved_bytes - stored_bytes
            if left_bytes < 0:
                return None
            self._reserved_bytes += stored_bytes
            return max(left_bytes - others_spare_bytes, 0)

    def unreserve(self, stored_bytes: int) -> None:
        """The object is stored, or will not be."""
        with self._lock:
            self._reserved_bytes -= stored_bytes


def counts_of(found: Iterable[StoredBatch]) -> Counts:
    """What these objects take."""
    counts = Counts()
    for batch in found:
        stored_bytes = stored_bytes_of(batch.sizes_bytes)
        counts = counts.plus(Counts(len(batch.keys), int(batch.sizes_bytes.sum()), int(stored_bytes.sum())))
    return counts
