"""One life of a node: engines that serve prompts beside a hicached, faults of its seed, and the accounts at its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache.backends import file_store
from hicache.backends.file_calls import FileCalls
from hicache.daemon.config import load_config
from hicache.daemon.server import Daemon
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, SmallEngine
from tests.simulation.net import Loop
from tests.simulation.patching import Node, patched
from tests.simulation.scheduler import Process, Scheduler, SimulationError

PROMPTS = 4
SALTS = (b"", b"one", b"two")
TOKENS = ("token-of-tenant-a-0123456789", "token-of-tenant-b-0123456789")
PAGES_MAX = 6
SERVE_S_MAX = 120.0  # no request takes longer, whatever happens: every wait in it has a deadline
RESTART_SHARE = 0.15  # of requests after which an engine goes and comes again, and finds in L3 what it has lost
STOP_S_MAX = 30.0
HEAL_S = 40.0  # after the last fault: sessions, breakers and memory are back by then
WEATHERS = ("mixed", "mixed", "freezing", "forgetful")  # which faults come, all of them or one kind again and again
MODES: tuple[PrefetchMode, ...] = ("best_effort", "wait_complete", "timeout")


@dataclass
class Tally:
    """What has happened in one life, or in many."""

    served: int = 0
    aborted: int = 0
    restored_tokens: int = 0
    from_l3_tokens: int = 0
    daemon_kills: int = 0
    daemon_stops: int = 0
    engine_kills: int = 0
    connections_broken: int = 0
    calls_lost: int = 0
    disk_faults: int = 0
    bits_flipped: int = 0
    steps: int = 0
    lives: int = 0
    traces: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class DiskFaults:
    """What happens to the calls of the file backend. ``share`` of them meet one."""

    def __init__(self, scheduler: Scheduler, tally: Tally) -> None:
        self._sim, self._tally = scheduler, tally
        self.share = 0.0
        self.forgets_share = 0.0  # of what is read, a bit is wrong
        self.freezes_reads_only = False
        self.frozen_until_s = 0.0  # a call that begins before ends after

    def meet(self, *, is_read: bool = False) -> None:
        """Before a call: perhaps a delay, perhaps an error."""
        sim = self._sim
        if sim.current is None or sim.is_over:
            return
        sim.maybe_switch()
        if (is_read or not self.freezes_reads_only) and sim.now_s < self.frozen_until_s and sim.rng.random() < 0.5:
            self._tally.disk_faults += 1
            sim.sleep(self.frozen_until_s - sim.now_s + sim.rng.uniform(0, 0.1))
        if self.share and sim.rng.random() < self.share:
            self._tally.disk_faults += 1
            kind = sim.rng.choice(("delay", "delay", "slow", "EIO", "ENOSPC"))
            if kind in ("delay", "slow"):
                sim.sleep(sim.rng.uniform(0, 0.2 if kind == "delay" else 30.0))
            else:
                raise OSError(getattr(errno, kind), "simulated")

    def calls_class(self) -> type:
        """In place of ``FileCalls``."""
        faults = self

        class Calls(FileCalls):
            def write(self, fd: int, parts: list[memoryview], offset: int) -> int:
                faults.meet()
                return super().write(fd, faults.shortened(parts), offset)

            def read(self, fd: int, targets: list[memoryview], offset: int) -> int:
                faults.meet(is_read=True)
                targets = faults.shortened(targets)
                count = super().read(fd, targets, offset)
                if count == sum(len(target) for target in targets):
                    faults.spoil(targets[-1])
                return count

        def wrapped(name: str) -> Callable[..., Any]:
            def call(self: Calls, *args: Any) -> Any:
                faults.meet(is_read=name == "open")
                return getattr(FileCalls, name)(self, *args)

            return call

        for name in ("create", "reopen", "open", "rename", "link", "remove", "claim", "make_folder"):
            setattr(Calls, name, wrapped(name))
        return Calls

    def spoil(self, target: memoryview) -> None:
        """Perhaps the medium has forgotten a bit."""
        sim = self._sim
        if self.forgets_share and sim.current is not None and len(target) and sim.rng.random() < self.forgets_share:
            self._tally.bits_flipped += 1
            target[sim.rng.randrange(len(target))] ^= 1 << sim.rng.randrange(8)

    def shortened(self, parts: list[memoryview]) -> list[memoryview]:
        sim = self._sim
        if sim.current is not None and len(parts[0]) > 1 and sim.rng.random() < 0.02:
            return [parts[0][: sim.rng.randrange(1, len(parts[0]))]]
        return parts


class DaemonLife:
    """One hicached after another on one store and one socket."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.process: Process | None = None
        self.daemon: Daemon | None = None
        self._loop: Loop | None = None
        self._wants_stop: Any = None
        self._ended: Any = None
        self.is_ready = False

    def start(self) -> None:
        world = self._world
        self.is_ready = False
        self.process = Process(f"hicached{world.tally.daemon_kills + world.tally.daemon_stops}")
        self._ended = world.node.threading.Event()
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
                self._ended.set()

    async def _live(self) -> None:
        self._wants_stop = asyncio.Event()
        daemon = self.daemon = Daemon(load_config(None, self._world.settings), environment={})
        try:
            await daemon.start()
            self.is_ready = True
            await self._wants_stop.wait()
        finally:
            self.is_ready = False
            if not self._world.scheduler.is_over:
                began_s = self._world.scheduler.now_s
                await daemon.stop()
                if self._world.scheduler.now_s - began_s > STOP_S_MAX:
                    raise SimulationError(f"a stop took {self._world.scheduler.now_s - began_s:g} s")

    def stop(self) -> None:
        """As SIGTERM."""
        assert self._loop is not None
        if self._wants_stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wants_stop.set)
        assert self.process is not None
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
        held = {
            "sessions": len(sessions),
            "mapped regions": len(sessions.mapped),
            "bytes in flight": sessions.budgets.total.used_bytes,
            "calls": len(server.calls),
            "leased keys": store.stats().holds.leased_keys,
        }
        left = ", ".join(f"{count} {what}" for what, count in held.items() if count)
        if left:
            raise SimulationError(f"the daemon still holds {left} although nobody is connected")
        backend = store._backend
        found, said = backend.count(), backend.accounts.usage()
        if (found.objects, found.stored_bytes) != (said.objects, said.stored_bytes):
            raise SimulationError(f"the folder has {found}, the accounts say {said}")

    def _release_locks(self) -> None:
        for fd in self._world.descriptors(".alive", ".lock", ".opening"):
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)


class World:
    """Everything of one life."""

    def __init__(self, seed: int, *, engines: int = 2, requests: int = 12, weather: str = "", statements: float = 0.0) -> None:
        """With ``statements`` fibers lose their turn between statements, too: one of so many, on average."""
        self.seed = seed
        self.scheduler = Scheduler(seed, statements_per_switch=statements)
        self.node = Node(self.scheduler)
        self.tally = Tally(lives=1)
        self.disk = DiskFaults(self.scheduler, self.tally)
        self.rng = random.Random(seed ^ 0x5EED)
        drawn = self.rng.choice(WEATHERS)
        self.weather = weather or drawn
        self._engines_wanted, self._requests = engines, requests
        self.engines: list[EngineLife] = []
        self.loops: list[Loop] = []
        self.folder = Path(tempfile.mkdtemp(prefix="hicache-sim-", dir="/dev/shm"))
        self.settings: dict[str, object] = {
            "socket": str(self.folder / "s"),
            "path": str(self.folder / "store"),
            "http": "",
            "backend": "file",
            "file_direct": "off",
            "capacity_bytes": self.rng.choice(("1MiB", "1200KiB", "4MiB")),
            "object_bytes_max": "64KiB",
            "free_space_floor_bytes": 0,
            "io_threads": self.rng.choice((1, 2, 3)),
        }
        self.tenant_count = self.rng.choice((1, 2, 2))
        if self.tenant_count > 1:
            tenants = self.folder / "tenants"
            tenants.write_text("".join(f"t{i} {token}\n" for i, token in enumerate(TOKENS)))
            tenants.chmod(0o600)
            self.settings["tenants_file"] = str(tenants)
        self.groups = self.rng.choice((HYBRID, HYBRID, (ATTENTION,)))
        self.daemon = DaemonLife(self)

    def descriptors(self, *suffixes: str) -> list[int]:
        """Open files of this life's folder; with ``suffixes``, those whose names end so."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith(f"{self.folder}/") and target.removesuffix(" (deleted)").endswith(suffixes or ""):
                    found.append(int(name))
        return found

    def run(self) -> Tally:
        """Raises SimulationError, and whatever a thread of the code under test raises."""
        try:
            with patched(self.node), self._disk():
                director = self.scheduler.spawn(self._direct, name="director", process=Process("director"))
                try:
                    self.scheduler.run(director)
                finally:
                    self.scheduler.bury()
                    for loop in self.loops:
                        loop.bury()
                    self.node.sockets.bury()
                    for descriptor in self.descriptors():
                        os.close(descriptor)
                    gc.collect()  # what is left of the dead ends here, and not in another life
            if self.node.complaints:
                raise SimulationError("\n".join(self.node.complaints))
        except BaseException as error:
            error.add_note(f"seed {self.seed}, step {self.scheduler.steps}, at {self.scheduler.now_s - 1000:.3f} s")
            raise
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.tally.steps = self.scheduler.steps
        self.tally.calls_lost = self.node.rpc_faults.lost
        self.tally.connections_broken = self.node.network.broken
        self.tally.traces.append(self.scheduler.trace)
        return self.tally

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        before = file_store.FileCalls
        file_store.FileCalls = self.disk.calls_class()  # type: ignore[misc]
        try:
            yield
        finally:
            file_store.FileCalls = before  # type: ignore[misc]

    # -- the director ------------------------------------------------------------------------------------------------

    def _direct(self) -> None:
        sim = self.scheduler
        self.daemon.start()
        self.engines = [EngineLife(self, number) for number in range(self._engines_wanted)]
        for engine in self.engines:
            engine.start()
        while not all(engine.is_done for engine in self.engines):
            sim.sleep(sim.rng.expovariate(1 / 3.0))
            self._strike()
        self._heal()
        self._check_the_end()

    def _strike(self) -> None:
        match self.weather:
            case "freezing":
                self.disk.freezes_reads_only = True
                self.disk.frozen_until_s = self.scheduler.now_s + self.scheduler.rng.uniform(5.0, 30.0)
            case "forgetful":
                self.disk.forgets_share = self.scheduler.rng.choice((0.0, 0.05, 0.3))
            case _:
                self._strike_at_random()

    def _strike_at_random(self) -> None:
        sim, network, rpc = self.scheduler, self.node.network, self.node.rpc_faults
        match sim.rng.randrange(17):
            case 0:
                self.daemon.kill()
                sim.sleep(sim.rng.choice((0.0, 0.0, 1.0, 10.0)))
                self.daemon.start()
            case 1:
                self.daemon.stop()
                self.daemon.start()
            case 2:
                engine = sim.rng.choice(self.engines)
                if not engine.is_done:
                    engine.kill()
                    engine.start()
            case 3 | 12 | 13:
                network.break_share = sim.rng.choice((0.002, 0.01, 0.03))
            case 4:
                network.delay_share, network.delay_s_max = sim.rng.choice(((0.05, 0.05), (0.3, 0.5), (0.02, 5.0)))
            case 5:
                rpc.lost_reply_share = sim.rng.choice((0.0, 0.02, 0.1))
            case 6:
                rpc.lost_request_share = sim.rng.choice((0.0, 0.02, 0.1))
            case 7:
                rpc.delay_s_max = sim.rng.choice((0.05, 0.5, 4.0))
            case 9:
                self.disk.forgets_share = sim.rng.choice((0.0, 0.02))
            case 8:
                self.disk.share = sim.rng.choice((0.0, 0.0, 0.01, 0.1))
            case 14 | 15 | 16:
                self.disk.frozen_until_s = sim.now_s + sim.rng.uniform(0.5, 20.0)
            case 10:
                self.scheduler.wall_offset_s += sim.rng.choice((-86_400.0, -5.0, 5.0, 86_400.0))
            case _:
                self._calm()

    def _calm(self) -> None:
        network, rpc = self.node.network, self.node.rpc_faults
        network.break_share, network.delay_share, network.delay_s_max = 0.0, 0.05, 0.05
        rpc.lost_reply_share = rpc.lost_request_share = 0.0
        rpc.delay_s_max = 0.05
        self.disk.share = self.disk.forgets_share = self.disk.frozen_until_s = 0.0

    def _heal(self) -> None:
        self._calm()
        self.scheduler.sleep(HEAL_S)

    def _check_the_end(self) -> None:
        """After the last fault L3 works again; then everybody stops, and nothing is left of anybody."""
        sim = self.scheduler
        if not self.daemon.is_ready:
            raise SimulationError("the daemon is not ready although nothing hinders it")
        self._l3_works_again()
        sim.sleep(2.0)
        self.daemon.check_nothing_is_held()
        self.daemon.stop()

    def _l3_works_again(self) -> None:
        tokens = [7_000_000 + number for number in range(3 * PAGE + 1)]
        for expected in (0, 3 * PAGE):
            engine = self.make_engine("wait_complete")
            assert engine.cache.l3 is not None
            if not engine.cache.l3.wait_ready(timeout_s=20):  # type: ignore[attr-defined]
                raise SimulationError(f"no session although nothing hinders it: {engine.cache.l3.status()}")  # type: ignore[attr-defined]
            restored = engine.serve(tokens)
            if restored.tokens != expected:
                raise SimulationError(
                    f"{restored.tokens} tokens were restored in calm weather, not {expected}: {engine.cache.stats},"
                    f" {engine.cache._replica.executor.faults()}"  # type: ignore[union-attr]
                    f" {engine.cache.l3.status()}"  # type: ignore[attr-defined]
                )
            engine.settle()
            engine.close()

    def make_engine(self, mode: PrefetchMode | None = None, *, tenant: int = 0) -> SmallEngine:
        return SmallEngine(
            self.groups,
            token=TOKENS[tenant] if self.tenant_count > 1 else "",
            l1=self.rng.choice((8, 12, 32)),
            l2=self.rng.choice((8, 12, 32)),
            address=f"unix://{self.settings['socket']}",
            prefetch=PrefetchPolicy(mode or self.rng.choice(MODES), threshold_tokens=0, base_s=1.0, hard_cap_s=10.0),
            write_policy=self.rng.choice(("write_through", "write_through", "write_back")),
        )


class EngineLife:
    """One engine process after another that serves its part of the prompts."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._name = f"engine{number}"
        self._tenant = number % world.tenant_count
        self._left = world._requests
        self.is_done = False
        self.process: Process | None = None

    def start(self) -> None:
        self.process = Process(self._name)
        self._world.scheduler.spawn(self._main, name=self._name, process=self.process)

    def kill(self) -> None:
        assert self.process is not None
        self._world.scheduler.kill(self.process)
        self._world.tally.engine_kills += 1

    def _main(self) -> None:
        world, sim = self._world, self._world.scheduler
        engine = world.make_engine(tenant=self._tenant)
        while self._left > 0:
            self._left -= 1
            self._serve(engine)
            if sim.rng.random() < RESTART_SHARE:
                engine.cache.flush(timeout_s=10)
                self._close(engine)
                engine = world.make_engine(tenant=self._tenant)
        engine.cache.flush(timeout_s=60)
        self._close(engine)
        self.is_done = True

    def _serve(self, engine: SmallEngine) -> None:
        world, sim = self._world, self._world.scheduler
        family = sim.rng.randrange(PROMPTS)
        pages = sim.rng.randint(1, PAGES_MAX)
        tokens = [10_000 * family + number for number in range(pages * PAGE + 1)]
        salt = sim.rng.choice((0, 0, 0, 1, 2))
        began_s = sim.now_s
        request = engine.cache.match(tokens, salt=SALTS[salt])
        # What this tenant computes under this salt is like nothing that others compute for the same tokens.
        tokens = [1_000_000 * (len(SALTS) * self._tenant + salt) + token for token in tokens]
        try:
            engine.cache.prefetch(request)
            if sim.rng.random() < 0.1:
                world.tally.aborted += 1
                return
            engine.cache.wait(request)
            restored = engine.cache.load(request, timeout_s=5.0)
            if restored is None:
                world.tally.aborted += 1
                return
            engine.check(request, tokens, restored.tokens)
            for end in range(restored.tokens + PAGE, len(tokens) + 1, PAGE):
                if not engine.cache.extend(request, tokens=end, timeout_s=5.0):
                    world.tally.aborted += 1
                    return
                engine.write_page(request, tokens, end)
                engine.cache.state_moved(request)
                engine.cache.store(request, computed=end, state_at=end if engine.spec.has_state else None)
                sim.maybe_switch()
            world.tally.served += 1
            world.tally.restored_tokens += restored.tokens
            world.tally.from_l3_tokens += restored.by_source.get("l3", 0)
        finally:
            if not sim.is_over:
                engine.cache.release(request)
        if sim.now_s - began_s > SERVE_S_MAX:
            raise SimulationError(f"a request took {sim.now_s - began_s:g} s")
        sim.sleep(sim.rng.expovariate(1.0))

    def _close(self, engine: SmallEngine) -> None:
        sim = self._world.scheduler
        executor = engine.cache._replica.executor
        assert executor is not None
        raised = {name: count for name, count in executor.faults().items() if name.startswith(("l3.", "on_", "bad_"))}
        if raised:
            raise SimulationError(f"somebody raised or reported nonsense: {raised}")
        began_s = sim.now_s
        engine.close()
        if sim.now_s - began_s > STOP_S_MAX:
            raise SimulationError(f"closing an engine took {sim.now_s - began_s:g} s")
