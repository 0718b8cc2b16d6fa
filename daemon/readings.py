"""The numbers that /metrics reads at each scrape rather than counts: sessions, memory, queues, the store.

They are read in the thread that renders, beside the event loop: of what changes there, a copy is walked through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hicache.backends.store_stats import Held, Holds, Operation, StoreStats, TenantStats
from hicache.ceiling import Ceiling
from hicache.daemon.metrics import Reading, Readings, Values
from hicache.daemon.rates import TenantRates
from hicache.daemon.sessions import Sessions
from hicache.daemon.storage import Storage
from hicache.daemon.store_look import StoreLook
from hicache.daemon.tenant_labels import TenantLabels
from hicache.daemon.tenants import Tenant
from hicache.daemon.tls import ServerTls

Last = Callable[[], StoreLook]  # what the store said last


class LookReadings(Collector):
    """Exports readings of one look at the store, also where another one is taken while they are read."""

    def __init__(self, last: Last, readings: Callable[[Last], Iterator[Reading]]) -> None:
        self._last = last
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        """One family for each reading."""
        look = self._last()
        return Readings(self._readings(lambda: look)).collect()


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
        lambda: sum(region.size_bytes for region in list(sessions.mapped)),
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


def store_readings(last: Last, *, is_indexed: bool) -> Iterator[Reading]:
    """Space, and what became of objects: of one look, for LookReadings, so that the sums of StoreStats hold."""
    yield _of_look(last, "hicache_store_capacity_bytes", "Capacity.", lambda look: look.usage.capacity_bytes)
    yield _of_look(last, "hicache_store_used_bytes", "Space used, with overhead.", lambda look: look.usage.stored_bytes)
    holds: tuple[tuple[str, str, Callable[[Holds], int]], ...] = (
        ("hicache_store_leases", "Leases that have not ended.", lambda holds: holds.leases),
        ("hicache_store_leased_objects", "Objects under a lease.", lambda holds: holds.leased_keys),
        ("hicache_store_pinned_objects", "Objects that are pinned.", lambda holds: holds.pins),
        ("hicache_store_pinned_bytes", "Their space.", lambda holds: holds.pinned_bytes),
        ("hicache_watches", "Watches of clients.", lambda holds: holds.watchers),
    )
    for name, description, read_holds in holds:
        yield _of_look(last, name, description, _of_holds(read_holds))
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
    for name, description, read_stats in counters:
        yield _of_look(last, name, description, _of_stats(read_stats), is_counter=True)
    yield from _operation_readings(last)
    if is_indexed:
        yield from _held_readings(last)
    else:
        yield _of_look(last, "hicache_store_objects", "Objects stored.", lambda look: look.usage.objects)
        yield _of_look(last, "hicache_store_payload_bytes", "Payload stored.", lambda look: look.usage.payload_bytes)


def _of_look(
    last: Last,
    name: str,
    description: str,
    read: Callable[[StoreLook], float | Values],
    labels: tuple[str, ...] = (),
    *,
    is_counter: bool = False,
) -> Reading:
    return Reading(name, description, lambda: read(last()), labels, is_counter)


def _of_holds(read: Callable[[Holds], int]) -> Callable[[StoreLook], int]:
    return lambda look: read(look.stats.holds)


def _of_stats(read: Callable[[StoreStats], int]) -> Callable[[StoreLook], int]:
    return lambda look: read(look.stats)


def _operation_readings(last: Last) -> Iterator[Reading]:
    """What the store was asked to do, and what came of it: asked = finished + open."""
    yield _of_look(
        last,
        "hicache_store_asked_objects",
        "Objects that the store was asked about.",
        lambda look: {(operation,): look.stats.asked.get(operation, 0) for operation in Operation},
        ("operation",),
        is_counter=True,
    )
    yield _of_look(
        last,
        "hicache_store_finished_objects",
        "Objects of them that are done, by outcome.",
        lambda look: {
            (operation, outcome.name.lower()): count
            for operation, outcomes in look.stats.finished.items()
            for outcome, count in outcomes.items()
        },
        ("operation", "outcome"),
        is_counter=True,
    )
    yield _of_look(
        last,
        "hicache_store_open_objects",
        "Objects of them that the store works on.",
        lambda look: {(operation,): look.stats.open.get(operation, 0) for operation in Operation},
        ("operation",),
    )


def _held_readings(last: Last) -> Iterator[Reading]:
    """What came and went: recovered + added = removed + leaving + objects, in objects and in bytes."""
    units: tuple[tuple[str, str, str, Callable[[Held], int]], ...] = (
        ("objects", "Objects", "hicache_store_objects", lambda held: held.objects),
        ("bytes", "Payload", "hicache_store_payload_bytes", lambda held: held.payload_bytes),
    )
    for unit, what, resident, of in units:
        yield from _held_in_unit(last, unit, what, resident, of)


def _held_in_unit(last: Last, unit: str, what: str, resident: str, of: Callable[[Held], int]) -> Iterator[Reading]:
    yield _of_look(last, resident, f"{what} in the store.", lambda look: of(look.stats.resident))
    name, description = f"hicache_store_recovered_{unit}", f"{what} that was there at the start."
    yield _of_look(last, name, description, lambda look: of(look.stats.recovered))
    name, description = f"hicache_store_leaving_{unit}", f"{what} being removed just now."
    yield _of_look(last, name, description, lambda look: of(look.stats.leaving))
    name, description = f"hicache_store_added_{unit}", f"{what} stored."
    yield _of_look(last, name, description, lambda look: of(look.stats.added), is_counter=True)
    yield _of_look(
        last,
        f"hicache_store_removed_{unit}",
        f"{what} removed, by reason.",
        lambda look: {(cause.value,): of(held) for cause, held in look.stats.removed.items()},
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


def tenant_readings(last: Last, named: Callable[[], Sequence[Tenant]], labels: TenantLabels) -> Iterator[Reading]:
    """What each tenant of the tenants file has."""

    def of_tenants(read: Callable[[TenantStats], int]) -> dict[str, float]:
        known = last().tenants
        return {tenant.name: read(known[tenant]) for tenant in named() if tenant in known}

    def gauges(read: Callable[[TenantStats], int]) -> Callable[[], Values]:
        return lambda: labels.gauges(of_tenants(read))

    levels: tuple[tuple[str, str, Callable[[TenantStats], int]], ...] = (
        ("hicache_tenant_used_bytes", "Space of a tenant, with overhead.", lambda tenant: tenant.stored_bytes),
        ("hicache_tenant_objects", "Objects of a tenant.", lambda tenant: tenant.objects),
        ("hicache_tenant_pinned_bytes", "Space of what a tenant has pinned.", lambda tenant: tenant.pinned_bytes),
    )
    for name, description, read in levels:
        yield Reading(name, description, gauges(read), ("tenant",))
    yield Reading(
        "hicache_tenant_evicted_objects",
        "Objects of a tenant that were evicted.",
        lambda: labels.counters("evictions", of_tenants(lambda tenant: tenant.evictions)),
        ("tenant",),
        is_counter=True,
    )


def rate_readings(
    rates: Mapping[Tenant, TenantRates], named: Callable[[], Sequence[Tenant]], labels: TenantLabels
) -> Iterator[Reading]:
    """Who was refused for being too fast."""

    def by_limit() -> Values:
        return {(limit,): sum(rate.refusals[limit] for rate in list(rates.values())) for limit in ("calls", "bytes")}

    yield Reading(
        "hicache_rate_refusals",
        "Calls and objects refused, by limit: calls, bytes.",
        by_limit,
        ("limit",),
        is_counter=True,
    )

    def by_tenant() -> Values:
        known = dict(rates)
        refused = {tenant.name: known[tenant].refusals.total() for tenant in named() if tenant in known}
        return labels.counters("refusals", refused)

    yield Reading(
        "hicache_tenant_rate_refusals",
        "Calls and objects of a tenant refused for its rates.",
        by_tenant,
        ("tenant",),
        is_counter=True,
    )
