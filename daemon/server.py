"""The composition root of hicached: chooses every implementation, starts them in order, and stops them in time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial

import structlog

from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.admin_api import AdminApi
from hicache.daemon.admin_store import serve_store_verbs
from hicache.daemon.admin_tenants import TenantVerbs
from hicache.daemon.admin_trace import serve_trace_verb
from hicache.daemon.authority import Authority
from hicache.daemon.config import DaemonConfig
from hicache.daemon.control import Control
from hicache.daemon.drain import Drain
from hicache.daemon.grpc_server import GrpcServer
from hicache.daemon.health import Health
from hicache.daemon.hello import Hellos, Identity
from hicache.daemon.lifecycle_verbs import serve_lifecycle
from hicache.daemon.listeners import Listeners, inherited_sockets
from hicache.daemon.metrics import Metrics, Readings
from hicache.daemon.notify import Ready, remove_ready_file, write_ready_file
from hicache.daemon.parts import (
    lock_socket,
    make_sessions,
    measure_storage,
    open_names,
    open_recorder,
    start_bulk,
    start_health,
    start_http,
    start_loop_delay,
    start_memory_socket,
    start_miss_watch,
    start_status,
    start_storage,
)
from hicache.daemon.peers import PeerTickets
from hicache.daemon.probes import Probes
from hicache.daemon.readings import certificate_readings
from hicache.daemon.recorder import Recorders
from hicache.daemon.recovery import OpenedStore, RecoveryProgress, open_store, recover, wipe_at_stop
from hicache.daemon.reload import Reloadable, Reloader
from hicache.daemon.service import HiCachedService
from hicache.daemon.service_manager import ServiceManager
from hicache.daemon.sessions import Sessions
from hicache.daemon.status import Parts, StatusReporter
from hicache.daemon.status_feed import StatusFeed
from hicache.daemon.stopping import STOP_S_MAX, Stopping
from hicache.daemon.storage import Storage, Store
from hicache.daemon.store_look import StoreLooks
from hicache.daemon.tenant_bounds import chunk_bytes_ceiling, store_limits
from hicache.daemon.tenant_reload import TenantReload
from hicache.daemon.tenants import Tenants
from hicache.daemon.tls import ServerTls
from hicache.daemon.transfers import Transfers
from hicache.daemon.version import daemon_version
from hicache.daemon.watch import Watches
from hicache.daemon.watchdog import Watchdog
from hicache.errors import ConfigError

log = structlog.get_logger("hicache.daemon")


class Daemon:
    """One hicached in this process. ``start`` it once, and ``stop`` it whether or not the start succeeded."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        environment: Mapping[str, str],
        opener: Callable[[DaemonConfig, StoreLimits], OpenedStore] | None = None,
        reread: Callable[[], DaemonConfig] | None = None,
    ) -> None:
        """``environment`` is what a service manager says by it: NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS.

        ``reread`` reads the settings again for a reload, and raises ConfigError; None: they stay.
        """
        self._config = config
        self._environment = environment
        self._manager = ServiceManager(environment)
        self._reread = reread or (lambda: config)
        self._reloader: Reloader | None = None
        self.drain = Drain(self._manager, on_begin=self._note_draining)
        self._opener = opener or partial(open_store, on_progress=RecoveryProgress(self._manager))
        self._stages = AsyncExitStack()  # what is undone by stop, last started first
        self._stopping = Stopping()
        self._readiness = "starting"
        self._storage: Storage | None = None
        self._health = Health()
        self._looks: StoreLooks | None = None
        self.metrics = Metrics(version=daemon_version(), backend=config.backend, tenants_max=config.metrics_tenants_max)
        self._authority = Authority()
        self.admin = AdminApi(self._authority, state=lambda: self._readiness)
        self._reporter = StatusReporter(
            version=daemon_version(),
            backend=config.backend,
            sessions_max=config.sessions_max,
            metrics=self.metrics,
            state=lambda: self._readiness,
        )
        self.status_feed = StatusFeed(self._reporter)

    async def start(self) -> Ready:
        """Returns once clients are served. Raises ConfigError, StorageInUse or BackendError.

        In order: what is read, what is locked, probes, the store, and then, bottom up, those who serve clients.
        """
        config, stages = self._config, self._stages
        tenants = Tenants.load(config.tenants_file, defaults=config.tenant_defaults)
        limits = store_limits(config, tenants)
        tls, peer_tickets = ServerTls.of(config), PeerTickets()
        self.metrics.registry.register(Readings(certificate_readings(tls)))
        self._authority.learn(config, tenants)
        lock_socket(config, stages)
        if config.ready_file:
            remove_ready_file(config.ready_file)
        listeners = Listeners(inherited_sockets(self._environment), stages, mode=config.socket_mode_bits)
        probes = Probes(
            metrics=self._render_metrics,
            problem=lambda: listeners.files.problem() or self._health.problem,
            readiness=lambda: self._readiness,
        )
        http = await start_http(config, listeners, probes, self.admin, self.metrics, stages)
        start_loop_delay(self.metrics, stages)
        start_status(self.status_feed, self.admin, stages)
        self._readiness = "recovering"
        opened = await recover(partial(self._opener, config, limits), stages, self._stopping)
        if not config.persist:
            stages.push_async_callback(wipe_at_stop, config.path, self._stopping)
        self._storage = storage = start_storage(config, opened, stages, self._stopping)
        start_health(self._health, storage, stages)
        self._looks = looks = measure_storage(self.metrics, storage, opened, tenants)
        start_miss_watch(self.metrics, stages)
        names = open_names(config, storage, stages)
        sessions = make_sessions(config, storage, tenants, self.metrics)
        start_memory_socket(config, listeners, sessions, self.metrics, stages)
        transfers = Transfers(storage, self.metrics, chunk_bytes_ceiling=chunk_bytes_ceiling(config))
        bulk, bulk_listen = start_bulk(
            config, listeners, sessions, transfers, self.metrics, stages, tls=tls, peer_tickets=peer_tickets
        )
        bulk_port = bulk_listen.port if bulk_listen else 0
        identity = Identity(daemon_version(), lambda: storage.store.store_id, bulk_port)
        recorders = Recorders()
        open_recorder(config, recorders, stages)
        hellos = Hellos(config, identity, tenants, sessions, names, peer_tickets)
        background = serve_store_verbs(self.admin, config, storage, tenants, sessions, names, stages)
        serve_trace_verb(self.admin, recorders)
        service = self._make_service(hellos, sessions, storage, recorders)
        server = GrpcServer(config, service, sessions, listeners, tls)
        stages.push_async_callback(server.stop)
        listen = await server.start()
        listeners.check_all_used()
        self.drain.watch(sessions, busy_calls=lambda: service.busy_count + bulk.busy_count)
        parts: list[Reloadable] = [TenantReload(tenants, sessions, storage.store), self._authority]
        self._start_reloader(parts if tls is None else [*parts, tls], storage.store)
        TenantVerbs(self.reloader, storage, tenants, sessions, names, background).serve(self.admin)
        self._reporter.serve_from(
            Parts(looks, storage.store.numbers, sessions, tenants, hellos.namespaces, transfers.slowest)
        )
        return self._announce(Ready(os.getpid(), config.socket, listen, str(bulk_listen or ""), http))

    async def stop(self) -> bool:
        """Drains and undoes what was started. True when the store was closed and no storage thread is left behind."""
        self.drain.begin(within_s=self.drain_s)
        await self.drain.wait()
        self._readiness = "stopping"
        self._stopping.begin()
        self.metrics.ready.set(0)
        self._manager.stopping("stopping", within_s=STOP_S_MAX)
        await self._stages.aclose()
        return self._stopping.is_clean

    @property
    def store(self) -> Store:
        """What a started daemon serves."""
        assert self._storage is not None, "the daemon has not been started"
        return self._storage.store

    @property
    def reloader(self) -> Reloader:
        """Of a started daemon."""
        assert self._reloader is not None, "the daemon has not been started"
        return self._reloader

    @property
    def drain_s(self) -> float:
        """How long a stop waits for what is held, as last set."""
        return (self._config if self._reloader is None else self._reloader.config).drain_s

    def _note_draining(self) -> None:
        self._readiness = "draining"
        self.metrics.ready.set(0)

    def _start_reloader(self, parts: Sequence[Reloadable], store: Store) -> None:
        self._reloader = Reloader(self._config, self._reread, parts, store=store, manager=self._manager)
        self._stages.callback(self._reloader.stop)
        serve_lifecycle(self.admin, self.drain, self._reloader, drain_s=lambda: self.drain_s)

    def _make_service(
        self, hellos: Hellos, sessions: Sessions, storage: Storage, recorders: Recorders
    ) -> HiCachedService:
        config = self._config
        return HiCachedService(
            config,
            hellos=hellos,
            sessions=sessions,
            control=Control(
                storage, sessions, self.metrics, lease_ms_max=config.lease_ms_max, pin_s_max=config.pin_s_max
            ),
            watches=Watches(storage, step_timeout_s=config.call_timeout_s_max),
            metrics=self.metrics,
            recorders=recorders,
        )

    def _announce(self, ready: Ready) -> Ready:
        if self._config.ready_file:
            try:
                write_ready_file(self._config.ready_file, ready)
            except OSError as error:
                expected = f"a file that can be written ({error.strerror})"
                raise ConfigError("ready_file", self._config.ready_file, expected) from error
            self._stages.callback(remove_ready_file, self._config.ready_file)
        self._readiness = "ready"
        self.metrics.ready.set(1)
        watchdog = Watchdog(self._manager, lambda: self._health.is_alive)
        watchdog.start()
        self._stages.push_async_callback(watchdog.stop)
        self._manager.ready("serving clients")
        log.info("ready", **asdict(ready))
        return ready

    async def _render_metrics(self) -> bytes:
        if self._looks is not None:
            await self._looks.refresh()
        return self.metrics.render()
