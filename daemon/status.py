"""What a daemon tells about itself: gathers the status and the history that the page, `status` and `top` show."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hicache.admin.status import (
    ERRORS_SHOWN,
    NAMESPACES_SHOWN,
    SLOWEST_SHOWN,
    ErrorCount,
    Latency,
    Lookups,
    LoopDelay,
    Namespace,
    Sample,
    SessionCounts,
    SlowObject,
    Status,
    TenantUse,
    Tier,
    Traffic,
)
from hicache.admin.status import History as HistoryMessage
from hicache.backends.base import Number
from hicache.ceiling import CeilingReading
from hicache.daemon.counts import METHODS_BY_KIND, Counts, Reason, read_counts
from hicache.daemon.hello import printable
from hicache.daemon.history import History, Levels
from hicache.daemon.loop_delay import Delay
from hicache.daemon.metrics import Metrics
from hicache.daemon.namespaces import KnownNamespaces
from hicache.daemon.sessions import Sessions
from hicache.daemon.slowest import Slowest
from hicache.daemon.store_look import StoreLooks
from hicache.daemon.tenants import Tenants
from hicache.daemon.tier_fills import sum_fills
from hicache.histogram import Histogram

FRESH_S = 0.5  # however many ask, the store is not asked more often


@dataclass(frozen=True, slots=True)
class Parts:
    """What a serving daemon is asked for its status."""

    looks: StoreLooks
    backend_numbers: Callable[[], Iterable[Number]]  # what the backend tells beside what every backend has
    sessions: Sessions
    tenants: Tenants
    namespaces: KnownNamespaces
    slowest: Slowest


class StatusReporter:
    """Event loop only. Never fails and never waits for long: what does not answer keeps its last numbers."""

    def __init__(
        self,
        *,
        version: str,
        backend: str,
        sessions_max: int,
        metrics: Metrics,
        state: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``state`` says ``ready``, or what the daemon is doing instead."""
        self._version = version
        self._backend = backend
        self._sessions_max = sessions_max
        self._metrics = metrics
        self._state = state
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_s = clock()
        self._parts: Parts | None = None
        self._history = History()
        self._status: tuple[float, Status] | None = None
        self._gathering = asyncio.Lock()

    def serve_from(self, parts: Parts) -> None:
        """From here on there is a store."""
        self._parts = parts

    async def status(self) -> Status:
        """How it stands: at most FRESH_S old, unless the state has changed since."""
        async with self._gathering:
            if (
                self._status is None
                or self._clock() - self._status[0] >= FRESH_S
                or self._status[1].state != self._state()
            ):
                await self._refresh()
                self._status = (self._clock(), self._gather())
            return self._status[1]

    @property
    def history_samples(self) -> deque[Sample]:
        """The samples of the last hour, as they are kept."""
        return self._history.samples

    def history(self) -> HistoryMessage:
        """The samples of the last hour."""
        return HistoryMessage(samples=list(self._history.samples))

    async def sample(self) -> Sample | None:
        """Ends an interval of SAMPLE_S and returns it; None for the first call, which begins the first."""
        async with self._gathering:
            await self._refresh()
        parts = self._parts
        levels = Levels(
            used_bytes=parts.looks.last.usage.stored_bytes if parts is not None else 0,
            sessions=len(parts.sessions) if parts is not None else 0,
            ceiling=self._metrics.ceiling.read().ceiling,
        )
        return self._history.add(now_s=self._clock(), at_s=self._wall_clock(), counts=self._counts(), levels=levels)

    async def _refresh(self) -> None:
        if self._parts is not None:
            await self._parts.looks.refresh()

    def _counts(self) -> Counts:
        return read_counts(self._metrics, None if self._parts is None else self._parts.looks.last.stats)

    def _gather(self) -> Status:
        now_s, parts, counts = self._clock(), self._parts, self._counts()
        look = None if parts is None else parts.looks.last
        window_s, hour = self._history.window(now_s, counts)
        return Status(
            version=self._version,
            backend=self._backend,
            state=self._state(),
            at_s=self._wall_clock(),
            uptime_s=now_s - self._started_s,
            window_s=window_s,
            store_age_s=now_s - look.at_s if look is not None else None,
            tiers=[*_engine_tiers(parts), *_tiers(parts)] if parts is not None else [],
            lookups=_lookups(self._metrics.ceiling.read()),
            traffic=_traffic(self._history.lately(now_s, counts), hour),
            latency=[_latency(kind, hour.times.get(kind, Histogram())) for kind in METHODS_BY_KIND],
            sessions=_sessions(parts.sessions if parts is not None else None, self._sessions_max),
            loop_delay=_loop_delay(self._metrics.loop_delay.longest),
            tenants=_tenants(parts) if parts is not None else [],
            tenant_count=parts.tenants.count if parts is not None else 0,
            namespaces=_namespaces(parts.namespaces) if parts is not None else [],
            namespace_count=len(parts.namespaces) if parts is not None else 0,
            slowest=_slowest(parts) if parts is not None else [],
            errors=_errors(hour.errors),
        )


def _engine_tiers(parts: Parts) -> list[Tier]:
    return [
        Tier(name=name, used_bytes=fill.used_bytes, capacity_bytes=fill.capacity_bytes, engines=fill.engines)
        for name, fill in sum_fills(session.tier_fills for session in parts.sessions).items()
    ]


def _tiers(parts: Parts) -> list[Tier]:
    """From the fastest to the slowest."""
    numbers = {number.name: int(number.value) for number in parts.backend_numbers()}
    usage = parts.looks.last.usage
    l3 = Tier(name="l3", used_bytes=usage.stored_bytes, capacity_bytes=usage.capacity_bytes, objects=usage.objects)
    if not numbers.get("hicache_ram_capacity_bytes"):
        return [l3]
    ram = Tier(
        name="ram",
        used_bytes=numbers["hicache_ram_used_bytes"],
        capacity_bytes=numbers["hicache_ram_capacity_bytes"],
        objects=numbers["hicache_ram_objects"],
    )
    return [ram, l3]


def _traffic(lately: tuple[float, Counts], hour: Counts) -> Traffic:
    seconds, counts = max(lately[0], FRESH_S), lately[1]
    return Traffic(
        read_bytes=hour.read_bytes,
        written_bytes=hour.written_bytes,
        evicted_bytes=hour.evicted_bytes,
        read_bytes_per_s=counts.read_bytes / seconds,
        written_bytes_per_s=counts.written_bytes / seconds,
    )


def _lookups(hour: CeilingReading) -> Lookups:
    return Lookups(asked=hour.asked, found=hour.found, hit_rate=hour.hit_rate, ceiling=hour.ceiling)


def _latency(kind: str, times: Histogram) -> Latency:
    return Latency(kind=kind, calls=times.count, p50_s=times.quantile(0.5), p99_s=times.quantile(0.99))


def _sessions(sessions: Sessions | None, limit: int) -> SessionCounts:
    if sessions is None:
        return SessionCounts(open=0, limit=limit, inflight_bytes=0, inflight_waiting=0)
    waiting = sessions.budgets.waiting_count + sum(session.budget.waiting_count for session in sessions)
    inflight_bytes = sessions.budgets.total.used_bytes
    return SessionCounts(open=len(sessions), limit=limit, inflight_bytes=inflight_bytes, inflight_waiting=waiting)


def _loop_delay(longest: Delay) -> LoopDelay:
    return LoopDelay(longest_s=longest.seconds, core_wait_s=longest.core_wait_s)


def _tenants(parts: Parts) -> list[TenantUse]:
    sessions = Counter(session.tenant for session in parts.sessions)
    return [
        TenantUse(
            name=tenant.name,
            used_bytes=stats.stored_bytes,
            quota_bytes=limits.quota_bytes,
            objects=stats.objects,
            quota_objects=limits.quota_objects,
            pinned_bytes=stats.pinned_bytes,
            evicted_objects=stats.evictions,
            sessions=sessions[tenant],
        )
        for tenant, stats in parts.looks.last.fullest
        if (limits := parts.tenants.settings.get(tenant)) is not None
    ]


def _namespaces(known: KnownNamespaces) -> list[Namespace]:
    latest = itertools.islice(known.latest(), NAMESPACES_SHOWN)
    return [
        Namespace(digest=digest.hex(), tenant=tenant.name, model=printable(str(descriptor.get("model", ""))))
        for tenant, digest, descriptor in latest
    ]


def _slowest(parts: Parts) -> list[SlowObject]:
    names = {tenant.digest: tenant.name for tenant in parts.tenants.settings}
    return [
        SlowObject(
            at_s=move.at_s,
            kind=move.kind,
            seconds=move.seconds,
            size_bytes=move.size_bytes,
            objects=move.objects,
            tenant=names.get(move.tenant_digest, ""),
            key=move.short_key,
        )
        for move in parts.slowest.slowest(SLOWEST_SHOWN)
    ]


def _errors(errors: Counter[Reason]) -> list[ErrorCount]:
    return [
        ErrorCount(of=of, reason=reason, count=count)
        for (of, reason), count in errors.most_common(ERRORS_SHOWN)
        if count > 0
    ]
