"""One life of a node: engines that serve prompts beside a hicached, faults of its seed, and the accounts at its end."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from hicache.backends import file_store
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, SmallEngine
from tests.simulation.daemon_life import CAPACITIES, DaemonLife
from tests.simulation.disk import DiskFaults
from tests.simulation.engine_life import EngineLife, check_rest
from tests.simulation.neighbours import Router
from tests.simulation.net import Loop
from tests.simulation.patching import Node, patched
from tests.simulation.scheduler import Process, Scheduler, SimulationError
from tests.simulation.tally import Tally

TOKENS = ("token-of-tenant-a-0123456789", "token-of-tenant-b-0123456789")
HEAL_S = 40.0  # after the last fault: sessions, breakers and memory are back by then
WEATHERS = (
    "mixed",
    "mixed",
    "freezing",
    "forgetful",
    "late",
)  # which faults come, all of them or one kind again and again
MODES: tuple[PrefetchMode, ...] = ("best_effort", "wait_complete", "timeout")


class World:
    """Everything of one life."""

    def __init__(
        self, seed: int, *, engines: int = 2, requests: int = 12, weather: str = "", statements: float = 0.0
    ) -> None:
        """With ``statements`` fibers lose their turn between statements, too: one of so many, on average."""
        self.seed = seed
        self.scheduler = Scheduler(seed, statements_per_switch=statements)
        self.node = Node(self.scheduler)
        self.tally = Tally(lives=1)
        self.disk = DiskFaults(self.scheduler, self.tally)
        self.rng = random.Random(seed ^ 0x5EED)
        drawn = self.rng.choice(WEATHERS)
        self.weather = weather or drawn
        self.requests = requests * (3 if self.weather == "late" else 1)
        self._engines_wanted = engines
        self.engines: list[EngineLife] = []
        self.loops: list[Loop] = []
        self.folder = Path(tempfile.mkdtemp(prefix="simulated-", dir="/dev/shm"))
        backend = self.rng.choice(("file", "file", "file", "lmdb"))
        self.settings: dict[str, object] = {
            "socket": str(self.folder / "s"),
            "path": str(self.folder / "store"),
            "http": "",
            "backend": backend,
            "file_direct": "off",
            "capacity_bytes": self.rng.choice(CAPACITIES[backend]),
            "object_bytes_max": "64KiB",
            "free_space_floor_bytes": 0,
            "io_threads": self.rng.choice((1, 2, 3)),
            "drain_s": self.rng.choice((0, 0, 2, 10)),
        }
        self.tenant_count = self.rng.choice((1, 2, 2))
        if self.tenant_count > 1:
            self.settings["tenants_file"] = str(self.folder / "tenants")
            self.write_tenants(self.rng)
        if self.rng.random() < 0.2:
            masters = self.folder / "masters"
            masters.write_text(f"master {sha256(b'master').hexdigest()}\n")
            masters.chmod(0o600)
            self.settings["encryption_keys"] = str(masters)
        self.groups = self.rng.choice((HYBRID, HYBRID, (ATTENTION,)))
        self.is_storming = True  # until the last fault: then only engines change what is stored
        self.kept: list[Any] = []  # tasks that nobody else refers to
        self.daemon = DaemonLife(self)
        self.router = Router(self)

    def write_tenants(self, rng: random.Random) -> None:
        """The tenants file, with other limits for each."""
        if self.tenant_count > 1:
            limits = ("", " quota_bytes=600KiB", " quota_objects=60", " ttl_s=3000", " weight=3")
            tenants = self.folder / "tenants"
            tenants.write_text("".join(f"t{i} {token}{rng.choice(limits)}\n" for i, token in enumerate(TOKENS)))
            tenants.chmod(0o600)

    def token(self, tenant: int) -> str:
        return TOKENS[tenant] if self.tenant_count > 1 else ""

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
        self.router.start()
        while not all(engine.is_done for engine in self.engines):
            sim.sleep(sim.rng.expovariate(1 / 3.0))
            self._strike()
        self.is_storming = False
        self._heal()
        self._check_the_end()

    def _strike(self) -> None:
        match self.weather:
            case "freezing":
                self.disk.freezes_reads_only = True
                self.disk.frozen_until_s = self.scheduler.now_s + self.scheduler.rng.uniform(5.0, 30.0)
            case "late":  # a little more than the ten seconds that engines give a fetch
                self.disk.freezes_reads_only = True
                if self.disk.frozen_until_s < self.scheduler.now_s - 1.0:
                    self.disk.frozen_until_s = self.scheduler.now_s + self.scheduler.rng.uniform(10.2, 14.0)
            case "forgetful":
                self.disk.forgets_share = self.scheduler.rng.choice((0.0, 0.05, 0.3))
            case _:
                self._strike_at_random()

    def _strike_at_random(self) -> None:
        sim, network, rpc = self.scheduler, self.node.network, self.node.rpc_faults
        match sim.rng.randrange(19):
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
            case 17:
                self.tally.streams_broken += self.node.rpc.break_streams()
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
        sim.sleep(1.0)
        self.router.check_picture()
        self.router.stop()
        sim.sleep(0.5)  # less than a lease lasts
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
            check_rest(engine, self.scheduler)
            engine.close()

    def make_engine(self, mode: PrefetchMode | None = None, *, tenant: int = 0) -> SmallEngine:
        is_late = self.weather == "late"  # what comes too late finds its slot in use again
        return SmallEngine(
            self.groups,
            token=self.token(tenant),
            l1=self.rng.choice((8, 12, 32)),
            l2=8 if is_late else self.rng.choice((8, 12, 32)),
            address=f"unix://{self.settings['socket']}",
            prefetch=PrefetchPolicy(
                mode or self.rng.choice(MODES), threshold_tokens=0, base_s=1.0, hard_cap_s=1.0 if is_late else 10.0
            ),
            copies=self.rng.choice(("reference", "direct")),  # what is measured is not of the seed
            write_policy=self.rng.choice(("write_through", "write_through", "write_back")),
        )
