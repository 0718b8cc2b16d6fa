"""Reading a batch from a store: what the index knows is asked for, and what is not there or is wrong is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.backends.base import Backend, GetItem
from hicache.backends.catalog import Catalog, Read
from hicache.backends.store_stats import Operation
from hicache.outcome import Outcome


class Reads:
    """The way of objects out of a backend. Thread-safe."""

    def __init__(self, backend: Backend, catalog: Catalog) -> None:
        self._backend = backend
        self._catalog = catalog

    def read(self, items: Sequence[GetItem], operation: Operation) -> list[Outcome]:
        """See ``Backend.get_into``. A GET counts as use, a VERIFY does not."""
        with self._catalog.lock:
            known = self._catalog.find([item.key for item in items])
            reading = Read({item.key for item, is_known in zip(items, known, strict=True) if is_known})
            self._catalog.reads.append(reading)
            self._catalog.counters.begin(operation, len(items))
        outcomes = [Outcome.IO_ERROR] * len(items)
        lost: list[tuple[bytes, int]] = []
        try:
            read = iter(self._backend.get_into([item for item, is_known in zip(items, known, strict=True) if is_known]))
            outcomes = [next(read) if is_known else Outcome.ABSENT for is_known in known]
        finally:
            with self._catalog.lock:
                lost = self._note_read(items, outcomes, reading, operation)
                self._catalog.reads.remove(reading)
        self._backend.forget(lost)
        return outcomes

    def _note_read(
        self, items: Sequence[GetItem], outcomes: list[Outcome], reading: Read, operation: Operation
    ) -> list[tuple[bytes, int]]:
        """Count it, and forget what is not there or was dropped, unless it has been stored anew meanwhile. Returns what
        is not there, with its size."""
        self._catalog.counters.end(operation, outcomes)
        lost: list[tuple[bytes, int]] = []
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome in (Outcome.ABSENT, Outcome.CORRUPT) and item.key in reading.keys:
                size_bytes = self._catalog.lose(item.key)
                if outcome is Outcome.ABSENT and size_bytes is not None:
                    lost.append((item.key, size_bytes))
        if operation is Operation.GET:
            read = [item for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.OK]
            self._catalog.refresh([item.key for item in read])
            self._catalog.counters.bytes_read += sum(item.target.nbytes for item in read)
        return lost
