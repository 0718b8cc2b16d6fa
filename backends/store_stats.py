"""What an object store counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from hicache.outcome import Outcome


class Cause(Enum):
    """What an object was removed for, by the store itself."""

    SHARE = "share"  # to make room for a put, of whichever tenant
    QUOTA = "quota"  # to make room for a put within its own tenant's quota
    TTL = "ttl"  # its time was over


@dataclass(frozen=True, slots=True)
class Holds:
    """What keeps objects, and who watches them: gauges."""

    leases: int = 0
    leased_keys: int = 0
    pins: int = 0
    pinned_bytes: int = 0  # as stored
    watchers: int = 0


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What one tenant has, and has lost."""

    payload_bytes: int
    stored_bytes: int
    objects: int
    pinned_bytes: int  # as stored
    evictions: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened; gauges where they say so."""

    lookup_hits: int
    lookup_misses: int
    gets: Mapping[Outcome, int]
    puts: Mapping[Outcome, int]
    bytes_read: int  # into targets, verified
    bytes_written: int
    evictions: int  # for room, those within a quota too
    quota_evictions: int
    evicted_bytes: int  # as stored
    eviction_failures: int
    expirations: int
    corrupt_dropped: int
    verified: Mapping[Outcome, int]  # objects that a scrub has read
    events_told: int  # to watchers, those included that were lost
    events_lost: int
    holds: Holds  # gauges


@dataclass(slots=True)
class StoreCounters:
    """The counters as they grow; under the lock of the store."""

    lookup_hits: int = 0
    lookup_misses: int = 0
    gets: Counter[Outcome] = field(default_factory=Counter)
    verified: Counter[Outcome] = field(default_factory=Counter)  # by a scrub
    puts: Counter[Outcome] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0
    removed: Counter[Cause] = field(default_factory=Counter)
    removed_bytes: Counter[Cause] = field(default_factory=Counter)
    evictions_by_tenant: Counter[bytes] = field(default_factory=Counter)
    eviction_failures: int = 0

    def note_removed(self, tenant: bytes, cause: Cause) -> None:
        """One object of a tenant was removed."""
        self.removed[cause] += 1
        if cause is not Cause.TTL:
            self.evictions_by_tenant[tenant] += 1

    def snapshot(self, holds: Holds, *, events_told: int = 0, events_lost: int = 0) -> StoreStats:
        """The values as they are now, with those that are kept elsewhere."""
        return StoreStats(
            lookup_hits=self.lookup_hits,
            lookup_misses=self.lookup_misses,
            gets=dict(self.gets),
            puts=dict(self.puts),
            bytes_read=self.bytes_read,
            bytes_written=self.bytes_written,
            evictions=self.removed[Cause.SHARE] + self.removed[Cause.QUOTA],
            quota_evictions=self.removed[Cause.QUOTA],
            evicted_bytes=self.removed_bytes[Cause.SHARE] + self.removed_bytes[Cause.QUOTA],
            eviction_failures=self.eviction_failures,
            expirations=self.removed[Cause.TTL],
            corrupt_dropped=self.gets[Outcome.CORRUPT] + self.verified[Outcome.CORRUPT],
            verified=dict(self.verified),
            events_told=events_told,
            events_lost=events_lost,
            holds=holds,
        )
