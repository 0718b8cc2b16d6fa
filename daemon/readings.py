"""The numbers that /metrics reads at each scrape rather than counts: sessions, memory, queues, the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hicache.backends.base import Usage
from hicache.backends.store_stats import Held, Holds, Operation, StoreStats, TenantStats
from hicache.ceiling import Ceiling
from hicache.daemon.metrics import Reading, Values
from hicache.daemon.rates import TenantRates
from hicache.daemon.sessions import Sessions
from hicache.daemon.storage import Storage, Store
from hicache.daemon.tenant_labels import TenantLabels
from hicache.daemon.tenants import Tenant
from hicache.daemon.tls import ServerTls
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
    yield Reading("hicache_sessions_closed", "Sessions ended.", lambda: sessions.closed_count, is_counter=True)
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


def store_readings(snapshot: StoreSnapshot, *, is_indexed: bool) -> Iterator[Reading]:
    """Space, and what became of objects. All of one look at the store, so that the sums of StoreStats hold."""
    yield Reading("hicache_store_capacity_bytes", "Capacity.", lambda: snapshot.usage.capacity_bytes)
    yield Reading("hicache_store_used_bytes", "Space used, with overhead.", lambda: snapshot.usage.stored_bytes)
    holds: tuple[tuple[str, str, Callable[[Holds], int]], ...] = (
        ("hicache_store_leases", "Leases that have not ended.", lambda holds: holds.leases),
        ("hicache_store_leased_objects", "Objects under a lease.", lambda holds: holds.leased_keys),
        ("hicache_store_pinned_objects", "Objects that are pinned.", lambda holds: holds.pins),
        ("hicache_store_pinned_bytes", "Their space.", lambda holds: holds.pinned_bytes),
        ("hicache_watches", "Watches of clients.", lambda holds: holds.watchers),
    )
    for name, description, read_holds in holds:
        yield Reading(name, description, partial(_read_holds, snapshot, read_holds))
    counters: tuple[tuple[str, str, Callable[[StoreStats], int]], ...] = (
        ("hicache_store_read_bytes", "Payload read and verified.", lambda stats: stats.bytes_read),
        ("hicache_store_written_bytes", "Payload written.", lambda stats: stats.bytes_written),
        ("hicache_watch_events", "Events for watches.", lambda stats: stats.events_told),
        ("hicache_watch_lost_events", "Events of them lost by slow watches.", lambda stats: stats.events_lost),
        ("hicache_store_evicted_bytes", "Space freed by eviction.", lambda stats: stats.evicted_bytes),
        (
            "hicache_store_eviction_failures",
            "Objects that could not be evicted.",
            lambda stats: stats.eviction_failures,
        ),
    )
    for name, description, read in counters:
        yield Reading(name, description, partial(_read, snapshot, read), is_counter=True)
    yield from operation_readings(snapshot)
    if is_indexed:
        yield from held_readings(snapshot)
    else:
        yield Reading("hicache_store_objects", "Objects stored.", lambda: snapshot.usage.objects)
        yield Reading("hicache_store_payload_bytes", "Payload stored.", lambda: snapshot.usage.payload_bytes)


def operation_readings(snapshot: StoreSnapshot) -> Iterator[Reading]:
    """What the store was asked to do, and what came of it: asked = finished + open."""
    yield Reading(
        "hicache_store_asked_objects",
        "Objects that the store was asked about.",
        lambda: {(operation,): snapshot.stats.asked.get(operation, 0) for operation in Operation},
        ("operation",),
        is_counter=True,
    )
    yield Reading(
        "hicache_store_finished_objects",
        "Objects of them that are done, by outcome.",
        lambda: {
            (operation, outcome.name.lower()): count
            for operation, outcomes in snapshot.stats.finished.items()
            for outcome, count in outcomes.items()
        },
        ("operation", "outcome"),
        is_counter=True,
    )
    yield Reading(
        "hicache_store_open_objects",
        "Objects of them that the store works on.",
        lambda: {(operation,): snapshot.stats.open.get(operation, 0) for operation in Operation},
        ("operation",),
    )


def held_readings(snapshot: StoreSnapshot) -> Iterator[Reading]:
    """What came and went: recovered + added = removed + leaving + objects, in objects and in bytes."""
    units: tuple[tuple[str, str, str, Callable[[Held], int]], ...] = (
        ("objects", "Objects", "hicache_store_objects", lambda held: held.objects),
        ("bytes", "Payload", "hicache_store_payload_bytes", lambda held: held.payload_bytes),
    )
    for unit, what, resident, of in units:
        gauges: tuple[tuple[str, str, Callable[[StoreStats], Held]], ...] = (
            (resident, f"{what} in the store.", lambda stats: stats.resident),
            (f"hicache_store_recovered_{unit}", f"{what} that was there at the start.", lambda stats: stats.recovered),
            (f"hicache_store_leaving_{unit}", f"{what} being removed just now.", lambda stats: stats.leaving),
        )
        for name, description, read in gauges:
            yield Reading(name, description, partial(_read_held, snapshot, read, of))
        yield Reading(
            f"hicache_store_added_{unit}",
            f"{what} stored.",
            partial(_read_held, snapshot, lambda stats: stats.added, of),
            is_counter=True,
        )
        yield Reading(
            f"hicache_store_removed_{unit}",
            f"{what} removed, by reason.",
            partial(_read_removed, snapshot, of),
            ("reason",),
            is_counter=True,
        )


def window_readings(ceiling: Ceiling) -> Iterator[Reading]:
    """What was looked up in the last hour, and what no store could have found of it."""

    def by_kind() -> Values:
        reading = ceiling.read()
        return {("asked",): reading.asked, ("found",): reading.found, ("new",): reading.new}

    yield Reading(
        "hicache_window_keys",
        "Keys looked up in the last hour: asked, found of them, and new (estimate): a store that forgets nothing"
        " would have missed those, too.",
        by_kind,
        ("kind",),
    )


def certificate_readings(tls: ServerTls | None) -> Iterator[Reading]:
    """How long clients over TCP are let in; nothing without TLS."""

    def by_certificate() -> Values:
        return {} if tls is None else {(name,): end_s for name, end_s in tls.expirations_s().items()}

    yield Reading(
        "hicache_tls_certificate_expiration_timestamp_seconds",
        "When the first certificate ends of the chain of hicached (server), and of those that clients are checked with"
        " (client_ca).",
        by_certificate,
        ("certificate",),
    )


def tenant_readings(snapshot: StoreSnapshot, labels: TenantLabels) -> Iterator[Reading]:
    """What each tenant of the tenants file has."""
    gauges: tuple[tuple[str, str, Callable[[TenantStats], int]], ...] = (
        ("hicache_tenant_used_bytes", "Space of a tenant, with overhead.", lambda tenant: tenant.stored_bytes),
        ("hicache_tenant_objects", "Objects of a tenant.", lambda tenant: tenant.objects),
        ("hicache_tenant_pinned_bytes", "Space of what a tenant has pinned.", lambda tenant: tenant.pinned_bytes),
    )
    for name, description, read in gauges:
        yield Reading(name, description, partial(_read_tenants, snapshot, labels, read), ("tenant",))
    yield Reading(
        "hicache_tenant_evicted_objects",
        "Objects of a tenant that were evicted.",
        lambda: labels.counters("evictions", {name: stats.evictions for name, stats in snapshot.tenants.items()}),
        ("tenant",),
        is_counter=True,
    )


def rate_readings(
    rates: Mapping[Tenant, TenantRates], named: Callable[[], Sequence[Tenant]], labels: TenantLabels
) -> Iterator[Reading]:
    """Who was refused for being too fast."""

    def by_limit() -> Values:
        return {(limit,): sum(rate.refusals[limit] for rate in rates.values()) for limit in ("calls", "bytes")}

    yield Reading(
        "hicache_rate_refusals",
        "Calls and objects refused, by limit: calls, bytes.",
        by_limit,
        ("limit",),
        is_counter=True,
    )
    yield Reading(
        "hicache_tenant_rate_refusals",
        "Calls and objects of a tenant refused for its rates.",
        lambda: labels.counters("refusals", {tenant.name: rates[tenant].refusals.total() for tenant in named()}),
        ("tenant",),
        is_counter=True,
    )


def _read_tenants(snapshot: StoreSnapshot, labels: TenantLabels, read: Callable[[TenantStats], int]) -> Values:
    return labels.gauges({name: read(stats) for name, stats in snapshot.tenants.items()})


def _read(snapshot: StoreSnapshot, read: Callable[[StoreStats], int]) -> int:
    return read(snapshot.stats)


def _read_holds(snapshot: StoreSnapshot, read: Callable[[Holds], int]) -> int:
    return read(snapshot.stats.holds)


def _read_held(snapshot: StoreSnapshot, read: Callable[[StoreStats], Held], of: Callable[[Held], int]) -> int:
    return of(read(snapshot.stats))


def _read_removed(snapshot: StoreSnapshot, of: Callable[[Held], int]) -> Values:
    return {(cause.value,): of(held) for cause, held in snapshot.stats.removed.items()}
