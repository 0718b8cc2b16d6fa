"""One hicached after another: how it starts, ends, is told what to do, and what it must have let go of."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import shutil
from typing import TYPE_CHECKING, Any

from hicache.backends import scrub
from hicache.backends.lmdb_layout import CHUNK_BYTES
from hicache.daemon.config import DaemonConfig, load_config
from hicache.daemon.server import Daemon
from hicache.errors import BackendError, ConfigError
from tests.simulation.net import Loop
from tests.simulation.scheduler import Process, SimulationError

if TYPE_CHECKING:
    from tests.simulation.world import World

STOP_S_MAX = 40.0  # beyond what a drain may take
AUDIT_S = 3.0  # between two audits, on average
CAPACITIES = {"file": ("1MiB", "1200KiB", "2MiB", "4MiB"), "lmdb": ("4MiB", "8MiB")}  # an object of LMDB takes a chunk
QUOTAS = {"file": "600KiB", "lmdb": "2400KiB"}  # of one tenant: above what one prompt takes


class DaemonLife:
    """One hicached after another on one store and one socket."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.process: Process | None = None
        self.daemon: Daemon | None = None
        self._loop: Loop | None = None
        self._is_over = False
        self._wants_stop: Any = None
        self._ended: Any = None
        self._folders = itertools.count(1)
        self.is_ready = False

    def start(self) -> None:
        world = self._world
        self.is_ready = False
        self._leave_the_old_environment()
        self.process = Process(f"hicached{world.tally.daemon_kills + world.tally.daemon_stops}")
        self._ended = world.node.threading.Event()
        self._is_over = False
        world.scheduler.spawn(self._main, name=self.process.name, process=self.process)

    def _main(self) -> None:
        world = self._world
        loop = self._loop = Loop(world.scheduler)
        world.loops.append(loop)
        try:
            loop.run_until_complete(self._live())
        finally:
            if not world.scheduler.is_over:
                loop.close()
                self._is_over = True
                self._ended.set()

    def keep_up(self) -> None:
        """As a supervisor: one that has died, or could not start, is started again."""
        assert self.process is not None
        if not self.process.is_alive or self._is_over:
            self._world.scheduler.kill(self.process)
            self._release_locks()
            self.start()

    async def _live(self) -> None:
        self._wants_stop = asyncio.Event()
        daemon = self.daemon = Daemon(self._config(), environment={}, reread=self._config)
        try:
            try:
                await daemon.start()
            except (BackendError, ConfigError):
                if not self._world.disk.share:
                    raise
                self._world.tally.failed_starts += 1
                return
            self.is_ready = True
            assert self.process is not None
            self._world.scheduler.spawn(self._audit, name=f"{self.process.name}:audit", process=self.process)
            await self._wants_stop.wait()
        finally:
            self.is_ready = False
            if not self._world.scheduler.is_over:
                began_s = self._world.scheduler.now_s
                await daemon.stop()
                if self._world.scheduler.now_s - began_s > STOP_S_MAX:
                    raise SimulationError(f"a stop took {self._world.scheduler.now_s - began_s:g} s")

    def _config(self) -> DaemonConfig:
        return load_config(None, self._world.settings)

    def _leave_the_old_environment(self) -> None:
        """LMDB cannot open a file twice in one operating-system process, and that of a killed daemon is never closed:
        the next daemon has a copy of the files as the kernel has them, in the same place of its life."""
        settings, world = self._world.settings, self._world
        if settings["backend"] == "lmdb" and os.path.exists(str(settings["path"])):
            copy = world.folder / f"store{next(self._folders)}"
            shutil.copytree(str(settings["path"]), copy)
            settings["path"] = str(copy)
            match world.scheduler.rng.randrange(8) if world.is_storming else None:
                case 0:
                    world.lmdb_disk.lose_power(copy)
                    world.tally.power_losses += 1
                case 1:
                    world.lmdb_disk.lose_tail(copy)

    # -- what operators do, and what must add up meanwhile ------------------------------------------------------------

    def _audit(self) -> None:
        """Runs as long as the daemon does, in a thread of it."""
        world, sim = self._world, self._world.scheduler
        daemon = self.daemon
        assert daemon is not None
        while self.is_ready:
            sim.sleep(sim.rng.expovariate(1 / AUDIT_S))
            if not self.is_ready:
                return
            self._check_sums(daemon)
            world.tally.audits += 1
            if world.is_storming:
                match sim.rng.randrange(12):
                    case 0:
                        self._reload(daemon)
                    case 1 | 2:
                        self._scrub(daemon)
                    case 3:
                        self._drop(daemon)

    def _check_sums(self, daemon: Daemon) -> None:
        """Harness 1, of one moment: every call, key and object is in exactly one place."""
        tally, stats = daemon.metrics.tally.read(), daemon.store.stats()
        for started, finished, active in (
            (tally.started, tally.finished, tally.active),
            (tally.keys_started, tally.keys_finished, tally.keys_active),
        ):
            for method, count in started.items():
                ended = sum(number for (name, _), number in finished.items() if name == method)
                _equal(f"{method}: begun, and ended or running", count, ended + active.get(method, 0))
        for operation, count in stats.asked.items():
            ended = sum(stats.finished[operation].values())
            _equal(f"{operation}: asked, and finished or open", count, ended + stats.open.get(operation, 0))
        gone = sum((held.objects for held in stats.removed.values()), stats.leaving.objects + stats.resident.objects)
        _equal("objects that came, and that are gone or there", stats.recovered.objects + stats.added.objects, gone)
        gone = sum(
            (held.payload_bytes for held in stats.removed.values()),
            stats.leaving.payload_bytes + stats.resident.payload_bytes,
        )
        _equal("their bytes", stats.recovered.payload_bytes + stats.added.payload_bytes, gone)

    def _reload(self, daemon: Daemon) -> None:
        """As SIGHUP, after somebody has changed the settings."""
        world, rng = self._world, self._world.scheduler.rng
        world.settings["capacity_bytes"] = rng.choice(CAPACITIES[str(world.settings["backend"])])
        world.write_tenants(rng)

        async def reload() -> None:
            with contextlib.suppress(ConfigError, BackendError, OSError):  # so much was leased; then nothing changed
                await daemon.reloader.reload()
                world.tally.reloads += 1

        loop = self._loop
        assert loop is not None
        loop.call_soon_threadsafe(lambda: world.kept.append(loop.create_task(reload())))

    def _scrub(self, daemon: Daemon) -> None:
        with contextlib.suppress(BackendError):
            *_, last = scrub.scrub(daemon.store)
            self._world.tally.scrubbed += last.objects

    def _drop(self, daemon: Daemon) -> None:
        one = min(daemon.store.tenants(), default=b"")
        with contextlib.suppress(BackendError):
            *_, last = scrub.drop(daemon.store, part=scrub.Part(one), keys_max=3)
            self._world.tally.dropped += last.objects

    def stop(self) -> None:
        """As SIGTERM."""
        assert self._loop is not None
        if self._wants_stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wants_stop.set)
        assert self.process is not None
        if not self.process.is_alive:
            return
        if not self._ended.wait(STOP_S_MAX):
            self.kill()  # a supervisor's patience is over
        else:
            self._world.tally.daemon_stops += 1
            self._world.scheduler.kill(self.process)  # the process ends, with every thread that is stuck
        self._release_locks()

    def kill(self) -> None:
        """As SIGKILL; the kernel lets go of its locks."""
        assert self.process is not None
        self._world.scheduler.kill(self.process)
        self.is_ready = False
        self._release_locks()
        self._world.tally.daemon_kills += 1

    def check_nothing_is_held(self) -> None:
        """No client is connected any more. Raises SimulationError when anything of one is left."""
        world = self._world
        server = world.node.rpc.servers[str(world.settings["socket"])]
        assert self.daemon is not None
        store, sessions = self.daemon.store, server.sessions
        tally, stats = self.daemon.metrics.tally.read(), store.stats()
        held = {
            "sessions": len(sessions),
            "mapped regions": len(sessions.mapped),
            "bytes in flight": sessions.budgets.total.used_bytes,
            "calls": len(server.calls),
            "leased keys": stats.holds.leased_keys,
            "watchers": stats.holds.watchers,
            "calls that are counted as running": sum(tally.active.values()),
            "keys that are counted as asked": sum(tally.keys_active.values()),
            "operations on objects": sum(stats.open.values()),
            "objects that are leaving": stats.leaving.objects,
        }
        left = ", ".join(f"{count} {what}" for what, count in held.items() if count)
        if left:
            raise SimulationError(f"the daemon still holds {left} although nobody is connected")
        self._check_sums(self.daemon)
        backend: Any = store._backend  # Any: whichever this life has
        if world.settings["backend"] == "file":
            found, said = backend.count(), backend.accounts.usage()
            if (found.objects, found.stored_bytes) != (said.objects, said.stored_bytes):
                raise SimulationError(f"the folder has {found}, the accounts say {said}")
        walked = [found for batch in store.walk() for found in batch]
        _equal("objects on the medium, and in the index", len(walked), stats.resident.objects)
        if world.settings["backend"] == "lmdb":
            usage = backend.usage()
            _equal("chunks in use, and those of objects", usage.stored_bytes, CHUNK_BYTES * len(walked))
            _equal("objects that are counted, and those in the index", usage.objects, len(walked))
        size_bytes = sum(found.size_bytes for found in walked)
        _equal("their bytes, and those in the index", size_bytes, stats.resident.payload_bytes)

    def _release_locks(self) -> None:
        for fd in self._world.descriptors(".alive", ".lock", ".opening"):
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)


def _equal(what: str, one: object, other: object) -> None:
    if one != other:
        raise SimulationError(f"{what}: {one} and {other}")
