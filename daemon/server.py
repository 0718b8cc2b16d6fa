"""The composition root of hicached: chooses every implementation, starts them in order, and stops them in time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial

import structlog

from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.admin_api import AdminApi
from hicache.daemon.authority import Authority
from hicache.daemon.bulk_socket import BulkSocket
from hicache.daemon.config import DaemonConfig
from hicache.daemon.control import Control
from hicache.daemon.grpc_server import GrpcServer
from hicache.daemon.hello import Hellos, Identity
from hicache.daemon.metrics import Metrics
from hicache.daemon.notify import Ready, notify_systemd, remove_ready_file, write_ready_file
from hicache.daemon.parts import (
    lock_socket,
    make_sessions,
    measure_storage,
    open_recorder,
    start_bulk,
    start_http,
    start_memory_socket,
    start_storage,
)
from hicache.daemon.peers import PeerTickets
from hicache.daemon.probes import Probes
from hicache.daemon.readings import StoreSnapshot
from hicache.daemon.recovery import OpenedStore, open_store, recover
from hicache.daemon.service import HiCachedService
from hicache.daemon.sessions import Sessions
from hicache.daemon.stopping import Stopping
from hicache.daemon.storage import Storage, Store
from hicache.daemon.tenant_bounds import store_limits
from hicache.daemon.tenants import Tenants
from hicache.daemon.tls import ServerTls
from hicache.daemon.transfers import Transfers
from hicache.daemon.version import daemon_version
from hicache.daemon.watch import Watches
from hicache.errors import ConfigError

log = structlog.get_logger("hicache.daemon")


class Daemon:
    """One hicached in this process. ``start`` it once, and ``stop`` it whether or not the start succeeded."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        environment: Mapping[str, str],
        opener: Callable[[DaemonConfig, StoreLimits], OpenedStore] = open_store,
    ) -> None:
        self._config = config
        self._environment = environment
        self._opener = opener
        self._stages = AsyncExitStack()  # what is undone by stop, last started first
        self._stopping = Stopping()
        self._readiness = "starting"
        self._storage: Storage | None = None
        self._snapshot: StoreSnapshot | None = None
        self.metrics = Metrics(version=daemon_version(), backend=config.backend)
        self.admin = AdminApi(Authority(), state=lambda: self._readiness)

    async def start(self) -> Ready:
        """Returns once clients are served. Raises ConfigError, StorageInUse or BackendError.

        In order: what is read, what is locked, probes, the store, and then, bottom up, those who serve clients.
        """
        config, stages = self._config, self._stages
        tenants = Tenants.load(config.tenants_file, defaults=config.tenant_defaults)
        limits = store_limits(config, tenants)
        tls, peer_tickets = ServerTls.of(config), PeerTickets()
        lock_socket(config, stages)
        if config.ready_file:
            remove_ready_file(config.ready_file)
        probes = Probes(metrics=self._render_metrics, is_alive=self._is_alive, readiness=lambda: self._readiness)
        http = await start_http(config, probes, self.admin, self.metrics, stages)
        self._readiness = "recovering"
        opened = await recover(partial(self._opener, config, limits), stages, self._stopping)
        self._storage = storage = start_storage(config, opened, stages, self._stopping)
        self._snapshot = measure_storage(self.metrics, storage, opened, tenants)
        sessions = make_sessions(config, storage, tenants, self.metrics)
        start_memory_socket(config, sessions, self.metrics, stages)
        transfers = Transfers(storage, self.metrics, chunk_bytes_ceiling=sessions.budgets.session_bytes)
        bulk, bulk_listen = start_bulk(
            config, sessions, transfers, self.metrics, stages, tls=tls, peer_tickets=peer_tickets
        )
        identity = Identity(daemon_version(), opened.store_id, bulk_listen.port if bulk_listen else 0)
        hellos = Hellos(config, identity, tenants, sessions, peer_tickets)
        listen = await self._start_grpc(hellos, sessions, storage, bulk, tls)
        return self._announce(Ready(os.getpid(), config.socket, listen, str(bulk_listen or ""), http))

    async def stop(self) -> bool:
        """Undoes what was started. True when the store was closed and no storage thread is left behind."""
        self._readiness = "stopping"
        self._stopping.begin()
        self.metrics.ready.set(0)
        notify_systemd("STOPPING=1", self._environment)
        await self._stages.aclose()
        return self._stopping.is_clean

    @property
    def store(self) -> Store:
        """What a started daemon serves."""
        assert self._storage is not None, "the daemon has not been started"
        return self._storage.store

    async def _start_grpc(
        self, hellos: Hellos, sessions: Sessions, storage: Storage, bulk: BulkSocket, tls: ServerTls | None
    ) -> str:
        """The TCP address with its real port; empty without one."""
        config = self._config
        service = HiCachedService(
            config,
            hellos=hellos,
            sessions=sessions,
            control=Control(
                storage, sessions, self.metrics, lease_ms_max=config.lease_ms_max, pin_s_max=config.pin_s_max
            ),
            watches=Watches(storage, step_timeout_s=config.call_timeout_s_max),
            metrics=self.metrics,
            recorder=open_recorder(config, self._stages),
        )
        server = GrpcServer(config, service, sessions, bulk, tls)
        self._stages.push_async_callback(server.stop)
        return await server.start()

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
        notify_systemd("READY=1", self._environment)
        log.info("ready", **asdict(ready))
        return ready

    async def _render_metrics(self) -> bytes:
        if self._snapshot is not None:
            await self._snapshot.refresh()
        return self.metrics.render()

    async def _is_alive(self) -> bool:
        return self._storage is None or await self._storage.is_alive()
