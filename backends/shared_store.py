"""The layer over a backend that others share and that evicts by itself: nothing is remembered here, all is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from hicache.backends.attempt import Abandoned, Attempt
from hicache.backends.base import Backend, GetItem, Number, PutItem, Usage, WalkedObject
from hicache.backends.events import Subscription
from hicache.backends.leases import NO_LEASE, KeyLeases
from hicache.backends.store_stats import Holds, Operation, StoreCounters, StoreStats, TenantStats
from hicache.backends.tenant_limits import StoreLimits
from hicache.backends.tenant_usage import TenantUsage
from hicache.errors import ConfigError
from hicache.outcome import Outcome


class SharedBackend(Backend, Protocol):
    """A backend whose content others change: objects come and go without a call from here."""

    def find(self, keys: Sequence[bytes]) -> list[Outcome]:
        """OK for what is present, and then it counts as used and is protected from eviction for a while.

        ABSENT, or UNAVAILABLE where it cannot be told or the object cannot be reached.
        """
        ...


class SharedStore:
    """What ObjectStore is for a backend of one daemon, without an index and without eviction. Thread-safe.

    An index in memory would hide what other daemons put, and promise what the store has evicted. Leases are those of
    the backend: a lookup starts them, ``renew`` looks the keys up again, and ``release`` leaves them to run out. There
    are no pins, no events and no limits of tenants: what the store keeps, others decide too.
    """

    is_indexed = False

    def __init__(
        self, backend: SharedBackend, *, object_bytes_max: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes ``backend`` over, to be closed with the store. Raises ConfigError for a limit that stores nothing."""
        if object_bytes_max < 1:
            raise ConfigError("object_bytes_max", object_bytes_max, "at least 1")
        self._backend = backend
        self._object_bytes_max = object_bytes_max
        self._clock = clock
        self._lock = threading.Lock()  # everything below; never held in a call of the backend
        self._leases = KeyLeases()
        self._counters = StoreCounters()
        self._is_closed = False

    @property
    def store_id(self) -> bytes:
        """Another one after the content was lost."""
        return self._backend.store_id

    def lookup(self, keys: Sequence[bytes], *, lease_s: float = 0.0) -> tuple[list[Outcome], int]:
        """An outcome for each key, and a lease on the present ones (NO_LEASE when ``lease_s`` is 0 or none is).

        The backend protects them for as long as it is set to, whatever ``lease_s`` is: renew before that.
        """
        outcomes = self._counted(Operation.LOOKUP, len(keys), lambda: self._backend.find(keys))
        present = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK]
        with self._lock:
            now_s = self._clock()
            self._leases.expire(now_s=now_s)
            lease_id = self._leases.grant(present, expires_at_s=now_s + lease_s) if lease_s > 0 else NO_LEASE
        return outcomes, lease_id

    def renew(self, lease_id: int, *, lease_s: float) -> bool:
        """Let a lease end ``lease_s`` from now; False when it has ended, or something under it is gone."""
        with self._lock:
            now_s = self._clock()
            keys = self._leases.keys(lease_id)
            is_renewed = self._leases.renew(lease_id, now_s=now_s, expires_at_s=now_s + lease_s)
        if not is_renewed:
            return False
        if all(outcome is Outcome.OK for outcome in self._backend.find(keys)):
            return True
        self.release(lease_id)
        return False

    def release(self, lease_id: int) -> bool:
        """End a lease; False when it has ended."""
        with self._lock:
            return self._leases.release(lease_id, now_s=self._clock())

    def pin(self, keys: Sequence[bytes], *, pin_s: float) -> list[Outcome]:
        """REFUSED for all."""
        return [Outcome.REFUSED] * len(keys)

    def unpin(self, keys: Sequence[bytes]) -> list[Outcome]:
        """ABSENT for all."""
        return [Outcome.ABSENT] * len(keys)

    def watch(self, tenant: bytes, *, wake: Callable[[], None]) -> Subscription:
        """A subscription that is never told anything."""
        return Subscription(tenant, wake=wake)

    def unwatch(self, subscription: Subscription) -> None:
        """Nothing."""

    def snapshot(self, tenant: bytes) -> Iterator[list[bytes]]:
        """Nothing."""
        return iter(())

    def sweep(self) -> int:
        """Nothing: the backend has its own time to live."""
        return 0

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``. Counts as use."""
        outcomes = self._counted(Operation.GET, len(items), lambda: self._backend.get_into(items))
        read = [item.target.nbytes for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.OK]
        with self._lock:
            self._counters.bytes_read += sum(read)
        return outcomes

    def verify(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``: whether a read counts as use is the store's to say."""
        return self._counted(Operation.VERIFY, len(items), lambda: self._backend.get_into(items))

    def problem(self) -> str:
        """See ``Backend.problem``."""
        return self._backend.problem()

    def forget_tenant(self, tenant: bytes) -> bool:
        """There are no keys of tenants: what is shared is not encrypted."""
        return False

    def stored_bytes(self, size_bytes: int) -> int:
        """See ``Backend.stored_bytes``."""
        return self._backend.stored_bytes(size_bytes)

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """See ``Backend.walk``."""
        return self._backend.walk(after=after, tenant=tenant)

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``."""
        outcomes = self._counted(Operation.PUT, len(items), lambda: self._put_fitting(items))
        written = [item.payload.nbytes for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.OK]
        with self._lock:
            self._counters.bytes_written += sum(written)
        return outcomes

    def _put_fitting(self, items: Sequence[PutItem]) -> list[Outcome]:
        fitting = [item for item in items if item.payload.nbytes <= self._object_bytes_max]
        stored = iter(self._backend.put(fitting) if fitting else [])
        return [next(stored) if item.payload.nbytes <= self._object_bytes_max else Outcome.TOO_LARGE for item in items]

    def _counted(self, operation: Operation, count: int, work: Callable[[], list[Outcome]]) -> list[Outcome]:
        with self._lock:
            self._counters.begin(operation, count)
        outcomes = [Outcome.IO_ERROR] * count
        try:
            outcomes = work()
        finally:
            with self._lock:
                self._counters.end(operation, outcomes)
        return outcomes

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``."""
        return self._counted(Operation.DELETE, len(keys), lambda: self._backend.delete(keys))

    def usage(self) -> Usage:
        """Of the whole store, whoever filled it."""
        return self._backend.usage()

    def set_limits(self, limits: StoreLimits) -> None:
        """Nothing: others decide, too, what is kept."""

    def tenant_usage(self, tenant: bytes) -> TenantUsage:
        """Nothing: what a tenant has in a store that evicts by itself could only be counted by listing all of it."""
        return TenantUsage(0, 0, 0)

    def tenant_stats(self, tenants: Sequence[bytes]) -> list[TenantStats]:
        """Nothing of each, for the same reason."""
        return [TenantStats(0, 0, 0, 0, 0)] * len(tenants)

    def tenants(self) -> list[bytes]:
        """None, for the same reason."""
        return []

    def stats(self) -> StoreStats:
        """The counters of this process as they are now."""
        with self._lock:
            self._leases.expire(now_s=self._clock())
            return self._counters.snapshot(Holds(leases=len(self._leases), leased_keys=self._leases.key_count))

    def resize(self, capacity_bytes: int, attempt: Attempt | None = None) -> None:
        """Raises ConfigError where the store has its own capacity, and Abandoned as ``ObjectStore.resize``."""
        attempt = attempt or Attempt()
        attempt.check()
        before_bytes = self.usage().capacity_bytes
        self._backend.resize(capacity_bytes, floor_bytes=0)
        try:
            attempt.settle()
        except Abandoned:
            self._backend.resize(before_bytes, floor_bytes=0)
            raise

    def numbers(self) -> Iterator[Number]:
        """See ``Backend.numbers``."""
        return self._backend.numbers()

    def close(self) -> None:
        """Close the backend. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._backend.close()
