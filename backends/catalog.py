"""What an object store knows in memory: what is there, what keeps it, what is on its way, and who wants to know."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from hicache.backends.base import StoredBatch
from hicache.backends.events import Events, Removal
from hicache.backends.key_rows import PackedKeys
from hicache.backends.key_table import NO_SLOT, Slots
from hicache.backends.leases import NO_LEASE, Leases
from hicache.backends.pins import Pins, PinUse
from hicache.backends.residents import Residents
from hicache.backends.store_stats import Cause, Held, StoreCounters, TenantStats
from hicache.backends.tenant_limits import StoreLimits
from hicache.outcome import Outcome
from hicache.tenancy import TENANT_BYTES

LEASED_SHARE_MAX = 0.5  # of the capacity, and of a tenant's share of it: the rest stays for puts


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A get in progress: its keys, without those that were stored anew after it began."""

    keys: set[bytes]


class Catalog:
    """The index of a store and everything that bears on it. Callers hold ``lock``, and never in a call of a backend."""

    def __init__(
        self,
        scanned: Iterable[StoredBatch],
        *,
        stored_bytes: Callable[[int], int],
        capacity_bytes: int,
        limits: StoreLimits,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """``clock`` is for leases and pins, ``wall_clock`` for times of use, which outlive the process."""
        self.lock = threading.Lock()
        self.limits = limits
        self._has_ttl = limits.has_ttl
        self._pin_limits: dict[bytes, PinUse] = {}  # by tenant, as far as they were needed
        self.residents = Residents(scanned, stored_bytes=stored_bytes, now_s=wall_clock())
        self.leases = Leases(on_ended=self.residents.release)
        self.pins = Pins(limit_of=self._pin_limit, on_freed=self.residents.put_back)
        self.events = Events()
        self.counters = StoreCounters(recovered=self.resident)
        self._weights = 0.0  # of all tenants that have objects, as of ...
        self._weights_version = (0, 0)
        self.reserved_bytes: Counter[bytes] = Counter()  # by tenant, for puts in progress
        self.reserved_objects: Counter[bytes] = Counter()
        self.writing: Counter[bytes] = Counter()
        self.doomed: set[bytes] = set()  # deleted while being written
        self.reads: list[Read] = []  # in progress
        self.stored_bytes = stored_bytes
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._wall_clock = wall_clock

    def set_capacity(self, capacity_bytes: int) -> None:
        """Another capacity: what leases and pins may keep is a share of it. What is kept already stays."""
        self._capacity_bytes = capacity_bytes
        self._pin_limits.clear()

    def set_limits(self, limits: StoreLimits) -> None:
        """Other limits of tenants. What is pinned or leased above them stays until its time is over."""
        self.limits = limits
        self._has_ttl = limits.has_ttl
        self._pin_limits.clear()
        self._weights_version = (-1, -1)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are there, for those who look for them: what has expired is not, unless something keeps it."""
        slots = self._each_tenant(keys, lambda part, since_s: self.residents.slots(part, used_since_s=since_s))
        found: list[bool] = (slots != NO_SLOT).tolist()
        return found

    def use(self, keys: Sequence[bytes]) -> Slots:
        """``find``, and count what is there as used now, the first one as the last. NO_SLOT for what is not there."""
        now_s = self._wall_clock()
        return self._each_tenant(
            keys, lambda part, since_s: self.residents.use(part, now_s=now_s, used_since_s=since_s)
        )

    def _each_tenant(self, keys: Sequence[bytes], find: Callable[[Sequence[bytes], float], Slots]) -> Slots:
        """``find(part, used_since_s)`` of the keys of each tenant, and again of those that a pin keeps."""
        if not self._has_ttl:
            return find(keys, -math.inf)
        parts = [np.empty(0, dtype=np.int64)]
        for tenant, part in _by_tenant(keys):
            slots = find(part, self.expired_before_s(tenant))
            if len(self.pins) and not slots.all():
                pinned = [at for at, key in enumerate(part) if slots[at] == NO_SLOT and key in self.pins]
                slots[pinned] = find([part[at] for at in pinned], -math.inf)
            parts.append(slots)
        return np.concatenate(parts)

    def lease(self, keys: Sequence[bytes], slots: Slots, *, expires_at_s: float) -> int:
        """A lease on the ``slots`` that ``use`` found for ``keys``; NO_LEASE where there is nothing, or no room.

        All leases together protect at most LEASED_SHARE_MAX of the capacity, and those on objects of one tenant so much
        of its share, among the tenants that have objects: the first keys get the lease.
        """
        if self.leases.is_full:
            return NO_LEASE
        parts = [np.empty(0, dtype=np.int64)]
        bytes_max = int(self._capacity_bytes * LEASED_SHARE_MAX)
        start = 0
        for tenant, part in _by_tenant(keys):
            end = start + len(part)
            own_bytes_max = int(bytes_max * self._share_of(tenant))
            parts.append(self.residents.hold(slots[start:end], bytes_max=bytes_max, tenant_bytes_max=own_bytes_max))
            start = end
        held = np.concatenate(parts)
        return self.leases.grant(held, expires_at_s=expires_at_s) if len(held) else NO_LEASE

    def _share_of(self, tenant: bytes) -> float:
        """Its weight's part among the tenants that have objects."""
        if self._weights_version != self.residents.tenants_version:
            self._weights_version = self.residents.tenants_version
            self._weights = sum(self.limits.of(other).weight for other in self.residents.tenants())
        own = self.limits.of(tenant).weight
        return own / max(self._weights, own)

    def revive(self, keys: Sequence[bytes]) -> list[bool]:
        """As ``use``, and for what has expired, too, while it is still there."""
        revived: list[bool] = (self.residents.use(keys, now_s=self._wall_clock()) != NO_SLOT).tolist()
        return revived

    def refresh(self, keys: Sequence[bytes]) -> None:
        """Count those that are there as used now."""
        self.residents.use(keys, now_s=self._wall_clock())

    def expired_before_s(self, tenant: bytes) -> float:
        """What a tenant used last before this has expired."""
        ttl_s = self.limits.of(tenant).ttl_s
        return self._wall_clock() - ttl_s if ttl_s > 0 else -math.inf

    def add(self, keys: Sequence[bytes], sizes_bytes: Sequence[int]) -> None:
        """Objects are there, complete; the first key counts as the most recently used."""
        before = self.resident
        self._add(keys, sizes_bytes)
        self.counters.added += self.resident - before

    def _add(self, keys: Sequence[bytes], sizes_bytes: Sequence[int]) -> None:
        told = [key for key in dict.fromkeys(keys) if key not in self.residents] if self.events.watcher_count else []
        self.residents.add_many(keys, sizes_bytes, now_s=self._wall_clock())
        for key in reversed(told):
            self.events.tell(key, None)

    @property
    def resident(self) -> Held:
        """What is there."""
        return Held(len(self.residents), self.residents.payload_bytes)

    def withdraw(self, key: bytes, removal: Removal) -> int | None:
        """An object is as good as gone; returns its payload size, None when it was not there. ``removed`` or
        ``take_back`` follows."""
        size_bytes = self.residents.discard(key)
        if size_bytes is not None:
            self._gone(key, size_bytes, removal)
        return size_bytes

    def removed(self, key: bytes, size_bytes: int, cause: Cause) -> None:
        """What was withdrawn, or taken as a victim, is gone."""
        self.counters.note_removed(tenant_of(key), cause, size_bytes)

    def take_back(self, key: bytes, size_bytes: int, cause: Cause) -> None:
        """An object whose delete failed is there all the same, unless it was stored anew meanwhile; one that has
        expired stays absent for who looks."""
        if key in self.residents:
            self.removed(key, size_bytes, cause)
            return
        self.counters.note_returned(size_bytes)
        if cause is Cause.TTL:
            self.residents.add(key, size_bytes, now_s=self._wall_clock(), is_expired=True)
        else:
            self._add([key], [size_bytes])

    def lose(self, key: bytes) -> int | None:
        """An object turned out to be wrong or missing on the medium; returns its payload size, None when it was not
        known."""
        size_bytes = self.withdraw(key, Removal.CORRUPT)
        if size_bytes is not None:
            self.removed(key, size_bytes, Cause.CORRUPT)
        return size_bytes

    def take_victims(
        self,
        tenant: bytes,
        enough_bytes: float,
        *,
        count_max: int,
        removal: Removal,
        used_before_s: float = math.inf,
    ) -> list[tuple[bytes, int]] | None:
        """Take the least recently used of a tenant out of the index, except what is kept. See ``Residents``.

        Nothing when there is nothing to take; None when a bounded look found nothing yet: ask again.
        """
        victims = self.residents.take_victims(
            enough_bytes, count_max=count_max, is_kept=self._is_kept, tenant=tenant, used_before_s=used_before_s
        )
        for key, size_bytes in victims or ():
            self._gone(key, size_bytes, removal)
        return victims

    def _gone(self, key: bytes, size_bytes: int, removal: Removal) -> None:
        self.counters.note_leaving(size_bytes)
        self.pins.unpin(key)
        self.events.tell(key, removal)

    def _is_kept(self, key: bytes) -> bool:
        return key in self.pins or key in self.writing

    def pin(self, keys: Sequence[bytes], *, expires_at_s: float) -> list[Outcome]:
        """OK, ABSENT, or REFUSED at the limits of the tenant: the first keys are pinned, those beyond are not."""
        outcomes = [Outcome.OK if is_there else Outcome.ABSENT for is_there in self.use(keys).tolist()]
        for position, key in enumerate(keys):
            if outcomes[position] is Outcome.OK and not self.pins.pin(
                key, size_bytes=self._stored_bytes_of(key), expires_at_s=expires_at_s
            ):
                outcomes[position] = Outcome.REFUSED
        return outcomes

    def expire_holds(self) -> None:
        """End the leases and pins whose time has come."""
        now_s = self._clock()
        self.leases.expire(now_s=now_s)
        self.pins.expire(now_s=now_s)

    def tenant_stats(self, tenant: bytes) -> TenantStats:
        """What a tenant has, and has lost."""
        usage = self.residents.tenant_usage(tenant)
        return TenantStats(
            payload_bytes=usage.payload_bytes,
            stored_bytes=usage.stored_bytes,
            objects=usage.objects,
            pinned_bytes=self.pins.use_of(tenant).stored_bytes,
            evictions=self.counters.evictions_by_tenant[tenant],
        )

    def used_bytes(self) -> dict[bytes, int]:
        """What each tenant has, and is about to have, as stored."""
        used = {tenant: self.residents.tenant_usage(tenant).stored_bytes for tenant in self.residents.tenants()}
        for tenant, reserved_bytes in self.reserved_bytes.items():
            used[tenant] = used.get(tenant, 0) + reserved_bytes
        return used

    def used_objects(self) -> dict[bytes, int]:
        """As ``used_bytes``, in objects."""
        used = {tenant: self.residents.tenant_usage(tenant).objects for tenant in self.residents.tenants()}
        for tenant, objects in self.reserved_objects.items():
            used[tenant] = used.get(tenant, 0) + objects
        return used

    def reserve(self, keys: Sequence[bytes], size_bytes: int) -> None:
        """A put of objects of one tenant begins, which will store ``size_bytes``."""
        tenant = tenant_of(keys[0])
        self.reserved_bytes[tenant] += size_bytes
        self.reserved_objects[tenant] += len(keys)
        self.writing.update(keys)

    def unreserve(self, keys: Sequence[bytes], size_bytes: int) -> list[bytes]:
        """It has ended. Returns what was to be deleted meanwhile, and is now whole."""
        tenant = tenant_of(keys[0])
        self.reserved_bytes[tenant] -= size_bytes
        self.reserved_objects[tenant] -= len(keys)
        if not self.reserved_objects[tenant]:
            del self.reserved_bytes[tenant], self.reserved_objects[tenant]
        self.writing.subtract(keys)
        ended = [key for key in dict.fromkeys(keys) if not self.writing[key]]
        for key in ended:
            del self.writing[key]
        self.residents.put_back(ended)
        doomed = [key for key in ended if key in self.doomed] if self.doomed else []
        self.doomed.difference_update(doomed)
        return doomed

    def _stored_bytes_of(self, key: bytes) -> int:
        return self.stored_bytes(self.residents.size_bytes(key) or 0)

    def _pin_limit(self, tenant: bytes) -> PinUse:
        if tenant not in self._pin_limits:
            self._pin_limits[tenant] = PinUse(
                stored_bytes=self.limits.pinned_bytes_max(tenant, capacity_bytes=self._capacity_bytes),
                objects=self.limits.of(tenant).pinned_objects_max,
            )
        return self._pin_limits[tenant]


def tenant_of(key: bytes) -> bytes:
    """The tenant's digest in a physical key."""
    return key[:TENANT_BYTES]


def _by_tenant(keys: Sequence[bytes]) -> Iterator[tuple[bytes, Sequence[bytes]]]:
    if isinstance(keys, PackedKeys) and len(keys.prefix) >= TENANT_BYTES:
        yield tenant_of(keys.prefix), keys
    else:
        for tenant, of_tenant in groupby(keys, key=tenant_of):
            yield tenant, list(of_tenant)
