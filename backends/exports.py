"""A namespace out of a store into an export, and out of an export into a store: any backend, running or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hicache.backends.archive import ArchiveEnd, ArchiveHeader, ArchiveReader, encode_end, encode_header
from hicache.backends.archive import encode_object_head as encode_head
from hicache.backends.base import PutItem
from hicache.backends.scrub import READ_BYTES, READ_OBJECTS, Part, ReadableStore, read_objects
from hicache.outcome import Outcome
from hicache.tenancy import TENANT_BYTES, physical_key


def export_namespace(
    store: ReadableStore, header: ArchiveHeader, *, tenant: bytes, tag: int, after: bytes = b""
) -> Iterator[list[bytes | memoryview]]:
    """The parts of an export, some at a time; what is yielded is valid until the next.

    Objects are read and verified without counting as use; one that does not verify is dropped and left out. ``after``
    is the key, without tenant, of the last object that is exported already, from this store. Raises BackendError.
    """
    yield [encode_header(header)]
    objects = payload_bytes = 0
    start = physical_key(tenant, after) if after else b""
    for read in read_objects(store, after=start, part=Part(tenant, tag)):
        parts: list[bytes | memoryview] = []
        for found, payload, outcome in zip(read.objects, read.payloads, read.outcomes, strict=True):
            if outcome is Outcome.OK:
                parts += [encode_head(found.key[TENANT_BYTES:], payload), payload]
                objects += 1
                payload_bytes += payload.nbytes
        yield parts
    yield [encode_end(ArchiveEnd(objects, payload_bytes))]


class PuttableStore(Protocol):
    """What is imported into."""

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``ObjectStore.put``."""
        ...


@dataclass(slots=True)
class ImportProgress:
    """How far an import has come. ``outcomes`` of all objects that were read whole; EXISTS was there already."""

    objects: int = 0
    payload_bytes: int = 0
    damaged: int = 0  # in the file: left out
    too_large: int = 0  # for this store: left out
    outcomes: Counter[Outcome] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        """Whether everything in the file is in the store."""
        return not self.damaged and not self.too_large and set(self.outcomes) <= {Outcome.OK, Outcome.EXISTS}


def import_namespace(
    store: PuttableStore, reader: ArchiveReader, *, tenant: bytes, tag: int, object_bytes_max: int
) -> Iterator[ImportProgress]:
    """Puts the objects of an export under ``tenant``; yields how far it has come (always the same object).

    Done again it passes over what is there, so an import that broke off is done again. Raises ArchiveError.
    """
    progress = ImportProgress()
    batch: list[PutItem] = []
    batch_bytes = 0

    def flush() -> None:
        progress.outcomes.update(store.put(batch) if batch else [])
        batch.clear()

    for found in reader:
        progress.objects += 1
        progress.payload_bytes += found.size_bytes
        if found.size_bytes > object_bytes_max:
            progress.too_large += 1
        elif found.payload is None:
            progress.damaged += 1
        else:
            batch.append(PutItem(physical_key(tenant, found.key), memoryview(bytes(found.payload)), tag))
            batch_bytes += found.size_bytes
        if batch_bytes >= READ_BYTES or len(batch) >= READ_OBJECTS:
            flush()
            batch_bytes = 0
            yield progress
    flush()
    yield progress
