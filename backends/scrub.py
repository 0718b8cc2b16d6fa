"""Going through all that a store has, in bounded memory: to verify it, to count it by namespace, to drop a part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hicache.backends.base import GetItem, WalkedObject
from hicache.outcome import Outcome
from hicache.tenancy import TENANT_BYTES

READ_BYTES = 8 << 20  # at a time; one object where that is larger
READ_OBJECTS = 128  # at a time


@dataclass(frozen=True, slots=True)
class Part:
    """Which objects of a store: those of a tenant, by its digest, of a namespace, by its tag, or of both; else all."""

    tenant: bytes = b""
    tag: int | None = None

    def has(self, found: WalkedObject) -> bool:
        """Whether this is one of them."""
        return found.key.startswith(self.tenant) and self.tag in (None, found.namespace_tag)


EVERYTHING = Part()


class ReadableStore(Protocol):
    """What is read here: an ObjectStore, or what is like one. Thread-safe and blocking."""

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """See ``Backend.walk``."""
        ...

    def verify(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``ObjectStore.verify``."""
        ...


@dataclass(slots=True)
class ScrubProgress:
    """How far a scrub has come: counts of objects, payload read, and where another one goes on."""

    after: bytes = b""
    objects: int = 0
    payload_bytes: int = 0
    corrupt: int = 0  # dropped
    unreadable: int = 0  # the medium failed: they stay
    gone: int = 0  # between being listed and being read: evicted, expired, deleted

    def note(self, outcome: Outcome, size_bytes: int) -> None:
        """One object has been read."""
        self.objects += 1
        match outcome:
            case Outcome.OK:
                self.payload_bytes += size_bytes
            case Outcome.CORRUPT:
                self.corrupt += 1
            case Outcome.ABSENT | Outcome.SIZE_MISMATCH:
                self.gone += 1
            case _:
                self.unreadable += 1

    @property
    def is_good(self) -> bool:
        """Whether nothing was wrong so far."""
        return self.corrupt == self.unreadable == 0


def scrub(store: ReadableStore, *, after: bytes = b"", part: Part = EVERYTHING) -> Iterator[ScrubProgress]:
    """Verifies every object of this part behind ``after``, and drops what is corrupt, as a get does.

    Yields how far it has come (always the same object) after each READ_BYTES, and at least once: whoever iterates sets
    the pace. Neither order of eviction nor leases change. Raises BackendError where the store cannot be listed.
    """
    progress = ScrubProgress(after)
    yield progress
    for read in read_objects(store, after=after, part=part):
        for found, outcome in zip(read.objects, read.outcomes, strict=True):
            progress.note(outcome, found.size_bytes)
        progress.after = read.after
        yield progress


@dataclass(frozen=True, slots=True)
class ReadObjects:
    """Some objects with their payloads, which are valid until the next ones are asked for."""

    objects: list[WalkedObject]
    payloads: list[memoryview]
    outcomes: list[Outcome]
    after: bytes  # the last key that was listed, of the part or not


def read_objects(store: ReadableStore, *, after: bytes = b"", part: Part = EVERYTHING) -> Iterator[ReadObjects]:
    """Objects and their bytes in the order of the store, a bounded number at a time; the buffer is the only memory."""
    buffer = bytearray(READ_BYTES)
    for batch in store.walk(after=after, tenant=part.tenant):
        for group, last in _groups(batch, part):
            size_bytes = sum(found.size_bytes for found in group)
            if size_bytes > len(buffer):
                buffer = bytearray(size_bytes)
            payloads = _slices(memoryview(buffer), group)
            items = [GetItem(found.key, payload) for found, payload in zip(group, payloads, strict=True)]
            yield ReadObjects(group, payloads, store.verify(items) if items else [], last)


def _groups(batch: list[WalkedObject], part: Part) -> Iterator[tuple[list[WalkedObject], bytes]]:
    """Those of the part, as many as are read at a time, and the last key that was looked at with them."""
    group: list[WalkedObject] = []
    size_bytes = 0
    last = b""
    for found in batch:
        if part.has(found):
            if group and (size_bytes + found.size_bytes > READ_BYTES or len(group) >= READ_OBJECTS):
                yield group, last
                group, size_bytes = [], 0
            group.append(found)
            size_bytes += found.size_bytes
        last = found.key
    if last:
        yield group, last


def _slices(buffer: memoryview, group: Iterable[WalkedObject]) -> list[memoryview]:
    slices: list[memoryview] = []
    start = 0
    for found in group:
        slices.append(buffer[start : start + found.size_bytes])
        start += found.size_bytes
    return slices


@dataclass(slots=True)
class NamespaceUsage:
    """What one tenant has of one namespace."""

    objects: int = 0
    payload_bytes: int = 0
    stored_bytes: int = 0  # what that takes of the capacity
    used_at_s: float = 0.0  # the latest time of use, as far as it is on the medium


@dataclass(slots=True)
class Inventory:
    """What a store has by (digest of the tenant, tag of the namespace)."""

    usage: dict[tuple[bytes, int], NamespaceUsage] = field(default_factory=dict)

    def add(self, batch: Iterable[WalkedObject], stored_bytes: Callable[[int], int]) -> None:
        """Count what ``walk`` tells."""
        for found in batch:
            key = (found.key[:TENANT_BYTES], found.namespace_tag)
            usage = self.usage.get(key)
            if usage is None:
                usage = self.usage[key] = NamespaceUsage()
            usage.objects += 1
            usage.payload_bytes += found.size_bytes
            usage.stored_bytes += stored_bytes(found.size_bytes)
            usage.used_at_s = max(usage.used_at_s, found.used_at_s)


class DeletableStore(ReadableStore, Protocol):
    """One whose objects can be dropped, too."""

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``."""
        ...


@dataclass(slots=True)
class DropProgress:
    """How far a drop has come."""

    objects: int = 0
    payload_bytes: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)


def drop(store: DeletableStore, *, part: Part, keys_max: int = 256) -> Iterator[DropProgress]:
    """Deletes this part, ``keys_max`` objects at a time; yields how far it has come, at least once.

    Leases and pins do not keep what its owner drops. Objects that are stored meanwhile may stay.
    """
    progress = DropProgress()
    yield progress
    for batch in store.walk(tenant=part.tenant):
        chosen = [found for found in batch if part.has(found)]
        for start in range(0, len(chosen), keys_max):
            some = chosen[start : start + keys_max]
            outcomes = store.delete([found.key for found in some])
            progress.outcomes.update(outcomes)
            for found, outcome in zip(some, outcomes, strict=True):
                if outcome is Outcome.OK:
                    progress.objects += 1
                    progress.payload_bytes += found.size_bytes
            yield progress
