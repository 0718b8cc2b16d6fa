"""The one layer over a backend that hicached and the embedded L3 share: what is kept, and what has to go."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hicache.backends.base import Backend, GetItem, PutItem, Usage
from hicache.backends.key_table import NO_SLOT
from hicache.backends.leases import NO_LEASE, Leases
from hicache.backends.residents import Residents
from hicache.backends.store_stats import StoreCounters, StoreStats
from hicache.errors import BackendError, ConfigError
from hicache.notices import Notices
from hicache.outcome import Outcome
from hicache.workers import QueueFull, Workers

FREE_SPACE_FLOOR_BYTES = 256 << 20
LEASED_SHARE_MAX = 0.5  # of the capacity: the rest stays for puts, whoever leases
TOUCH_INTERVAL_S = 60.0  # between two times that they are written
TOUCH_KEYS_MAX = 1024  # in one call of the backend, which others may wait for
TOUCH_CLOSE_S = 5.0  # what a close waits for times of use that are being written
PUT_GROUP_BYTES = 64 << 20  # room is made for so much of a batch at a time
EVICTION_KEYS_MAX = 256  # in one delete of the backend
EVICTION_FAILURES_MAX = 8  # passes in which every delete failed


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A get in progress: its keys, without those that were stored anew after it began."""

    keys: set[bytes]


class ObjectStore:
    """Keeps a backend within its capacity by evicting what was used least recently. Thread-safe.

    The index is in memory, and lookups are answered by it alone: they never wait for the backend, whose calls are made
    without the lock. In a batch the first keys count as the most recently used: a page outlives the pages that follow.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        object_bytes_max: int,
        high_watermark: float = 0.95,
        low_watermark: float = 0.90,
        free_space_floor_bytes: int = FREE_SPACE_FLOOR_BYTES,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes ``backend`` over, to be closed with the store. Reads its index: ready when this returns.

        Raises ConfigError for watermarks or limits that contradict each other.
        """
        _check_settings(object_bytes_max, high_watermark, low_watermark, free_space_floor_bytes)
        capacity_bytes = backend.usage().capacity_bytes
        self._backend = backend
        self._object_bytes_max = object_bytes_max
        self._capacity_bytes = capacity_bytes
        self._high_bytes = int(capacity_bytes * high_watermark)
        self._low_bytes = int(capacity_bytes * low_watermark)
        self._floor_bytes = free_space_floor_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._notices = Notices(logging.getLogger(__name__))
        self._lock = threading.Lock()  # everything below; never held in a call of the backend
        self._removal_lock = threading.Lock()  # taken before _lock; one eviction or delete at a time
        self._residents = Residents(backend.scan(), stored_bytes=backend.stored_bytes, now_s=wall_clock())
        self._leases = Leases(
            bytes_max=int(capacity_bytes * LEASED_SHARE_MAX),
            bytes_of=lambda key: backend.stored_bytes(self._residents.size_bytes(key) or 0),
            on_freed=self._residents.put_back,
        )
        self._counters = StoreCounters()
        self._reserved_bytes = 0  # by puts in progress
        self._writing: Counter[bytes] = Counter()
        self._doomed: set[bytes] = set()  # deleted while being written
        self._reads: list[_Read] = []  # in progress
        self._touched_at_s = clock()  # when times of use were written last
        self._touching = Workers("hicache-touch", threads=1, queue_max=1)
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def store_id(self) -> bytes:
        """Another one after the content was lost."""
        return self._backend.store_id

    def lookup(self, keys: Sequence[bytes], *, lease_s: float = 0.0) -> tuple[list[Outcome], int]:
        """OK or ABSENT for each key, and a lease on the present ones (NO_LEASE when ``lease_s`` is 0 or none is).

        Counts as use. Until the lease ends, is released or expires, its keys are not evicted. All leases together
        protect at most LEASED_SHARE_MAX of the capacity: the first keys get the lease, those beyond it are OK without.
        """
        with self._lock:
            now_s = self._clock()
            self._leases.expire(now_s=now_s)
            is_found = self._residents.use(keys, now_s=self._wall_clock()) != NO_SLOT
            outcomes = [Outcome.OK if found else Outcome.ABSENT for found in is_found.tolist()]
            present = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK]
            self._counters.lookup_hits += len(present)
            self._counters.lookup_misses += len(keys) - len(present)
            lease_id = self._leases.grant(present, expires_at_s=now_s + lease_s) if lease_s > 0 else NO_LEASE
            return outcomes, lease_id

    def renew(self, lease_id: int, *, lease_s: float) -> bool:
        """Let a lease end ``lease_s`` from now; False when it has ended."""
        with self._lock:
            now_s = self._clock()
            return self._leases.renew(lease_id, now_s=now_s, expires_at_s=now_s + lease_s)

    def release(self, lease_id: int) -> bool:
        """End a lease; False when it has ended."""
        with self._lock:
            return self._leases.release(lease_id, now_s=self._clock())

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``. Counts as use."""
        with self._lock:
            known = self._residents.find([item.key for item in items])
            reading = _Read({item.key for item, is_known in zip(items, known, strict=True) if is_known})
            self._reads.append(reading)
        try:
            read = iter(self._backend.get_into([item for item, is_known in zip(items, known, strict=True) if is_known]))
            outcomes = [next(read) if is_known else Outcome.ABSENT for is_known in known]
            with self._lock:
                self._note_read(items, outcomes, reading)
        finally:
            with self._lock:
                self._reads.remove(reading)
        self._persist_recency_when_due()
        return outcomes

    def _note_read(self, items: Sequence[GetItem], outcomes: list[Outcome], reading: _Read) -> None:
        """Count a get, and forget what is not there or was dropped, unless it has been stored anew meanwhile."""
        read = [item.key for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.OK]
        self._residents.refresh(read, now_s=self._wall_clock())
        self._counters.gets.update(outcomes)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is Outcome.OK:
                self._counters.bytes_read += item.target.nbytes
            elif outcome in (Outcome.ABSENT, Outcome.CORRUPT) and item.key in reading.keys:
                self._residents.discard(item.key)

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``. Evicts at the high watermark down to the low one.

        NO_SPACE when everything else is leased, or when the file system is at its free space floor.
        """
        outcomes = [Outcome.TOO_LARGE] * len(items)
        with self._lock:
            is_found = self._residents.use([item.key for item in items], now_s=self._wall_clock()) != NO_SLOT
        missing: list[int] = []
        for position, (item, found) in enumerate(zip(items, is_found.tolist(), strict=True)):
            if found:
                outcomes[position] = Outcome.EXISTS
            elif item.payload.nbytes <= self._object_bytes_max:
                missing.append(position)
        for group in self._groups(items, missing):
            stored = self._put_group([items[position] for position in group])
            for position, outcome in zip(group, stored, strict=True):
                outcomes[position] = outcome
        with self._lock:
            self._counters.puts.update(outcomes)
        self._persist_recency_when_due()
        return outcomes

    def _groups(self, items: Sequence[PutItem], positions: list[int]) -> Iterator[list[int]]:
        """Consecutive positions whose objects fit between the watermarks together, or one larger object."""
        bytes_max = min(PUT_GROUP_BYTES, max(self._capacity_bytes - self._low_bytes, self._capacity_bytes // 20))
        group: list[int] = []
        total = 0
        for position in positions:
            stored_bytes = self._backend.stored_bytes(items[position].payload.nbytes)
            if group and total + stored_bytes > bytes_max:
                yield group
                group, total = [], 0
            group.append(position)
            total += stored_bytes
        if group:
            yield group

    def _put_group(self, items: Sequence[PutItem]) -> list[Outcome]:
        need_bytes = sum(self._backend.stored_bytes(item.payload.nbytes) for item in items)
        with self._lock:
            self._reserved_bytes += need_bytes
            self._writing.update(item.key for item in items)
        try:
            if not self._make_room(need_bytes):
                return [Outcome.NO_SPACE] * len(items)
            outcomes = self._backend.put(items)
            self._index_stored(items, outcomes)
            self._put_again(items, outcomes)
            return outcomes
        finally:
            self._end_writing(items, need_bytes)

    def _put_again(self, items: Sequence[PutItem], outcomes: list[Outcome]) -> None:
        """Second try for what met a full medium, after more eviction, and for what met an object on its way out."""
        full = [position for position, outcome in enumerate(outcomes) if outcome is Outcome.NO_SPACE]
        if full:
            short_bytes = sum(self._backend.stored_bytes(items[position].payload.nbytes) for position in full)
            if self._evict(lambda: short_bytes) == 0:
                full = []
        with self._lock:
            residents = self._residents
            leaving = [
                position
                for position, outcome in enumerate(outcomes)
                if outcome is Outcome.EXISTS and items[position].key not in residents
            ]
        again = sorted(full + leaving)
        if not again:
            return
        with self._removal_lock:  # nothing is on its way out now
            retried = [items[position] for position in again]
            settled = self._backend.put(retried)
            self._index_stored(retried, settled, is_settled=True)
        for position, outcome in zip(again, settled, strict=True):
            outcomes[position] = outcome

    def _index_stored(self, items: Sequence[PutItem], outcomes: list[Outcome], *, is_settled: bool = False) -> None:
        """Make stored objects visible; those that exist but are not indexed only when nothing is being removed."""
        with self._lock:
            for item, outcome in reversed(list(zip(items, outcomes, strict=True))):
                is_new = outcome is Outcome.OK
                if is_new or (is_settled and outcome is Outcome.EXISTS and item.key not in self._residents):
                    self._residents.add(item.key, item.payload.nbytes, now_s=self._wall_clock())
                    for reading in self._reads:
                        reading.keys.discard(item.key)
                if is_new:
                    self._counters.bytes_written += item.payload.nbytes

    def _end_writing(self, items: Sequence[PutItem], need_bytes: int) -> None:
        with self._lock:
            self._reserved_bytes -= need_bytes
            doomed: list[bytes] = []
            for item in items:
                self._writing[item.key] -= 1
                if self._writing[item.key] == 0:
                    del self._writing[item.key]
                    self._residents.put_back([item.key])
                    if item.key in self._doomed:
                        self._doomed.remove(item.key)
                        doomed.append(item.key)
        if doomed:
            self.delete(doomed)

    def _make_room(self, need_bytes: int) -> bool:
        """Evict until what is reserved fits; False when the free space floor forbids the put.

        When everything left is leased the put goes on and the backend says what fits.
        """
        if self._above(self._high_bytes) > 0:
            self._evict(lambda: self._above(max(self._low_bytes, min(need_bytes, self._capacity_bytes))))
        short_bytes = self._below_floor(need_bytes)
        if short_bytes > 0:
            self._evict(lambda: self._below_floor(need_bytes))
            short_bytes = self._below_floor(need_bytes)
        if short_bytes > 0:
            self._notices.warning("floor", "the file system is at its free space floor: objects are not stored")
        return short_bytes <= 0

    def _above(self, limit_bytes: int) -> int:
        """By how much what is stored and reserved exceeds a limit."""
        stored_bytes = self._backend.usage().stored_bytes
        with self._lock:
            return stored_bytes + self._reserved_bytes - limit_bytes

    def _below_floor(self, need_bytes: int) -> int:
        free = self._backend.free_bytes()
        return 0 if free is None else self._floor_bytes + need_bytes - free

    def _evict(self, shortfall: Callable[[], int]) -> int:
        """Remove the least recently used until as many bytes are free as ``shortfall()`` says when its turn comes.

        Returns how many that were. Objects whose delete fails count as used now and are passed over.
        """
        freed_bytes = failed_passes = 0
        with self._removal_lock:
            enough_bytes = shortfall()
            while freed_bytes < enough_bytes and failed_passes < EVICTION_FAILURES_MAX:
                with self._lock:
                    victims = self._take_victims(enough_bytes - freed_bytes)
                if victims is None:
                    continue
                if not victims:
                    break
                pass_bytes = self._evict_batch(victims)
                freed_bytes += pass_bytes
                failed_passes += pass_bytes == 0
        return freed_bytes

    def _take_victims(self, enough_bytes: int) -> list[tuple[bytes, int]] | None:
        self._leases.expire(now_s=self._clock())
        return self._residents.take_victims(
            enough_bytes,
            count_max=EVICTION_KEYS_MAX,
            is_kept=lambda key: key in self._leases or key in self._writing,
        )

    def _evict_batch(self, victims: list[tuple[bytes, int]]) -> int:
        outcomes = self._backend.delete([key for key, _ in victims])
        freed_bytes = failures = 0
        with self._lock:
            for (key, size_bytes), outcome in zip(victims, outcomes, strict=True):
                if outcome in (Outcome.OK, Outcome.ABSENT):
                    freed_bytes += self._backend.stored_bytes(size_bytes)
                    self._counters.evictions += 1
                else:
                    failures += 1
                    if key not in self._residents:
                        self._residents.add(key, size_bytes, now_s=self._wall_clock())
            self._counters.evicted_bytes += freed_bytes
            self._counters.eviction_failures += failures
        if failures:
            self._notices.warning("evict", "%d objects could not be evicted", failures)
        return freed_bytes

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``. An object that is being written just now is deleted when it is complete.

        A lease keeps objects from eviction, not from their owner.
        """
        with self._removal_lock:
            with self._lock:
                self._doomed.update(key for key in keys if key in self._writing)
                sizes = {key: self._residents.discard(key) for key in keys}
            outcomes = self._backend.delete(keys)
            with self._lock:
                for key, outcome in zip(keys, outcomes, strict=True):
                    size_bytes = sizes[key]
                    if outcome is Outcome.IO_ERROR and size_bytes is not None and key not in self._residents:
                        self._residents.add(key, size_bytes, now_s=self._wall_clock())
            return outcomes

    def usage(self) -> Usage:
        """Space as it is on the medium. O(1)."""
        return self._backend.usage()

    def tenant_usage(self, tenant: bytes) -> tuple[int, int]:
        """Payload bytes and objects of the tenant with this digest."""
        with self._lock:
            usage = self._residents.tenant_usage(tenant)
            return usage.payload_bytes, usage.objects

    def tenants(self) -> list[bytes]:
        """Digests of the tenants that have objects."""
        with self._lock:
            return self._residents.tenants()

    def stats(self) -> StoreStats:
        """The counters as they are now."""
        with self._lock:
            self._leases.expire(now_s=self._clock())
            return self._counters.snapshot(leases=len(self._leases), leased_keys=self._leases.key_count)

    def persist_recency(self) -> None:
        """Write the times of use that have come up since the last time.

        A thread of the store does it, every TOUCH_INTERVAL_S in which there are gets or puts.
        """
        self._touched_at_s = self._clock()
        start: int | None = 0
        while start is not None:
            with self._lock:
                touched, start = self._residents.take_touched(start, count_max=TOUCH_KEYS_MAX)
            if touched:
                self._backend.touch(touched)

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
            if self._touching.close(timeout_s=TOUCH_CLOSE_S):
                self.persist_recency()
        finally:
            self._backend.close()

    def _persist_recency_when_due(self) -> None:
        """Wake the thread that does; when it is at work already, what is pending waits for the next time."""
        with self._lock:
            if self._is_closed or self._clock() - self._touched_at_s < TOUCH_INTERVAL_S:
                return
        with contextlib.suppress(QueueFull):
            self._touching.submit(self._persist_recency_quietly)

    def _persist_recency_quietly(self) -> None:
        try:
            self.persist_recency()
        except BackendError as error:
            self._notices.warning("touch", "times of use could not be written: %s", error)


def _check_settings(object_bytes_max: int, high: float, low: float, floor_bytes: int) -> None:
    if object_bytes_max < 1:
        raise ConfigError("object_bytes_max", object_bytes_max, "at least 1")
    if not 0 < high <= 1:
        raise ConfigError("high_watermark", high, "more than 0 and at most 1")
    if not 0 < low < high:
        raise ConfigError("low_watermark", low, f"more than 0 and less than high_watermark = {high}")
    if floor_bytes < 0:
        raise ConfigError("free_space_floor_bytes", floor_bytes, "0 or more")
