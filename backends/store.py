"""The one layer over a backend that hicached and the embedded L3 share: objects that are kept within bounds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from hicache.backends.attempt import Abandoned, Attempt
from hicache.backends.base import Backend, GetItem, Number, PutItem, Usage, WalkedObject
from hicache.backends.catalog import Catalog, tenant_of
from hicache.backends.events import Removal, Subscription
from hicache.backends.eviction import Evictor
from hicache.backends.key_table import NO_SLOT
from hicache.backends.leases import NO_LEASE
from hicache.backends.puts import Puts
from hicache.backends.reads import Reads
from hicache.backends.recency_writer import RecencyWriter
from hicache.backends.store_stats import Cause, Holds, Operation, StoreStats, TenantStats
from hicache.backends.tenant_limits import StoreLimits
from hicache.backends.tenant_usage import TenantUsage
from hicache.errors import ConfigError
from hicache.outcome import Outcome

if TYPE_CHECKING:
    from hicache.backends.tenant_keys import TenantKeys

FREE_SPACE_FLOOR_BYTES = 256 << 20
OBJECTS_MAX = 1 << 24  # unless the caller sets it: 2 GB of index
SNAPSHOT_KEYS = 1024  # objects that one step of a snapshot looks at
_LOOKED_UP = np.array([Outcome.ABSENT, Outcome.OK], dtype=object)  # by whether it was found


class ObjectStore:
    """Keeps a backend within its capacity, and its tenants within their limits. Thread-safe.

    The index is in memory, and lookups are answered by it alone: they never wait for the backend, whose calls are made
    without the lock. In a batch the first keys count as the most recently used: a page outlives the pages that follow.
    """

    is_indexed = True

    def __init__(
        self,
        backend: Backend,
        *,
        object_bytes_max: int,
        high_watermark: float = 0.95,
        low_watermark: float = 0.90,
        free_space_floor_bytes: int = FREE_SPACE_FLOOR_BYTES,
        objects_max: int = 0,
        limits: StoreLimits | None = None,
        keys: TenantKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes ``backend`` over, to be closed with the store. Reads its index: ready when this returns.

        ``objects_max`` bounds the memory of the index; 0: as many as fit into the capacity, OBJECTS_MAX at most.

        Raises ConfigError for watermarks or limits that contradict each other.
        """
        _check_settings(object_bytes_max, high_watermark, low_watermark, free_space_floor_bytes)
        self._backend = backend
        self._keys = keys
        self._object_bytes_max = object_bytes_max
        self._capacity_bytes = backend.usage().capacity_bytes
        self._objects_max_set = objects_max
        self._floor_bytes = free_space_floor_bytes
        self._clock = clock
        self._removal_lock = threading.Lock()  # taken before that of the catalog
        self._catalog = Catalog(
            backend.scan(),
            stored_bytes=backend.stored_bytes,
            capacity_bytes=self._capacity_bytes,
            limits=limits or StoreLimits(),
            clock=clock,
            wall_clock=wall_clock,
        )
        self._lock = self._catalog.lock
        self._evictor = Evictor(
            backend,
            self._catalog,
            removal_lock=self._removal_lock,
            high_watermark=high_watermark,
            low_watermark=low_watermark,
            floor_bytes=free_space_floor_bytes,
            objects_max=self._objects_max,
        )
        self._puts = Puts(
            backend,
            self._catalog,
            self._evictor,
            removal_lock=self._removal_lock,
            object_bytes_max=object_bytes_max,
            delete=self.delete,
            clock=clock,
        )
        self._reads = Reads(backend, self._catalog)
        self._recency = RecencyWriter(backend, self._catalog, clock=clock)
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def _objects_max(self) -> int:
        return self._objects_max_set or min(self._capacity_bytes // self._backend.stored_bytes(1), OBJECTS_MAX)

    @property
    def backend_name(self) -> str:
        """What it is stored in."""
        return self._backend.name

    @property
    def store_id(self) -> bytes:
        """Another one after the content was lost."""
        return self._backend.store_id

    def lookup(self, keys: Sequence[bytes], *, lease_s: float = 0.0) -> tuple[list[Outcome], int]:
        """OK or ABSENT for each key, and a lease on the present ones (NO_LEASE when ``lease_s`` is 0 or none is).

        Counts as use. Until the lease ends, is released or expires, its keys are neither evicted nor do they expire.
        All leases together protect at most LEASED_SHARE_MAX of the capacity, and those of a tenant so much of its
        share: the first keys get the lease, those beyond it are OK without.
        """
        with self._lock:
            catalog = self._catalog
            catalog.expire_holds()
            slots = catalog.use(keys)
            outcomes: list[Outcome] = _LOOKED_UP[(slots != NO_SLOT).view(np.uint8)].tolist()
            catalog.counters.begin(Operation.LOOKUP, len(outcomes))
            catalog.counters.end(Operation.LOOKUP, outcomes)
            lease_id = catalog.lease(keys, slots, expires_at_s=self._clock() + lease_s) if lease_s > 0 else NO_LEASE
        return outcomes, lease_id

    def renew(self, lease_id: int, *, lease_s: float) -> bool:
        """Let a lease end ``lease_s`` from now; False when it has ended."""
        with self._lock:
            now_s = self._clock()
            return self._catalog.leases.renew(lease_id, now_s=now_s, expires_at_s=now_s + lease_s)

    def release(self, lease_id: int) -> bool:
        """End a lease; False when it has ended."""
        with self._lock:
            return self._catalog.leases.release(lease_id, now_s=self._clock())

    def pin(self, keys: Sequence[bytes], *, pin_s: float) -> list[Outcome]:
        """Keep objects from eviction and expiry for ``pin_s``, whoever asked for it and whatever becomes of him.

        OK, ABSENT, or REFUSED at the limits of the tenant. Counts as use. A pin that is there is only made longer. Its
        owner may delete what is pinned; a restart ends all pins.
        """
        with self._lock:
            self._catalog.expire_holds()
            return self._catalog.pin(keys, expires_at_s=self._clock() + pin_s)

    def unpin(self, keys: Sequence[bytes]) -> list[Outcome]:
        """End pins; ABSENT for what is not pinned."""
        with self._lock:
            self._catalog.expire_holds()
            return [Outcome.OK if self._catalog.pins.unpin(key) else Outcome.ABSENT for key in keys]

    def watch(self, tenant: bytes, *, wake: Callable[[], None]) -> Subscription:
        """From now on every object of a tenant that is stored or removed is an event of the subscription."""
        subscription = Subscription(tenant, wake=wake)
        with self._lock:
            self._catalog.events.subscribe(subscription)
        return subscription

    def unwatch(self, subscription: Subscription) -> None:
        """End a subscription. Idempotent."""
        with self._lock:
            self._catalog.events.unsubscribe(subscription)

    def snapshot(self, tenant: bytes) -> Iterator[list[bytes]]:
        """What a tenant has, part by part; parts may be empty. Each is true at the moment at which it is taken.

        Who subscribed before the first part, and reads the events that have come after each part, has everything.
        Reads the index on the medium, so take a part in a thread that may wait.
        """
        keys_there = chain.from_iterable(batch.keys for batch in self._backend.scan())
        while part := list(islice(keys_there, SNAPSHOT_KEYS)):
            keys = [key for key in part if tenant_of(key) == tenant]
            with self._lock:
                found = self._catalog.residents.find(keys)  # what has expired, too: its removal will be an event
            yield [key for key, is_there in zip(keys, found, strict=True) if is_there]

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``. Counts as use."""
        outcomes = self._reads.read(items, Operation.GET)
        self._recency.write_when_due()
        return outcomes

    def verify(self, items: Sequence[GetItem]) -> list[Outcome]:
        """As ``get_into``, without counting as use: what is corrupt is dropped, and the order of eviction stays."""
        return self._reads.read(items, Operation.VERIFY)

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``. Evicts at the high watermark down to the low one, and at a quota of the tenant's own.

        What is there counts as used, also when it had expired. NO_SPACE when the room that this tenant may have is
        taken by what is leased or pinned, or when the file system is at its free space floor.
        """
        outcomes = self._puts.put(items)
        self._recency.write_when_due()
        return outcomes

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``. An object that is being written just now is deleted when it is complete.

        Leases and pins keep objects from eviction, not from their owner.
        """
        with self._removal_lock:
            with self._lock:
                self._catalog.counters.begin(Operation.DELETE, len(keys))
                self._catalog.doomed.update(key for key in keys if key in self._catalog.writing)
                sizes = {key: self._catalog.withdraw(key, Removal.DELETED) for key in dict.fromkeys(keys)}
            outcomes = [Outcome.IO_ERROR] * len(keys)
            try:
                outcomes = self._backend.delete(keys)
            finally:
                with self._lock:
                    lost = self._note_deleted(keys, outcomes, sizes)
            self._backend.forget(lost)
            return outcomes

    def _note_deleted(
        self, keys: Sequence[bytes], outcomes: list[Outcome], sizes: Mapping[bytes, int | None]
    ) -> list[tuple[bytes, int]]:
        """Count a delete, and take back what could not be deleted; a key that is there twice failed if it did once.
        Returns what should have been there and was not, with its size."""
        self._catalog.counters.end(Operation.DELETE, outcomes)
        failed = {key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.IO_ERROR}
        first = dict(zip(reversed(keys), reversed(outcomes), strict=True))
        known = [(key, size_bytes) for key, size_bytes in sizes.items() if size_bytes is not None]
        for key, size_bytes in known:
            settle = self._catalog.take_back if key in failed else self._catalog.removed
            settle(key, size_bytes, Cause.DELETED)
        return [(key, size_bytes) for key, size_bytes in known if first[key] is Outcome.ABSENT]

    def forget_tenant(self, tenant: bytes) -> bool:
        """Drop the key of the tenant with this digest: whatever is left of its objects, here or in a copy of the
        medium, is read by nobody any more, and CORRUPT here. False without encryption, or where it has no key.

        Deletes nothing. Raises OSError where that cannot be written down.
        """
        return self._keys is not None and self._keys.drop(tenant)

    def sweep(self) -> int:
        """Remove some of what has expired, or of what is above the low watermark since the high one was crossed.

        Returns 0 when there is nothing of either: ask again until then. What has expired is absent anyway. To be called
        now and then; also has times of use written where no get or put does.
        """
        self._recency.write_when_due()
        return self._evictor.lower() or (self._evictor.sweep() if self._catalog.limits.has_ttl else 0)

    def resize(self, capacity_bytes: int, attempt: Attempt | None = None) -> None:
        """Another capacity from now on, beside other calls; a smaller one evicts first. One at a time.

        Raises ConfigError when there is no room for it, or not for the largest object, BackendError when more than that
        is leased or pinned, and Abandoned when the caller has given up its ``attempt``; then the old one stays.
        """
        attempt = attempt or Attempt()
        if capacity_bytes < self._object_bytes_max:
            expected = f"at least the largest object, {self._object_bytes_max} bytes since the start"
            raise ConfigError("capacity_bytes", capacity_bytes, expected)
        before_bytes = self._capacity_bytes
        attempt.begin(partial(self._set_capacity, before_bytes))
        self._set_capacity(min(before_bytes, capacity_bytes))
        try:
            self._evictor.shrink(attempt.check)
            self._backend.resize(capacity_bytes, floor_bytes=self._floor_bytes)
            attempt.settle(partial(self._set_capacity, capacity_bytes))
        except Abandoned:
            try:
                self._backend.resize(before_bytes, floor_bytes=self._floor_bytes)
            finally:  # somebody else may have the space by now
                self._set_capacity(min(before_bytes, self._backend.usage().capacity_bytes))
            raise
        except BaseException:
            self._set_capacity(before_bytes)
            raise

    def _set_capacity(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._evictor.set_capacity(capacity_bytes, objects_max=self._objects_max)
        with self._lock:
            self._catalog.set_capacity(capacity_bytes)

    def numbers(self) -> Iterator[Number]:
        """See ``Backend.numbers``."""
        return self._backend.numbers()

    def problem(self) -> str:
        """See ``Backend.problem``."""
        return self._backend.problem()

    def stored_bytes(self, size_bytes: int) -> int:
        """See ``Backend.stored_bytes``."""
        return self._backend.stored_bytes(size_bytes)

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """See ``Backend.walk``. Neither counts as use nor waits for those who do."""
        return self._backend.walk(after=after, tenant=tenant)

    def set_limits(self, limits: StoreLimits) -> None:
        """Other limits of tenants from now on. A quota that became smaller holds from the tenant's next put on."""
        with self._lock:
            self._catalog.set_limits(limits)

    def usage(self) -> Usage:
        """Space as it is on the medium. O(1)."""
        return self._backend.usage()

    def tenant_usage(self, tenant: bytes) -> TenantUsage:
        """What the tenant with this digest has."""
        with self._lock:
            return self._catalog.residents.tenant_usage(tenant)

    def tenant_stats(self, tenants: Sequence[bytes]) -> list[TenantStats]:
        """What each of these has, and has lost."""
        with self._lock:
            self._catalog.expire_holds()
            return [self._catalog.tenant_stats(tenant) for tenant in tenants]

    def tenants(self) -> list[bytes]:
        """Digests of the tenants that have objects."""
        with self._lock:
            return self._catalog.residents.tenants()

    def stats(self) -> StoreStats:
        """The counters as they are now."""
        with self._lock:
            catalog = self._catalog
            catalog.expire_holds()
            holds = Holds(
                leases=len(catalog.leases),
                leased_keys=catalog.residents.held_count,
                pins=len(catalog.pins),
                pinned_bytes=catalog.pins.stored_bytes,
                watchers=catalog.events.watcher_count,
            )
            return catalog.counters.snapshot(
                holds,
                resident=catalog.resident,
                events_told=catalog.events.told_count,
                events_lost=catalog.events.lost_count,
            )

    def persist_recency(self) -> None:
        """Write the times of use that have come up since the last time; otherwise done now and then by a thread."""
        self._recency.write()

    def close(self) -> None:
        """Persist recency and close the backend. Idempotent, and nothing in a forked child.

        Where the medium is stuck in a time of use for TOUCH_CLOSE_S, those that wait are given up.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._recency.close()
        finally:
            self._backend.close()


def _check_settings(object_bytes_max: int, high: float, low: float, floor_bytes: int) -> None:
    if object_bytes_max < 1:
        raise ConfigError("object_bytes_max", object_bytes_max, "at least 1")
    if not 0 < high <= 1:
        raise ConfigError("high_watermark", high, "more than 0 and at most 1")
    if not 0 < low < high:
        raise ConfigError("low_watermark", low, f"more than 0 and less than high_watermark = {high}")
    if floor_bytes < 0:
        raise ConfigError("free_space_floor_bytes", floor_bytes, "0 or more")
