"""Makes and starts each part of hicached, and says how it is undone: ``stages`` undoes the last one started first."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog
from aiohttp import web

from hicache.backends.namespaces import NamespaceNames
from hicache.daemon.acceptor import BACKLOG
from hicache.daemon.admin_api import AdminApi
from hicache.daemon.bulk_calls import BulkCalls
from hicache.daemon.bulk_socket import BulkSocket
from hicache.daemon.config import DaemonConfig
from hicache.daemon.health import Health
from hicache.daemon.http import CONNECTIONS_MAX, HttpServer
from hicache.daemon.listeners import Listeners
from hicache.daemon.memory_socket import STRANGE_QUEUE_MAX, MemorySocket
from hicache.daemon.metrics import BackendNumbers, Metrics, Reading, Readings
from hicache.daemon.miss_watch import MissWatch
from hicache.daemon.page import Page
from hicache.daemon.peers import PeerTickets
from hicache.daemon.probes import Probes
from hicache.daemon.rates import TenantRates
from hicache.daemon.readings import (
    Last,
    LookReadings,
    rate_readings,
    session_readings,
    store_readings,
    tenant_readings,
    thread_readings,
    window_readings,
)
from hicache.daemon.recorder import Recorders, TraceRecorder
from hicache.daemon.recovery import OpenedStore
from hicache.daemon.sessions import Sessions
from hicache.daemon.settings import HostPort
from hicache.daemon.socket_lock import SocketLock
from hicache.daemon.status_feed import StatusFeed
from hicache.daemon.stopping import Stopping
from hicache.daemon.storage import STUCK_S, Storage, Store
from hicache.daemon.store_look import StoreLooks
from hicache.daemon.tenant_bounds import inflight_budgets, region_budget, tenant_sessions_max
from hicache.daemon.tenants import Tenants
from hicache.daemon.tls import ServerTls
from hicache.daemon.transfers import Transfers
from hicache.daemon.upkeep import Upkeep
from hicache.workers import QueueFull, Workers

REGIONS_S = 0.3  # for regions that are being detached when the stop begins
UNMAPS_MAX = 8192  # mappings that wait for the thread that unmaps them

log = structlog.get_logger("hicache.daemon")


def lock_socket(config: DaemonConfig, stages: AsyncExitStack) -> None:
    """Raises StorageInUse where another daemon owns the socket."""
    lock = SocketLock(config.lock_file, config.socket)
    stages.callback(lock.release)


async def start_http(
    config: DaemonConfig,
    listeners: Listeners,
    probes: Probes,
    admin: AdminApi,
    metrics: Metrics,
    stages: AsyncExitStack,
) -> str:
    """Serves the admin socket, and the address ``http`` where there is one; returns that with its real port."""

    async def serve(listener: socket.socket, routes: Sequence[web.RouteDef]) -> str:
        server = HttpServer(routes, on_foreign_host=metrics.host_refusals.inc)
        stages.push_async_callback(server.stop)
        return await server.start(listener)

    listener = listeners.unix("admin", config.admin_socket, backlog=CONNECTIONS_MAX)
    await serve(listener, [*probes.routes(), *admin.routes(is_guarded=True)])
    routes = [*Page().routes(), *probes.routes(), *admin.routes(is_guarded=False)]
    match config.http_address:
        case None:
            return ""
        case HostPort() as address:
            return await serve(listeners.tcp("http", address, backlog=CONNECTIONS_MAX), routes)
        case path:
            return await serve(listeners.unix("http", path, backlog=CONNECTIONS_MAX, setting="http"), routes)


def start_status(feed: StatusFeed, admin: AdminApi, stages: AsyncExitStack) -> None:
    """Has the admin API tell how the daemon is, from now to its stop."""
    feed.start(admin)
    stages.push_async_callback(feed.stop)


def start_loop_delay(metrics: Metrics, stages: AsyncExitStack) -> None:
    """Has metrics and status tell how late the event loop is, from now to its stop."""
    metrics.loop_delay.start()
    stages.push_async_callback(metrics.loop_delay.stop)


def open_recorder(config: DaemonConfig, recorders: Recorders, stages: AsyncExitStack) -> None:
    """Writes the trace of look-ups to ``trace_file``, if that is wanted."""
    if not config.trace_file:
        return
    recorder = TraceRecorder.open(
        config.trace_file, bytes_max=config.trace_bytes_max, block_tokens=config.trace_block_tokens
    )
    stages.callback(recorder.close)
    recorders.add(recorder)


def open_names(config: DaemonConfig, storage: Storage, stages: AsyncExitStack) -> NamespaceNames:
    """What is known of namespaces; kept beside the store, where it has a directory of its own."""
    directory = None if config.is_shared else Path(config.path)
    names = NamespaceNames(
        directory, on_failure=lambda reason: log.warning("namespaces lose their names", reason=reason)
    )
    upkeep = Upkeep(storage, names)
    upkeep.start()
    stages.callback(names.write)
    stages.push_async_callback(upkeep.stop)
    return names


def start_storage(config: DaemonConfig, opened: OpenedStore, stages: AsyncExitStack, stopping: Stopping) -> Storage:
    """The threads that call the store; closing them closes it."""
    storage = Storage(opened.store, io_threads=config.io_threads, stuck_s=STUCK_S)
    stages.push_async_callback(_close_storage, storage, stopping)
    return storage


async def _close_storage(storage: Storage, stopping: Stopping) -> None:
    closing = Workers("hicached-close", threads=1, queue_max=1)
    left_s = stopping.store_left_s
    job = closing.submit(partial(storage.close, timeout_s=left_s / 2))
    done, _ = await asyncio.wait([asyncio.wrap_future(job.future)], timeout=left_s)
    closing.close(timeout_s=0)
    if not any(future.result() for future in done):
        stopping.is_clean = False
        log.error("the storage did not stop in time; everything that was acknowledged is safe")


def start_health(health: Health, storage: Storage, stages: AsyncExitStack) -> None:
    """Has probes and the watchdog know how the storage is."""
    health.start(storage)
    stages.push_async_callback(health.stop)


def measure_storage(metrics: Metrics, storage: Storage, opened: OpenedStore, tenants: Tenants) -> StoreLooks:
    """Has /metrics show the storage. Returns what is refreshed before each scrape."""
    looks = StoreLooks(storage, tenants, opened.look)

    def of_look(last: Last) -> Iterator[Reading]:
        yield from store_readings(last, is_indexed=opened.store.is_indexed)
        yield from tenant_readings(last, lambda: tenants.named, metrics.tenant_labels)

    metrics.registry.register(Readings(thread_readings(storage)))
    metrics.registry.register(LookReadings(lambda: looks.last, of_look))
    metrics.registry.register(Readings(window_readings(metrics.ceiling)))
    metrics.registry.register(BackendNumbers(opened.store.numbers))
    return looks


def start_miss_watch(metrics: Metrics, stages: AsyncExitStack) -> None:
    """Has the log say what clients did not get."""
    watch = MissWatch(metrics.tally.read)
    watch.start()
    stages.push_async_callback(watch.stop)


def make_sessions(config: DaemonConfig, storage: Storage, tenants: Tenants, metrics: Metrics) -> Sessions:
    """No session yet, and the bounds that all of them will keep."""

    def release_leases(lease_ids: Sequence[int]) -> None:
        with contextlib.suppress(QueueFull):  # they run out by themselves
            storage.control.submit(partial(_release_all, storage.store, lease_ids))

    rates = {
        tenant: TenantRates(calls_per_s_max=settings.calls_per_s_max, bytes_per_s_max=settings.bytes_per_s_max)
        for tenant, settings in tenants.settings.items()
    }
    sessions = Sessions(
        sessions_max=config.sessions_max,
        tenant_sessions_max=tenant_sessions_max(config, tenants),
        budgets=inflight_budgets(config, tenants),
        rates=rates,
        region_budget=region_budget(config, tenants),
        release_leases=release_leases,
    )
    metrics.registry.register(Readings(session_readings(sessions)))
    metrics.registry.register(Readings(rate_readings(rates, lambda: tenants.named, metrics.tenant_labels)))
    return sessions


def start_memory_socket(
    config: DaemonConfig, listeners: Listeners, sessions: Sessions, metrics: Metrics, stages: AsyncExitStack
) -> None:
    """Takes memory of clients from here on."""
    unmapping = Workers("hicached-unmap", threads=1, queue_max=UNMAPS_MAX)
    stages.callback(unmapping.close, timeout_s=0)  # what is still mapped goes with the process

    def unmap(close_mapping: Callable[[], None]) -> None:
        with contextlib.suppress(QueueFull):  # the collector unmaps it
            unmapping.submit(close_mapping)

    listener = listeners.unix("memory", config.memory_socket, backlog=BACKLOG)
    strange = Workers("hicached-strange", threads=1, queue_max=STRANGE_QUEUE_MAX)
    stages.callback(strange.close, timeout_s=0)  # what cannot be closed goes with the process
    memory_socket = MemorySocket(
        listener, sessions, unmap=unmap, strange=strange, on_refusal=metrics.region_refusals.inc
    )
    memory_socket.start()
    stages.push_async_callback(memory_socket.stop, timeout_s=REGIONS_S)


def start_bulk(
    config: DaemonConfig,
    listeners: Listeners,
    sessions: Sessions,
    transfers: Transfers,
    metrics: Metrics,
    stages: AsyncExitStack,
    *,
    tls: ServerTls | None,
    peer_tickets: PeerTickets,
) -> tuple[BulkSocket, HostPort | None]:
    """The bulk socket, and its TCP address with its real port if it has one."""
    sockets = [listeners.unix("bulk", config.bulk_socket, backlog=BACKLOG)]
    address = config.bulk_listen_address
    if address is not None:
        sockets.append(listeners.tcp("bulk_listen", address, backlog=BACKLOG))
        address = HostPort(*sockets[1].getsockname()[:2])
    calls = BulkCalls(config, sessions=sessions, transfers=transfers, metrics=metrics)
    bulk = BulkSocket(sockets, sessions, calls, tls=tls, peer_tickets=peer_tickets)
    bulk.start()
    stages.push_async_callback(bulk.stop)
    return bulk, address


def _release_all(store: Store, lease_ids: Sequence[int]) -> None:
    for lease_id in lease_ids:
        store.release(lease_id)
