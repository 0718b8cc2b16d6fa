"""The numbers that /metrics reads at each scrape rather than counts: sessions, memory, queues, the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hicache.backends.base import Usage
from hicache.backends.store_stats import StoreStats, TenantStats
from hicache.daemon.metrics import LabelledReading, Reading
from hicache.daemon.rates import TenantRates
from hicache.daemon.sessions import Sessions
from hicache.daemon.storage import Storage, Store
from hicache.daemon.tenants import Tenant
from hicache.errors import BackendError
from hicache.workers import QueueFull

SNAPSHOT_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class StoreNumbers:
    """What a store says about itself at one moment."""

    usage: Usage
    stats: StoreStats
    tenants: Mapping[str, TenantStats] = field(default_factory=dict)  # by name

    @classmethod
    def of(cls, store: Store, tenants: Sequence[Tenant] = ()) -> StoreNumbers:
        """Asks the store; blocking."""
        of_tenants = store.tenant_stats([tenant.digest for tenant in tenants])
        names = [tenant.name for tenant in tenants]
        return cls(store.usage(), store.stats(), dict(zip(names, of_tenants, strict=True)))


class StoreSnapshot:
    """What the store last said about itself: asked before each scrape, in a control thread, never in the event loop."""

    def __init__(self, storage: Storage, numbers: StoreNumbers, named: Callable[[], Sequence[Tenant]]) -> None:
        self._storage = storage
        self._numbers = numbers
        self._named = named

    @property
    def usage(self) -> Usage:
        """Space."""
        return self._numbers.usage

    @property
    def stats(self) -> StoreStats:
        """Counters."""
        return self._numbers.stats

    @property
    def tenants(self) -> Mapping[str, TenantStats]:
        """What each tenant of the tenants file has, by name."""
        return self._numbers.tenants

    async def refresh(self) -> None:
        """Asks again. A store that does not answer soon goes on showing its last numbers."""
        store, tenants = self._storage.store, self._named()
        with contextlib.suppress(TimeoutError, QueueFull, BackendError):
            self._numbers = await self._storage.ask(
                lambda: StoreNumbers.of(store, tenants), timeout_s=SNAPSHOT_TIMEOUT_S
            )


def session_readings(sessions: Sessions) -> Iterator[Reading]:
    """What clients hold."""
    yield Reading("hicache_sessions", "Open sessions.", lambda: len(sessions))
    yield Reading("hicache_sessions_opened", "Sessions opened.", lambda: sessions.opened_count, is_counter=True)
    yield Reading(
        "hicache_inflight_bytes", "Payload that is being moved now.", lambda: sessions.budgets.total.used_bytes
    )
    yield Reading(
        "hicache_inflight_waiting",
        "Transfers that wait for room within a bound on payload in flight.",
        lambda: sessions.budgets.waiting_count + sum(session.budget.waiting_count for session in sessions),
    )
    yield Reading("hicache_regions", "Memory regions of clients that are mapped.", lambda: len(sessions.mapped))
    yield Reading(
        "hicache_region_bytes",
        "Bytes of clients' memory that is mapped.",
        lambda: sum(region.size_bytes for region in sessions.mapped),
    )


def thread_readings(storage: Storage) -> Iterator[Reading]:
    """How busy the storage threads are."""
    yield Reading("hicache_storage_queued_chunks", "Chunks waiting for a thread.", lambda: storage.bulk.queued_count)
    yield Reading("hicache_storage_busy_threads", "Threads at work.", lambda: len(storage.bulk.busy_for_s()))
    yield Reading(
        "hicache_storage_oldest_chunk_seconds",
        "How long the longest running chunk has been running.",
        lambda: max(storage.bulk.busy_for_s(), default=0.0),
    )


def store_readings(snapshot: StoreSnapshot) -> Iterator[Reading]:
    """Space, and what became of objects."""
    yield Reading("hicache_store_capacity_bytes", "Capacity.", lambda: snapshot.usage.capacity_bytes)
    yield Reading("hicache_store_used_bytes", "Space used, with overhead.", lambda: snapshot.usage.stored_bytes)
    yield Reading("hicache_store_payload_bytes", "Payload stored.", lambda: snapshot.usage.payload_bytes)
    yield Reading("hicache_store_objects", "Objects stored.", lambda: snapshot.usage.objects)
    yield Reading("hicache_store_leases", "Leases that have not ended.", lambda: snapshot.stats.holds.leases)
    yield Reading("hicache_store_leased_objects", "Objects under a lease.", lambda: snapshot.stats.holds.leased_keys)
    yield Reading("hicache_store_pinned_objects", "Objects that are pinned.", lambda: snapshot.stats.holds.pins)
    yield Reading("hicache_store_pinned_bytes", "Their space.", lambda: snapshot.stats.holds.pinned_bytes)
    yield Reading("hicache_watches", "Watches of clients.", lambda: snapshot.stats.holds.watchers)
    counters: tuple[tuple[str, str, Callable[[StoreStats], int]], ...] = (
        ("hicache_store_read_bytes", "Payload read and verified.", lambda stats: stats.bytes_read),
        ("hicache_store_written_bytes", "Payload written.", lambda stats: stats.bytes_written),
        ("hicache_store_evicted_objects", "Objects evicted.", lambda stats: stats.evictions),
        (
            "hicache_store_quota_evicted_objects",
            "Objects of them evicted by a put of their own tenant, at its quota.",
            lambda stats: stats.quota_evictions,
        ),
        ("hicache_store_expired_objects", "Objects removed after their time.", lambda stats: stats.expirations),
        ("hicache_watch_events", "Events for watches.", lambda stats: stats.events_told),
        ("hicache_watch_lost_events", "Events of them lost by slow watches.", lambda stats: stats.events_lost),
        ("hicache_store_evicted_bytes", "Space freed by eviction.", lambda stats: stats.evicted_bytes),
        (
            "hicache_store_eviction_failures",
            "Objects that could not be evicted.",
            lambda stats: stats.eviction_failures,
        ),
        (
            "hicache_store_verified_objects",
            "Objects that a verify has read.",
            lambda stats: sum(stats.verified.values()),
        ),
        ("hicache_store_corrupt_objects", "Corrupt objects met and dropped.", lambda stats: stats.corrupt_dropped),
    )
    for name, description, read in counters:
        yield Reading(name, description, partial(_read_counter, snapshot, read), is_counter=True)


def tenant_readings(snapshot: StoreSnapshot) -> Iterator[LabelledReading]:
    """What each tenant of the tenants file has."""
    gauges: tuple[tuple[str, str, Callable[[TenantStats], int]], ...] = (
        ("hicache_tenant_used_bytes", "Space of a tenant, with overhead.", lambda tenant: tenant.stored_bytes),
        ("hicache_tenant_objects", "Objects of a tenant.", lambda tenant: tenant.objects),
        ("hicache_tenant_pinned_bytes", "Space of what a tenant has pinned.", lambda tenant: tenant.pinned_bytes),
    )
    for name, description, read in gauges:
        yield LabelledReading(name, description, "tenant", partial(_read_tenants, snapshot, read))
    yield LabelledReading(
        "hicache_tenant_evicted_objects",
        "Objects of a tenant that were evicted.",
        "tenant",
        partial(_read_tenants, snapshot, lambda tenant: tenant.evictions),
        is_counter=True,
    )


def rate_readings(
    rates: Mapping[Tenant, TenantRates], named: Callable[[], Sequence[Tenant]]
) -> Iterator[LabelledReading]:
    """Who was refused for being too fast."""

    def by_limit() -> Mapping[str, float]:
        return {limit: sum(rate.refusals[limit] for rate in rates.values()) for limit in ("calls", "bytes")}

    yield LabelledReading(
        "hicache_rate_refusals",
        "Calls and objects refused, by limit: calls, bytes.",
        "limit",
        by_limit,
        is_counter=True,
    )
    yield LabelledReading(
        "hicache_tenant_rate_refusals",
        "Calls and objects of a tenant refused for its rates.",
        "tenant",
        lambda: {tenant.name: rates[tenant].refusals.total() for tenant in named()},
        is_counter=True,
    )


def _read_tenants(snapshot: StoreSnapshot, read: Callable[[TenantStats], int]) -> Mapping[str, float]:
    return {name: read(stats) for name, stats in snapshot.tenants.items()}


def _read_counter(snapshot: StoreSnapshot, read: Callable[[StoreStats], int]) -> int:
    return read(snapshot.stats)
