"""The composition root of hicached: chooses every implementation, starts them in order, and stops them in time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import structlog
from aiohttp import web

from hicache.backends.open import open_store as open_backend_store
from hicache.backends.shared_store import SharedStore
from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.acceptor import BACKLOG
from hicache.daemon.admin_api import AdminApi
from hicache.daemon.authority import Authority
from hicache.daemon.bulk_calls import BulkCalls
from hicache.daemon.bulk_socket import BulkSocket
from hicache.daemon.config import DaemonConfig
from hicache.daemon.control import Control
from hicache.daemon.grpc_server import GrpcServer
from hicache.daemon.hello import Hellos, Identity
from hicache.daemon.http import HttpServer
from hicache.daemon.memory_socket import STRANGE_QUEUE_MAX, MemorySocket
from hicache.daemon.metrics import BackendNumbers, Metrics, Readings
from hicache.daemon.notify import Ready, notify_systemd, remove_ready_file, write_ready_file
from hicache.daemon.open_files import raise_open_files_limit
from hicache.daemon.probes import Probes
from hicache.daemon.rates import TenantRates
from hicache.daemon.readings import (
    StoreNumbers,
    StoreSnapshot,
    rate_readings,
    session_readings,
    store_readings,
    tenant_readings,
    thread_readings,
)
from hicache.daemon.recorder import TraceRecorder
from hicache.daemon.reload import resize_when_asked
from hicache.daemon.service import HiCachedService
from hicache.daemon.sessions import Sessions
from hicache.daemon.settings import HostPort
from hicache.daemon.socket_lock import SocketLock, listen_tcp, listen_unix
from hicache.daemon.storage import STUCK_S, Storage, Store
from hicache.daemon.tenant_bounds import inflight_budgets, region_budget, share_of, store_limits
from hicache.daemon.tenants import Tenants
from hicache.daemon.transfers import Transfers
from hicache.daemon.upkeep import Upkeep
from hicache.daemon.version import daemon_version
from hicache.daemon.watch import Watches
from hicache.errors import ConfigError
from hicache.workers import Job, QueueFull, Workers

# A stop is over within 5 s: calls, sessions and regions get their share (grpc_server.py and here), the store what is
# left of STOP_S, HTTP its moment after that. STOP_S_MAX ends the process if something takes longer all the same.
REGIONS_S = 0.3
STORE_CLOSE_S_MIN = 0.5
STOP_S = 4.0
STOP_S_MAX = 4.7

UNMAPS_MAX = 8192  # mappings that wait for the thread that unmaps them

log = structlog.get_logger("hicache.daemon")


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A recovered store, and what it is."""

    store: Store
    store_id: bytes
    numbers: StoreNumbers


def open_store(config: DaemonConfig, limits: StoreLimits) -> OpenedStore:
    """Blocking: opens the backend and recovers its index. Raises ConfigError, StorageInUse or BackendError."""
    store = open_backend_store(
        config.backend_url,
        capacity_bytes=config.capacity_bytes,
        object_bytes_max=config.object_bytes_max,
        high_watermark=config.high_watermark,
        low_watermark=config.low_watermark,
        free_space_floor_bytes=config.free_space_floor_bytes,
        objects_max=config.objects_max,
        limits=limits,
    )
    return OpenedStore(store, store.store_id, StoreNumbers.of(store))


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
        self._stages = contextlib.AsyncExitStack()  # what is undone by stop, last started first
        self._readiness = "starting"
        self._stopped_clean = True
        self._stop_by = math.inf  # of the event loop's clock
        self._storage: Storage | None = None
        self._snapshot: StoreSnapshot | None = None
        self.metrics = Metrics(version=daemon_version(), backend=config.backend)
        self.admin = AdminApi(Authority(), state=lambda: self._readiness)

    def _open_recorder(self) -> TraceRecorder | None:
        config = self._config
        if not config.trace_file:
            return None
        recorder = TraceRecorder(
            config.trace_file, bytes_max=config.trace_bytes_max, block_tokens=config.trace_block_tokens
        )
        self._stages.callback(recorder.close)
        return recorder

    async def start(self) -> Ready:
        """Returns once clients are served. Raises ConfigError, StorageInUse or BackendError."""
        config = self._config
        tenants = Tenants.load(config.tenants_file, defaults=config.tenant_defaults)
        limits = store_limits(config, tenants)
        lock = SocketLock(config.lock_file, config.socket)
        self._stages.callback(lock.release)
        if config.ready_file:
            remove_ready_file(config.ready_file)
        http = await self._start_http()
        self._readiness = "recovering"
        opened = await self._recover(limits)
        storage = self._start_storage(opened, tenants)
        sessions = self._start_sessions(storage, tenants)
        transfers = Transfers(storage, self.metrics, chunk_bytes_ceiling=sessions.budgets.session_bytes)
        bulk, bulk_listen = self._start_bulk(sessions, transfers)
        identity = Identity(daemon_version(), opened.store_id, bulk_listen.port if bulk_listen else 0)
        service = HiCachedService(
            config,
            hellos=Hellos(config, identity, tenants, sessions),
            sessions=sessions,
            control=Control(
                storage, sessions, self.metrics, lease_ms_max=config.lease_ms_max, pin_s_max=config.pin_s_max
            ),
            watches=Watches(storage, step_timeout_s=config.call_timeout_s_max),
            metrics=self.metrics,
            recorder=self._open_recorder(),
        )
        server = GrpcServer(config, service, sessions, bulk)
        self._stages.push_async_callback(server.stop)
        listen = await server.start()
        return self._announce(Ready(os.getpid(), config.socket, listen, str(bulk_listen or ""), http))

    async def stop(self) -> bool:
        """Undoes what was started. True when the store was closed and no storage thread is left behind."""
        self._readiness = "stopping"
        self._stop_by = asyncio.get_running_loop().time() + STOP_S
        self.metrics.ready.set(0)
        notify_systemd("STOPPING=1", self._environment)
        await self._stages.aclose()
        return self._stopped_clean

    @property
    def store(self) -> Store:
        """What a started daemon serves."""
        assert self._storage is not None, "the daemon has not been started"
        return self._storage.store

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

    async def _start_http(self) -> str:
        """Serves the admin socket, and the address ``http`` where there is one; returns that with its real port."""
        config = self._config
        probes = Probes(metrics=self._render_metrics, is_alive=self._is_alive, readiness=lambda: self._readiness)
        await self._serve_http("socket", config.admin_socket, [*probes.routes(), *self.admin.routes(is_guarded=True)])
        address = config.http_address
        if address is None:
            return ""
        return await self._serve_http("http", address, [*probes.routes(), *self.admin.routes(is_guarded=False)])

    async def _serve_http(self, setting: str, address: HostPort | str, routes: Sequence[web.RouteDef]) -> str:
        server = HttpServer(setting, routes, on_foreign_host=self.metrics.host_refusals.inc)
        self._stages.push_async_callback(server.stop)
        return await server.start(address, socket_mode=self._config.socket_mode_bits)

    async def _recover(self, limits: StoreLimits) -> OpenedStore:
        """Opens the store in a thread: recovery may take long, and probes are answered meanwhile."""
        opening = Workers("hicached-recovery", threads=1, queue_max=1)
        job = opening.submit(partial(self._opener, self._config, limits))
        try:
            opened = await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            if not opening.withdraw(job):
                self._stages.push_async_callback(self._close_overtaken, opening, job)
            raise
        except BaseException:
            opening.close(timeout_s=0)
            raise
        opening.close(timeout_s=0)
        return opened

    async def _close_overtaken(self, opening: Workers, job: Job[OpenedStore]) -> None:
        """A stop overtook the recovery: what it opens within the time of the stop is closed as after any other run.

        A recovery that takes longer ends with the process, as with SIGKILL, which backends survive.
        """
        closing = asyncio.wrap_future(
            opening.submit(partial(_close_opened, job)).future
        )  # one thread: after the opening
        left_s = max(STORE_CLOSE_S_MIN, self._stop_by - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait([closing], timeout=left_s)
        opening.close(timeout_s=0)
        if not done:
            self._stopped_clean = False
            log.warning("stopped in the middle of a recovery; the next start begins it again")
        elif (error := closing.exception()) is not None:
            self._stopped_clean = False
            log.error("the storage was not closed cleanly", reason=str(error))

    def _start_storage(self, opened: OpenedStore, tenants: Tenants) -> Storage:
        storage = Storage(opened.store, io_threads=self._config.io_threads, stuck_s=STUCK_S)
        self._storage = storage
        self._snapshot = StoreSnapshot(storage, opened.numbers, tenants.named)
        self.metrics.registry.register(Readings((*thread_readings(storage), *store_readings(self._snapshot))))
        self.metrics.registry.register(Readings(tenant_readings(self._snapshot)))
        if isinstance(opened.store, SharedStore):
            self.metrics.registry.register(BackendNumbers(opened.store.numbers))
        self._stages.push_async_callback(self._close_storage, storage)
        upkeep = Upkeep(storage)
        upkeep.start()
        self._stages.push_async_callback(upkeep.stop)
        return storage

    async def _close_storage(self, storage: Storage) -> None:
        closing = Workers("hicached-close", threads=1, queue_max=1)
        left_s = max(STORE_CLOSE_S_MIN, self._stop_by - asyncio.get_running_loop().time())
        job = closing.submit(partial(storage.close, timeout_s=left_s / 2))
        done, _ = await asyncio.wait([asyncio.wrap_future(job.future)], timeout=left_s)
        closing.close(timeout_s=0)
        if not any(future.result() for future in done):
            self._stopped_clean = False
            log.error("the storage did not stop in time; everything that was acknowledged is safe")

    def _start_sessions(self, storage: Storage, tenants: Tenants) -> Sessions:
        config = self._config

        unmapping = Workers("hicached-unmap", threads=1, queue_max=UNMAPS_MAX)
        self._stages.callback(unmapping.close, timeout_s=0)  # what is still mapped goes with the process

        def release_leases(lease_ids: Sequence[int]) -> None:
            with contextlib.suppress(QueueFull):  # they run out by themselves
                storage.control.submit(partial(_release_all, storage.store, lease_ids))

        def unmap(close_mapping: Callable[[], None]) -> None:
            with contextlib.suppress(QueueFull):  # the collector unmaps it
                unmapping.submit(close_mapping)

        rates = {
            tenant: TenantRates(calls_per_s_max=settings.calls_per_s_max, bytes_per_s_max=settings.bytes_per_s_max)
            for tenant, settings in tenants.settings.items()
        }
        sessions = Sessions(
            sessions_max=config.sessions_max,
            tenant_sessions_max=config.tenant_sessions_max or share_of(config.sessions_max, tenants),
            budgets=inflight_budgets(config, tenants),
            rates=rates,
            region_budget=region_budget(config, tenants),
            release_leases=release_leases,
        )
        self.metrics.registry.register(Readings(session_readings(sessions)))
        self.metrics.registry.register(Readings(rate_readings(rates, tenants.named)))
        listener = listen_unix("socket", config.memory_socket, mode=config.socket_mode_bits, backlog=BACKLOG)
        self._stages.callback(_remove, config.memory_socket)
        self._stages.callback(listener.close)
        strange = Workers("hicached-strange", threads=1, queue_max=STRANGE_QUEUE_MAX)
        self._stages.callback(strange.close, timeout_s=0)  # what cannot be closed goes with the process
        memory_socket = MemorySocket(
            listener, sessions, unmap=unmap, strange=strange, on_refusal=self.metrics.region_refusals.inc
        )
        memory_socket.start()
        self._stages.push_async_callback(memory_socket.stop, timeout_s=REGIONS_S)
        return sessions

    def _start_bulk(self, sessions: Sessions, transfers: Transfers) -> tuple[BulkSocket, HostPort | None]:
        """The bulk socket, and its TCP address with its real port if it has one."""
        config = self._config
        listeners = [listen_unix("socket", config.bulk_socket, mode=config.socket_mode_bits, backlog=BACKLOG)]
        self._stages.callback(_remove, config.bulk_socket)
        self._stages.callback(listeners[0].close)
        address = config.bulk_listen_address
        if address is not None:
            listeners.append(listen_tcp("bulk_listen", address.host, address.port, backlog=BACKLOG))
            self._stages.callback(listeners[1].close)
            address = HostPort(address.host, listeners[1].getsockname()[1])
        calls = BulkCalls(config, sessions=sessions, transfers=transfers, metrics=self.metrics)
        bulk = BulkSocket(listeners, sessions, calls)
        bulk.start()
        self._stages.push_async_callback(bulk.stop)
        return bulk, address

    async def _render_metrics(self) -> bytes:
        if self._snapshot is not None:
            await self._snapshot.refresh()
        return self.metrics.render()

    async def _is_alive(self) -> bool:
        return self._storage is None or await self._storage.is_alive()


async def serve(
    config: DaemonConfig, *, environment: Mapping[str, str], reread: Callable[[], DaemonConfig] | None = None
) -> bool:
    """Runs until SIGTERM or SIGINT. True after a clean stop. Raises what ``Daemon.start`` raises.

    A second signal ends the process at once, as if the first had not been caught. On SIGHUP the capacity becomes the
    one that ``reread`` says.
    """
    stop_wanted, resize_wanted = asyncio.Event(), asyncio.Event()
    _catch_signals(stop_wanted)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, resize_wanted.set)
    raise_open_files_limit()
    daemon = Daemon(config, environment=environment)
    starting = asyncio.ensure_future(daemon.start())
    waiting = asyncio.ensure_future(stop_wanted.wait())
    resizing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            resizing = asyncio.ensure_future(
                resize_when_asked(resize_wanted, reread=reread or (lambda: config), store=daemon.store)
            )
            await waiting
            log.info("stopping")
    finally:
        waiting.cancel()
        starting.cancel()
        resizing.cancel()
        await asyncio.gather(starting, waiting, resizing, return_exceptions=True)
        _limit_stop_time()
        stopped_clean = await daemon.stop()
    log.info("stopped", clean=stopped_clean)
    return stopped_clean


def _close_opened(job: Job[OpenedStore]) -> None:
    job.future.result().store.close()


def _release_all(store: Store, lease_ids: Sequence[int]) -> None:
    for lease_id in lease_ids:
        store.release(lease_id)


def _catch_signals(stop_wanted: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stop_wanted.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def _limit_stop_time() -> None:
    """The process ends after STOP_S_MAX, whatever is stuck: stores survive that, supervisors' patience does not."""
    timer = threading.Timer(STOP_S_MAX, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
