"""Putting a batch into a store: room is made for a part of it at a time, and what is stored becomes visible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from hicache.backends.base import Backend, PutItem
from hicache.backends.catalog import Catalog, tenant_of
from hicache.backends.eviction import Evictor
from hicache.backends.store_stats import Operation
from hicache.breaker import BreakerLimits, CircuitBreaker
from hicache.outcome import Outcome

PUT_GROUP_BYTES = 64 << 20  # room is made for so much of a batch at a time
QUOTA_GROUPS = 8  # puts of one tenant that may be in progress without one taking the other for over the quota

# Where others have filled the medium, what is evicted for a put goes for nothing: it is tried ever more rarely.
EVICTIONS_IN_VAIN = BreakerLimits(consecutive_failures_max=2, failure_ratio=1.0, open_s=1.0, open_s_max=60.0)


class Puts:
    """The way of objects into a backend and the catalog of a store. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        catalog: Catalog,
        evictor: Evictor,
        *,
        removal_lock: threading.Lock,
        object_bytes_max: int,
        delete: Callable[[Sequence[bytes]], object],
        clock: Callable[[], float],
    ) -> None:
        """``removal_lock`` is the evictor's; ``delete`` is for what was to be deleted while it was written; ``clock``
        gives seconds.
        """
        self._backend = backend
        self._catalog = catalog
        self._evictor = evictor
        self._removal_lock = removal_lock
        self._object_bytes_max = object_bytes_max
        self._delete = delete
        self._evictions = CircuitBreaker(EVICTIONS_IN_VAIN, clock=clock)  # those for a medium that says it is full

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``ObjectStore.put``."""
        outcomes = [Outcome.TOO_LARGE] * len(items)
        with self._catalog.lock:
            self._catalog.counters.begin(Operation.PUT, len(items))
            held = self._catalog.revive([item.key for item in items])
        try:
            self._put_missing(items, held, outcomes)
        except BaseException:
            outcomes = [Outcome.IO_ERROR] * len(items)
            raise
        finally:
            with self._catalog.lock:
                self._catalog.counters.end(Operation.PUT, outcomes)
        return outcomes

    def _put_missing(self, items: Sequence[PutItem], held: Sequence[bool], outcomes: list[Outcome]) -> None:
        """Fills in the outcomes of all but what is too large."""
        missing: list[int] = []
        for position, (item, is_held) in enumerate(zip(items, held, strict=True)):
            if is_held:
                outcomes[position] = Outcome.EXISTS
            elif item.payload.nbytes <= self._object_bytes_max:
                missing.append(position)
        for group in self._groups(items, missing):
            stored = self._put_group([items[position] for position in group])
            for position, outcome in zip(group, stored, strict=True):
                outcomes[position] = outcome

    def _groups(self, items: Sequence[PutItem], positions: list[int]) -> Iterator[list[int]]:
        """Consecutive positions of one tenant, whose objects fit between the watermarks together, or one larger object.

        A group takes a small part of a quota, so that puts at the same time do not take each other's room for gone.
        """
        group: list[int] = []
        total = 0
        bytes_max = count_max = 0
        tenant = b""
        for position in positions:
            stored_bytes = self._backend.stored_bytes(items[position].payload.nbytes)
            is_full = total + stored_bytes > bytes_max or len(group) >= count_max
            if group and (is_full or tenant_of(items[position].key) != tenant):
                yield group
                group, total = [], 0
            if not group:
                tenant = tenant_of(items[position].key)
                bytes_max, count_max = self._group_max(tenant, len(items))
            group.append(position)
            total += stored_bytes
        if group:
            yield group

    def _group_max(self, tenant: bytes, count: int) -> tuple[int, int]:
        limits = self._catalog.limits.of(tenant)
        bytes_max = min(PUT_GROUP_BYTES, self._evictor.round_bytes)
        if limits.quota_bytes:
            bytes_max = min(bytes_max, limits.quota_bytes // QUOTA_GROUPS)
        count_max = min(count, max(1, self._evictor.objects_max // QUOTA_GROUPS))
        if limits.quota_objects:
            count_max = min(count_max, max(1, limits.quota_objects // QUOTA_GROUPS))
        return bytes_max, count_max

    def _put_group(self, items: Sequence[PutItem]) -> list[Outcome]:
        keys = [item.key for item in items]
        sizes_bytes = [self._backend.stored_bytes(item.payload.nbytes) for item in items]
        need_bytes = sum(sizes_bytes)
        tenant = tenant_of(keys[0])
        with self._catalog.lock:
            self._catalog.reserve(keys, need_bytes)
        try:
            fitting = items[: self._evictor.make_room_in_quota(tenant, sizes_bytes)]
            if not fitting or not self._evictor.make_room(tenant, need_bytes):
                return [Outcome.NO_SPACE] * len(items)
            outcomes = self._backend.put(fitting)
            self._index_stored(fitting, outcomes)
            self._put_again(fitting, outcomes)
            return outcomes + [Outcome.NO_SPACE] * (len(items) - len(fitting))
        finally:
            with self._catalog.lock:
                doomed = self._catalog.unreserve(keys, need_bytes)
            if doomed:
                self._delete(doomed)

    def _put_again(self, items: Sequence[PutItem], outcomes: list[Outcome]) -> None:
        """Second try for what met a full medium, after more eviction, and for what met an object on its way out."""
        full = [position for position, outcome in enumerate(outcomes) if outcome is Outcome.NO_SPACE]
        if full:
            self._put_after_eviction(items, full, outcomes)
        with self._catalog.lock:
            residents = self._catalog.residents
            leaving = [
                position
                for position, outcome in enumerate(outcomes)
                if outcome is Outcome.EXISTS and items[position].key not in residents
            ]
        self._put_once_more(items, leaving, outcomes)

    def _put_after_eviction(self, items: Sequence[PutItem], full: list[int], outcomes: list[Outcome]) -> None:
        """Unless that has let nothing in of late."""
        permit = self._evictions.acquire()
        if permit is None:
            return
        try:
            short_bytes = sum(self._backend.stored_bytes(items[position].payload.nbytes) for position in full)
            if self._evictor.evict(tenant_of(items[0].key), lambda: short_bytes) == 0:
                return
            self._put_once_more(items, full, outcomes)
            if all(outcomes[position] is Outcome.NO_SPACE for position in full):
                self._evictions.fail(permit)
            else:
                self._evictions.succeed(permit)
        finally:
            self._evictions.abandon(permit)  # changes nothing for one that was given back

    def _put_once_more(self, items: Sequence[PutItem], positions: list[int], outcomes: list[Outcome]) -> None:
        if not positions:
            return
        with self._removal_lock:  # nothing is on its way out now
            retried = [items[position] for position in positions]
            settled = self._backend.put(retried)
            self._index_stored(retried, settled, is_settled=True)
        for position, outcome in zip(positions, settled, strict=True):
            outcomes[position] = outcome

    def _index_stored(self, items: Sequence[PutItem], outcomes: list[Outcome], *, is_settled: bool = False) -> None:
        """Make stored objects visible; those that exist but are not indexed only when nothing is being removed."""
        with self._catalog.lock:
            catalog = self._catalog
            keys: list[bytes] = []
            sizes_bytes: list[int] = []
            for item, outcome in zip(items, outcomes, strict=True):
                is_new = outcome is Outcome.OK
                if is_new or (is_settled and outcome is Outcome.EXISTS and item.key not in catalog.residents):
                    keys.append(item.key)
                    sizes_bytes.append(item.payload.nbytes)
                if is_new:
                    catalog.counters.bytes_written += item.payload.nbytes
            catalog.add(keys, sizes_bytes)
            for reading in catalog.reads:
                reading.keys.difference_update(keys)
