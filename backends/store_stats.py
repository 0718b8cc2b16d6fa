"""What an object store counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from hicache.outcome import Outcome


class Cause(Enum):
    """What an object was removed for."""

    SHARE = "evicted"  # to make room for a put, of whichever tenant
    QUOTA = "quota"  # to make room for a put within its own tenant's quota
    TTL = "expired"  # its time was over
    DELETED = "deleted"  # by its owner
    CORRUPT = "corrupt"  # wrong or missing on the medium


class Operation(StrEnum):
    """What a store is asked to do with objects."""

    LOOKUP = "lookup"
    GET = "get"
    PUT = "put"
    DELETE = "delete"
    VERIFY = "verify"  # read by a scrub: does not count as use


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
class Held:
    """Objects of a store with an index, and their payload."""

    objects: int = 0
    payload_bytes: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(self.objects + other.objects, self.payload_bytes + other.payload_bytes)

    def __sub__(self, other: Held) -> Held:
        return Held(self.objects - other.objects, self.payload_bytes - other.payload_bytes)


NOTHING_HELD = Held()


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened; gauges where they say so. All of one moment:

    ``asked[o] == sum(finished[o].values()) + open[o]`` for every operation, and, of a store with an index,
    ``recovered + added == sum(removed.values()) + leaving + resident``.
    """

    asked: Mapping[Operation, int]  # objects
    finished: Mapping[Operation, Mapping[Outcome, int]]
    open: Mapping[Operation, int]  # gauge
    bytes_read: int  # into targets, verified
    bytes_written: int
    recovered: Held  # found when the store was opened
    added: Held
    removed: Mapping[Cause, Held]
    leaving: Held  # gauge: out of the index, and not yet off the medium
    resident: Held  # gauge: in the index
    evicted_bytes: int  # as stored
    eviction_failures: int
    events_told: int  # to watchers, those included that were lost
    events_lost: int
    holds: Holds  # gauges

    @property
    def lookup_hits(self) -> int:
        """Keys that were there when they were looked up."""
        return self.finished[Operation.LOOKUP].get(Outcome.OK, 0)

    @property
    def lookup_misses(self) -> int:
        """Keys that were not."""
        return sum(self.finished[Operation.LOOKUP].values()) - self.lookup_hits

    @property
    def gets(self) -> Mapping[Outcome, int]:
        """Objects that were to be read."""
        return self.finished[Operation.GET]

    @property
    def puts(self) -> Mapping[Outcome, int]:
        """Objects that were to be stored."""
        return self.finished[Operation.PUT]

    @property
    def evictions(self) -> int:
        """Objects removed for room, those within a quota too."""
        return self.removed[Cause.SHARE].objects + self.quota_evictions

    @property
    def quota_evictions(self) -> int:
        """Objects of them removed within a quota."""
        return self.removed[Cause.QUOTA].objects

    @property
    def expirations(self) -> int:
        """Objects removed after their time."""
        return self.removed[Cause.TTL].objects

    @property
    def corrupt_dropped(self) -> int:
        """Reads that met a corrupt object, those of a scrub too."""
        return sum(self.finished[operation].get(Outcome.CORRUPT, 0) for operation in (Operation.GET, Operation.VERIFY))


@dataclass(slots=True)
class StoreCounters:
    """The counters as they grow; under the lock of the store."""

    asked: Counter[Operation] = field(default_factory=Counter)
    open: Counter[Operation] = field(default_factory=Counter)
    finished: dict[Operation, Counter[Outcome]] = field(
        default_factory=lambda: {operation: Counter() for operation in Operation}
    )
    bytes_read: int = 0
    bytes_written: int = 0
    recovered: Held = NOTHING_HELD
    added: Held = NOTHING_HELD
    removed: dict[Cause, Held] = field(default_factory=lambda: dict.fromkeys(Cause, NOTHING_HELD))
    leaving: Held = NOTHING_HELD
    evicted_bytes: int = 0
    evictions_by_tenant: Counter[bytes] = field(default_factory=Counter)
    eviction_failures: int = 0

    def begin(self, operation: Operation, count: int) -> None:
        """So many objects are asked for; ``end`` follows, whatever happens."""
        self.asked[operation] += count
        self.open[operation] += count

    def end(self, operation: Operation, outcomes: Sequence[Outcome]) -> None:
        """What became of them."""
        self.open[operation] -= len(outcomes)
        self.finished[operation].update(outcomes)

    def note_leaving(self, size_bytes: int) -> None:
        """An object is out of the index: ``note_removed`` or ``note_returned`` follows."""
        self.leaving += Held(1, size_bytes)

    def note_returned(self, size_bytes: int) -> None:
        """Its delete failed: it is in the index again."""
        self.leaving -= Held(1, size_bytes)

    def note_removed(self, tenant: bytes, cause: Cause, size_bytes: int) -> None:
        """It is off the medium."""
        self.leaving -= Held(1, size_bytes)
        self.removed[cause] += Held(1, size_bytes)
        if cause in (Cause.SHARE, Cause.QUOTA):
            self.evictions_by_tenant[tenant] += 1

    def snapshot(
        self, holds: Holds, *, resident: Held = NOTHING_HELD, events_told: int = 0, events_lost: int = 0
    ) -> StoreStats:
        """The values as they are now, with those that are kept elsewhere."""
        return StoreStats(
            asked=dict(self.asked),
            finished={operation: dict(outcomes) for operation, outcomes in self.finished.items()},
            open=dict(self.open),
            bytes_read=self.bytes_read,
            bytes_written=self.bytes_written,
            recovered=self.recovered,
            added=self.added,
            removed=dict(self.removed),
            leaving=self.leaving,
            resident=resident,
            evicted_bytes=self.evicted_bytes,
            eviction_failures=self.eviction_failures,
            events_told=events_told,
            events_lost=events_lost,
            holds=holds,
        )
