"""A tier of memory in front of a backend: what is read again and again is copied from here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hicache.backends.base import Backend, GetItem, Number, PutItem, StoredBatch, Usage, WalkedObject
from hicache.backends.helpers import Helpers
from hicache.backends.ram_residents import RamResidents, RamStats, Resident
from hicache.backends.shared_store import SharedBackend
from hicache.backends.verified_copy import hash_then_copy
from hicache.outcome import Outcome


class RamTier:
    """Implements ``Backend`` by another one that nobody else changes. Every hit is verified while it is copied.

    Objects are taken in when they are read for the second time within a capacity's worth of other objects (a put is a
    first time): the backend then reads and verifies them in the tier's own memory, where no client can write, and they
    are copied on. What is deleted, corrupt or put anew leaves the tier before the call returns.
    """

    def __init__(self, inner: Backend, *, capacity_bytes: int) -> None:
        """Takes ``inner`` over, to be closed with the tier. The memory is taken as it is used."""
        self._inner = inner
        self._residents = RamResidents(capacity_bytes)
        self._helpers = Helpers("hicache-ram")
        self.name = inner.name

    @property
    def store_id(self) -> bytes:
        """That of the backend."""
        return self._inner.store_id

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``."""
        outcomes: dict[int, Outcome] = {}
        found = {
            position: resident
            for position, item in enumerate(items)
            if (resident := self._residents.acquire(item.key, item.target.nbytes)) is not None
        }
        try:
            current = self._current([items[position].key for position in found]) if found else []
            hits = [position for position, outcome in zip(found, current, strict=True) if outcome is Outcome.OK]
            outcomes = {
                position: outcome for position, outcome in zip(found, current, strict=True) if not outcome.is_ok
            }
            is_copied = self._helpers.map(
                lambda position: self._copy(found[position], items[position].target),
                hits,
                size_bytes=sum(items[position].target.nbytes for position in hits),
            )
            outcomes |= {position: Outcome.OK for position, is_right in zip(hits, is_copied, strict=True) if is_right}
        finally:
            for position, resident in found.items():
                self._residents.release(resident, was_read=outcomes.get(position) is Outcome.OK)
        missing = [position for position in range(len(items)) if position not in outcomes]
        if missing:
            read = self._read([items[position] for position in missing])
            outcomes.update(zip(missing, read, strict=True))
        return [outcomes[position] for position in range(len(items))]

    def _current(self, keys: Sequence[bytes]) -> list[Outcome]:
        """OK where the tier may answer; otherwise what to answer instead."""
        return [Outcome.OK] * len(keys)

    def _copy(self, resident: Resident, target: memoryview) -> bool:
        """False: the memory has changed by itself; the backend still has the object."""
        if hash_then_copy(resident.view, target, key=resident.key) == resident.checksum:
            return True
        self._residents.drop(resident.key, is_corrupt=True)
        return False

    def _read(self, items: Sequence[GetItem]) -> list[Outcome]:
        """From the backend: into the tier and on to the target what is to stay, straight into the target the rest."""
        rooms = [self._residents.reserve(item.key, item.target.nbytes) for item in items]
        try:
            outcomes = self._inner.get_into(
                [
                    item if room is None else GetItem(item.key, room.view)
                    for item, room in zip(items, rooms, strict=True)
                ]
            )
            for position, (item, outcome) in enumerate(zip(items, outcomes, strict=True)):
                room = rooms[position]
                if room is not None and outcome is Outcome.OK:
                    checksum = hash_then_copy(room.view, item.target, key=item.key)
                    rooms[position] = None
                    self._residents.publish(room, checksum)
                elif outcome in (Outcome.ABSENT, Outcome.CORRUPT):
                    self._residents.drop(item.key)
        finally:
            for room in rooms:
                if room is not None:
                    self._residents.abandon(room)
        return outcomes

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``. The tier takes nothing in: most of what is stored is never read."""
        outcomes = self._inner.put(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is Outcome.OK:
                self._residents.drop(item.key)
                self._residents.note(item.key, item.payload.nbytes)
        return outcomes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``Backend.contains``."""
        return self._inner.contains(keys)

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``."""
        try:
            return self._inner.delete(keys)
        finally:
            for key in keys:
                self._residents.drop(key)

    def forget(self, gone: Sequence[tuple[bytes, int]]) -> None:
        """See ``Backend.forget``."""
        self._inner.forget(gone)

    def touch(self, used: Sequence[tuple[bytes, float]]) -> None:
        """See ``Backend.touch``."""
        self._inner.touch(used)

    def scan(self) -> Iterator[StoredBatch]:
        """See ``Backend.scan``."""
        return self._inner.scan()

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """See ``Backend.walk``."""
        return self._inner.walk(after=after, tenant=tenant)

    def usage(self) -> Usage:
        """Of the backend."""
        return self._inner.usage()

    def numbers(self) -> Iterator[Number]:
        """See ``Backend.numbers``."""
        return self._inner.numbers()

    def problem(self) -> str:
        """See ``Backend.problem``."""
        return self._inner.problem()

    def stored_bytes(self, size_bytes: int) -> int:
        """See ``Backend.stored_bytes``."""
        return self._inner.stored_bytes(size_bytes)

    def free_bytes(self) -> int | None:
        """See ``Backend.free_bytes``."""
        return self._inner.free_bytes()

    def resize(self, capacity_bytes: int, *, floor_bytes: int) -> None:
        """See ``Backend.resize``: that of the backend, not of the tier."""
        self._inner.resize(capacity_bytes, floor_bytes=floor_bytes)

    def ram_stats(self) -> RamStats:
        """Of the tier."""
        return self._residents.stats()

    def close(self) -> None:
        """See ``Backend.close``."""
        self._helpers.close()
        self._inner.close()
        self._residents.close()


class SharedRamTier(RamTier):
    """Implements ``SharedBackend``: the tier answers only for what the store itself says is there at that moment.

    So an object that another machine deleted is absent here too, what is read here stays recent there, and a store
    that cannot be asked is UNAVAILABLE, as without the tier (docs/decisions/0011).
    """

    def __init__(self, inner: SharedBackend, *, capacity_bytes: int) -> None:
        """As of RamTier."""
        super().__init__(inner, capacity_bytes=capacity_bytes)
        self._store = inner

    def find(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``SharedBackend.find``."""
        outcomes = self._store.find(keys)
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is Outcome.ABSENT:
                self._residents.drop(key)
        return outcomes

    def _current(self, keys: Sequence[bytes]) -> list[Outcome]:
        return self.find(keys)

    def numbers(self) -> Iterator[Number]:
        """Those of the store, and the tier's own."""
        yield from self._store.numbers()
        stats = self.ram_stats()
        yield Number("hicache_ram_capacity_bytes", "Size of the RAM tier.", stats.capacity_bytes)
        yield Number("hicache_ram_used_bytes", "Memory of the RAM tier in use, in whole pages.", stats.used_bytes)
        yield Number("hicache_ram_objects", "Objects in the RAM tier.", stats.objects)
        counters = (
            ("hicache_ram_hits", "Objects read from the RAM tier.", stats.hits),
            ("hicache_ram_misses", "Objects that were read and not there.", stats.misses),
            ("hicache_ram_hit_bytes", "Payload read from the RAM tier.", stats.hit_bytes),
            ("hicache_ram_admitted_objects", "Objects taken in.", stats.admitted),
            ("hicache_ram_evicted_objects", "Objects that made room for others.", stats.evicted),
            ("hicache_ram_corrupt_objects", "Objects whose memory had changed.", stats.corrupt),
        )
        for name, description, value in counters:
            yield Number(name, description, value, is_counter=True)
