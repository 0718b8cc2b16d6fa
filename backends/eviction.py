"""What has to go: to make room in the store, to keep a tenant within its quota, and because its time is over."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.backends.base import Backend
from hicache.backends.catalog import Catalog
from hicache.backends.events import Removal
from hicache.backends.shares import gives
from hicache.backends.store_stats import Cause
from hicache.notices import Notices
from hicache.outcome import Outcome

EVICTION_KEYS_MAX = 256  # in one delete of the backend
AHEAD_OBJECTS = 1024  # that one put removes beyond its own need: it waits for some 10 ms however large the store is
SPARE_OBJECTS_PART = 256  # of objects_max: at it so many are evicted beyond what is short
EVICTION_FAILURES_MAX = 8  # passes in which every delete failed

Victims = list[tuple[bytes, int]]  # keys and payload sizes
NO_TENANT = b""


@dataclass(frozen=True, slots=True)
class Measure:
    """What there is too much of, so that shares are shares of it: stored bytes, or objects."""

    used: Callable[[], dict[bytes, int]]  # by each tenant
    of: Callable[[int], int]  # one object, by its payload size
    bounds: Callable[[int], tuple[float, int]]  # for so much: most bytes and most objects to take


class Evictor:
    """Removes objects that nobody asked to delete. Thread-safe.

    When the store is full, the tenant that has most for its weight loses its least recently used objects first, and no
    tenant loses any while it is at or below its share, except to its own puts. See docs/decisions/0013.
    """

    def __init__(
        self,
        backend: Backend,
        catalog: Catalog,
        *,
        removal_lock: threading.Lock,
        high_watermark: float,
        low_watermark: float,
        floor_bytes: int,
        objects_max: int,
    ) -> None:
        """``removal_lock`` is taken before the catalog's: one eviction or delete at a time."""
        self._backend = backend
        self._catalog = catalog
        self._removal_lock = removal_lock
        self._high_watermark = high_watermark
        self._low_watermark = low_watermark
        self._floor_bytes = floor_bytes
        self._is_lowering = False  # from the high watermark down to the low one
        self.set_capacity(backend.usage().capacity_bytes, objects_max=objects_max)
        self._notices = Notices(logging.getLogger(__name__))
        self._bytes = Measure(catalog.used_bytes, catalog.stored_bytes, lambda amount: (amount, EVICTION_KEYS_MAX))
        self._objects = Measure(catalog.used_objects, lambda _: 1, lambda amount: (math.inf, amount))

    def set_capacity(self, capacity_bytes: int, *, objects_max: int) -> None:
        """The watermarks are shares of this."""
        self.objects_max = objects_max
        self._capacity_bytes = capacity_bytes
        self._high_bytes = int(capacity_bytes * self._high_watermark)
        self._low_bytes = int(capacity_bytes * self._low_watermark)

    @property
    def round_bytes(self) -> int:
        """What a put may make room for at a time: as much as one eviction frees."""
        return max(self._capacity_bytes - self._low_bytes, self._capacity_bytes // 20)

    def shrink(self, check: Callable[[], None]) -> None:
        """Evict down to the low watermark when the store is above the high one, in rounds: others can come between.

        ``check``, which may raise, is called before each.
        """
        if self._above(self._high_bytes) <= 0:
            return
        check()
        while self.evict(NO_TENANT, lambda: min(self._above(self._low_bytes), self.round_bytes)):
            check()

    def lower(self, tenant: bytes = NO_TENANT, need_bytes: int = 0) -> int:
        """Evict a part of what is above the low watermark since the store was above the high one; returns the bytes.

        ``tenant`` is whose put has brought it there, if one has just now.
        """
        if not self._is_lowering:
            return 0
        low_bytes = max(self._low_bytes, min(need_bytes, self._capacity_bytes))
        part_bytes = 0

        def part() -> int:
            nonlocal part_bytes
            part_bytes = min(self._above(low_bytes), self._part_bytes())
            return part_bytes

        freed_bytes = self.evict(tenant, part)
        is_all_kept = freed_bytes < part_bytes  # what is left is not tried again until the high watermark is crossed
        self._is_lowering = freed_bytes > 0 and not is_all_kept and self._above(low_bytes) > 0
        return freed_bytes

    def _part_bytes(self) -> int:
        """What is above the high watermark, and AHEAD_OBJECTS of the mean size."""
        usage = self._backend.usage()
        return max(self._above(self._high_bytes), 0) + AHEAD_OBJECTS * usage.stored_bytes // max(usage.objects, 1)

    def make_room(self, tenant: bytes, need_bytes: int) -> bool:
        """Evict until what is reserved fits; False when the free space floor or ``objects_max`` forbids the put.

        When everything that may go is kept the put goes on and the backend says what fits. ``tenant`` is who puts.
        """
        if not self._make_room_in_index(tenant):
            self._notices.warning("objects_max", "as many objects as objects_max allows are kept: no more are stored")
            return False
        is_above = self._above(self._high_bytes) > 0
        self._is_lowering |= is_above
        self.lower(tenant if is_above else NO_TENANT, need_bytes)  # what others left to do costs it nothing of its own
        short_bytes = self._below_floor(need_bytes)
        if short_bytes > 0:
            self.evict(tenant, lambda: self._below_floor(need_bytes))
            short_bytes = self._below_floor(need_bytes)
        if short_bytes > 0:
            self._notices.warning("floor", "the file system is at its free space floor: objects are not stored")
        return short_bytes <= 0

    def _make_room_in_index(self, tenant: bytes) -> bool:
        """Evict at ``objects_max``, somewhat more than is short so that not every put has to; False: still too many."""
        while self._surplus_objects() > 0:
            if self._evict(tenant, self._objects_to_evict, self._objects) == 0:
                return self._surplus_objects() <= 0
        return True

    def _surplus_objects(self) -> int:
        with self._catalog.lock:
            return len(self._catalog.residents) + self._catalog.reserved_objects.total() - self.objects_max

    def _objects_to_evict(self) -> int:
        surplus = self._surplus_objects()
        return surplus + self.objects_max // SPARE_OBJECTS_PART if surplus > 0 else 0

    def make_room_in_quota(self, tenant: bytes, sizes_bytes: Sequence[int]) -> int:
        """Evict of ``tenant`` alone until objects of these stored sizes, which are reserved, fit into its quota.

        Returns how many of them do, the first ones: fewer than all when the rest of what it has is kept.
        """
        limits = self._catalog.limits.of(tenant)
        if not limits.quota_bytes and not limits.quota_objects:
            return len(sizes_bytes)
        if limits.quota_bytes and max(sizes_bytes) > limits.quota_bytes:
            return 0  # groups are made so that such an object is alone
        with self._catalog.lock:
            room_bytes, room_objects = self._quota_room(tenant, sizes_bytes)
        if sum(sizes_bytes) <= room_bytes and len(sizes_bytes) <= room_objects:
            return len(sizes_bytes)  # without the wait for the removals of others
        failed_passes = 0
        with self._removal_lock:
            while failed_passes < EVICTION_FAILURES_MAX:
                with self._catalog.lock:
                    room_bytes, room_objects = self._quota_room(tenant, sizes_bytes)
                    short_bytes, short_objects = sum(sizes_bytes) - room_bytes, len(sizes_bytes) - room_objects
                    if short_bytes <= 0 and short_objects <= 0:
                        break
                    victims = self._take_own(tenant, short_bytes, short_objects)
                if victims:
                    failed_passes += not self._delete(victims, Cause.QUOTA)
                elif victims is not None:
                    break
        return _count_that_fit(sizes_bytes, room_bytes, room_objects)

    def _quota_room(self, tenant: bytes, sizes_bytes: Sequence[int]) -> tuple[int, int]:
        """Bytes and objects that these objects may have, under the catalog's lock."""
        catalog, limits = self._catalog, self._catalog.limits.of(tenant)
        usage = catalog.residents.tenant_usage(tenant)
        others_bytes = usage.stored_bytes + catalog.reserved_bytes[tenant] - sum(sizes_bytes)
        others = usage.objects + catalog.reserved_objects[tenant] - len(sizes_bytes)
        room_bytes = limits.quota_bytes - others_bytes if limits.quota_bytes else sum(sizes_bytes)
        return room_bytes, limits.quota_objects - others if limits.quota_objects else len(sizes_bytes)

    def _take_own(self, tenant: bytes, short_bytes: int, short_objects: int) -> Victims | None:
        """As many as bytes are short, or as objects are; None: ask again."""
        self._catalog.expire_holds()
        if short_bytes > 0:
            return self._catalog.take_victims(tenant, short_bytes, count_max=EVICTION_KEYS_MAX, removal=Removal.EVICTED)
        count_max = min(short_objects, EVICTION_KEYS_MAX)
        return self._catalog.take_victims(tenant, math.inf, count_max=count_max, removal=Removal.EVICTED)

    def evict(self, putting: bytes, shortfall: Callable[[], int]) -> int:
        """Remove until as many bytes are free as ``shortfall()`` says when its turn comes, for a put of a tenant.

        Returns how many that were. Objects whose delete fails count as used now and are passed over.
        """
        return self._evict(putting, shortfall, self._bytes)

    def _evict(self, putting: bytes, shortfall: Callable[[], int], measure: Measure) -> int:
        freed = failed_passes = 0
        spent: set[bytes] = set()
        with self._removal_lock:
            enough = shortfall()
            while freed < enough and failed_passes < EVICTION_FAILURES_MAX:
                with self._catalog.lock:
                    self._catalog.expire_holds()
                    victims = self._take_fairly(putting, enough - freed, spent, measure)
                if victims is None:
                    break
                if victims:
                    gone = self._delete(victims, Cause.SHARE)
                    freed += sum(measure.of(size_bytes) for _, size_bytes in gone)
                    failed_passes += not gone
        return freed

    def _take_fairly(self, putting: bytes, short: int, spent: set[bytes], measure: Measure) -> Victims | None:
        """Victims for one pass; none: ask again; None: there are none. Adds to ``spent`` who has nothing more."""
        catalog = self._catalog
        used = measure.used()
        weights = {tenant: catalog.limits.of(tenant).weight for tenant in used}
        wanted = gives(used, weights, shortfall=short, spent=spent)
        if not wanted and putting not in spent:
            wanted = [(putting, short)]  # its own put may cost it anything of its own
        if not wanted:
            return None
        victims: Victims = []
        for tenant, give in wanted:
            left = short - sum(measure.of(size_bytes) for _, size_bytes in victims)
            if left <= 0 or len(victims) >= EVICTION_KEYS_MAX:
                break
            enough_bytes, count_max = measure.bounds(min(give, left))
            count_max = min(count_max, EVICTION_KEYS_MAX - len(victims))
            taken = catalog.take_victims(tenant, enough_bytes, count_max=count_max, removal=Removal.EVICTED)
            if taken is None:
                break  # one look under the lock is enough, however many tenants there are
            victims += taken
            if not taken:
                spent.add(tenant)
        return victims

    def sweep(self) -> int:
        """Remove objects that have expired, EVICTION_KEYS_MAX at most; returns how many. Ask again until it is 0."""
        with self._catalog.lock:
            self._catalog.expire_holds()
            tenants = self._catalog.residents.tenants()
        for tenant in tenants:
            with self._removal_lock:  # for one tenant at a time, since puts may wait for it
                if count := self._sweep_tenant(tenant):
                    return count
        return 0

    def _sweep_tenant(self, tenant: bytes) -> int:
        """Removes what has expired of one tenant, and returns how many those were."""
        while (victims := self._take_expired(tenant)) is None:
            pass  # the lock of the catalog was let go in between
        before = self._count_removed(Cause.TTL)
        if victims:
            self._delete(victims, Cause.TTL)
        return self._count_removed(Cause.TTL) - before

    def _take_expired(self, tenant: bytes) -> Victims | None:
        with self._catalog.lock:
            before_s = self._catalog.expired_before_s(tenant)
            if before_s == -math.inf:
                return []
            return self._catalog.take_victims(
                tenant, math.inf, count_max=EVICTION_KEYS_MAX, removal=Removal.EXPIRED, used_before_s=before_s
            )

    def _count_removed(self, cause: Cause) -> int:
        with self._catalog.lock:
            return self._catalog.counters.removed[cause].objects

    def _delete(self, victims: Victims, cause: Cause) -> Victims:
        """Delete what was taken out of the index; returns what is gone. Under the removal lock."""
        outcomes = [Outcome.IO_ERROR] * len(victims)
        try:
            outcomes = self._backend.delete([key for key, _ in victims])
        finally:
            gone = self._settle(victims, outcomes, cause)
        self._backend.forget(
            [victim for victim, outcome in zip(victims, outcomes, strict=True) if outcome is Outcome.ABSENT]
        )
        return gone

    def _settle(self, victims: Victims, outcomes: Sequence[Outcome], cause: Cause) -> Victims:
        """Count what is gone, and take back what is not."""
        catalog = self._catalog
        gone: Victims = []
        with catalog.lock:
            for (key, size_bytes), outcome in zip(victims, outcomes, strict=True):
                if outcome in (Outcome.OK, Outcome.ABSENT):
                    gone.append((key, size_bytes))
                    catalog.removed(key, size_bytes, cause)
                else:
                    catalog.take_back(key, size_bytes, cause)
            if cause is not Cause.TTL:
                catalog.counters.evicted_bytes += sum(catalog.stored_bytes(size_bytes) for _, size_bytes in gone)
            failures = len(victims) - len(gone)
            catalog.counters.eviction_failures += failures
        if failures:
            self._notices.warning("evict", "%d objects could not be evicted", failures)
        return gone

    def _above(self, limit_bytes: int) -> int:
        """By how much what is stored and reserved exceeds a limit."""
        stored_bytes = self._backend.usage().stored_bytes
        with self._catalog.lock:
            return stored_bytes + self._catalog.reserved_bytes.total() - limit_bytes

    def _below_floor(self, need_bytes: int) -> int:
        free = self._backend.free_bytes()
        return 0 if free is None else self._floor_bytes + need_bytes - free


def _count_that_fit(sizes_bytes: Sequence[int], room_bytes: int, room_objects: int) -> int:
    total_bytes = 0
    for count, size_bytes in enumerate(sizes_bytes):
        total_bytes += size_bytes
        if total_bytes > room_bytes or count >= room_objects:
            return count
    return len(sizes_bytes)
