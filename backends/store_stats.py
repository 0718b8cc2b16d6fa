"""What an object store counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.outcome import Outcome


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened; gauges where they say so."""

    lookup_hits: int
    lookup_misses: int
    gets: Mapping[Outcome, int]
    puts: Mapping[Outcome, int]
    bytes_read: int  # into targets, verified
    bytes_written: int
    evictions: int
    evicted_bytes: int  # as stored
    eviction_failures: int
    corrupt_dropped: int
    leases: int  # gauge
    leased_keys: int  # gauge


@dataclass(slots=True)
class StoreCounters:
    """The counters as they grow; under the lock of the store."""

    lookup_hits: int = 0
    lookup_misses: int = 0
    gets: Counter[Outcome] = field(default_factory=Counter)
    puts: Counter[Outcome] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    eviction_failures: int = 0

    def snapshot(self, *, leases: int, leased_keys: int) -> StoreStats:
        """The values as they are now, with the gauges given."""
        return StoreStats(
            lookup_hits=self.lookup_hits,
            lookup_misses=self.lookup_misses,
            gets=dict(self.gets),
            puts=dict(self.puts),
            bytes_read=self.bytes_read,
            bytes_written=self.bytes_written,
            evictions=self.evictions,
            evicted_bytes=self.evicted_bytes,
            eviction_failures=self.eviction_failures,
            corrupt_dropped=self.gets[Outcome.CORRUPT],
            leases=leases,
            leased_keys=leased_keys,
        )
