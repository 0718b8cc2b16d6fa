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
from hicache.spec import CacheSpec
from tests.core.small_engine import ATTENTION, HYBRID, PAGE
from tests.simulation.daemon_life import CAPACITIES, QUOTAS, DaemonLife
from tests.simulation.disk import DiskFaults
from tests.simulation.engine_life import Engine, EngineLife, OneRank, check_rest, faults_of, serve
from tests.simulation.lmdb_disk import LmdbDisk
from tests.simulation.neighbours import Router
from tests.simulation.net import Loop
from tests.simulation.patching import Node, patched
from tests.simulation.rank_faults import RankFaults
from tests.simulation.replica import SPLIT, Crew, shapes_of, start_replica
from tests.simulation.scheduler import Process, Scheduler, SimulationError
from tests.simulation.storm import WEATHERS, Storm
from tests.simulation.tally import Tally

TOKENS = ("token-of-tenant-a-0123456789", "token-of-tenant-b-0123456789")
HEAL_S = 40.0  # after the last fault: sessions, breakers and memory are back by then
RANKS_SHARE = 0.3  # of lives whose engines have several ranks
MODES: tuple[PrefetchMode, ...] = ("best_effort", "wait_complete", "timeout")


class World:
    """Everything of one life."""

    def __init__(
        self,
        seed: int,
        *,
        engines: int = 2,
        requests: int = 12,
        weather: str = "",
        statements: float = 0.0,
        ranks: bool | None = None,
    ) -> None:
        """With ``statements`` fibers lose their turn between statements, too: one of so many, on average. ``ranks``:
        whether engines have several; None: as the seed has it."""
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
        self.rank_faults = RankFaults()
        self.shapes = shapes_of(self.rng.choice(("heads", "heads", "stages")))
        drawn_ranks = self.rng.random() < RANKS_SHARE
        self.has_ranks = drawn_ranks if ranks is None else ranks
        self.groups = SPLIT if self.has_ranks else self.rng.choice((HYBRID, HYBRID, (ATTENTION,)))
        self.spec = self.shapes[0][0] if self.has_ranks else CacheSpec("m", "r", self.groups, page_tokens=PAGE)
        self.crews: dict[str, Crew] = {}  # by their engine, the last of each
        self.is_storming = True  # until the last fault: then only engines change what is stored
        self.kept: list[Any] = []  # tasks that nobody else refers to
        self.daemon = DaemonLife(self)
        self.lmdb_disk = LmdbDisk(self.scheduler, self.node.threading, self.disk, die=self.daemon.kill)
        self.storm = Storm(self)
        self.router = Router(self)

    def write_tenants(self, rng: random.Random) -> None:
        """The tenants file, with other limits for each."""
        if self.tenant_count > 1:
            limits = (
                "",
                f" quota_bytes={QUOTAS[str(self.settings['backend'])]}",
                " quota_objects=60",
                " ttl_s=3000",
                " weight=3",
            )
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
            with patched(self.node), self._disk(), self.lmdb_disk.in_place():
                director = self.scheduler.spawn(self._direct, name="director", process=Process("director"))
                try:
                    self.scheduler.run(director)
                finally:
                    self.scheduler.bury()
                    for loop in self.loops:
                        loop.bury()
                    self.node.sockets.bury()
                    self.node.eventfds.bury()
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
            self.storm.strike()
            self.daemon.keep_up()
        self.is_storming = False
        self.storm.calm()
        self.daemon.keep_up()
        sim.sleep(HEAL_S)
        self._check_the_end()

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
            engine = self.make_engine("wait_complete", name="last")
            for l3 in engine.l3s:
                if not l3.wait_ready(timeout_s=20):
                    raise SimulationError(f"no session although nothing hinders it: {l3.status()}")
            restored = serve(engine, tokens)
            if restored != expected:
                raise SimulationError(
                    f"{restored} tokens were restored in calm weather, not {expected}: {engine.cache.stats},"
                    f" {faults_of(engine)} {[l3.status() for l3 in engine.l3s]}"
                )
            if not engine.cache.flush(timeout_s=20):
                raise SimulationError("what was stored is not written down in calm weather")
            check_rest(engine, self.scheduler)
            engine.close()

    def make_engine(self, mode: PrefetchMode | None = None, *, name: str, tenant: int = 0) -> Engine:
        """Settings that nobody gives are those of the seed."""
        is_late = self.weather == "late"  # what comes too late finds its slot in use again
        policy = PrefetchPolicy(
            mode or self.rng.choice(MODES), threshold_tokens=0, base_s=1.0, hard_cap_s=1.0 if is_late else 10.0
        )
        write_policy = self.rng.choice(("write_through", "write_through", "write_back"))
        if self.has_ranks:
            return start_replica(self, name=name, tenant=tenant, prefetch=policy, write_policy=write_policy)
        return OneRank(
            self.groups,
            token=self.token(tenant),
            l1=self.rng.choice((8, 12, 32)),
            l2=8 if is_late else self.rng.choice((8, 12, 32)),
            address=f"unix://{self.settings['socket']}",
            prefetch=policy,
            copies=self.rng.choice(("reference", "direct")),  # what is measured is not of the seed
            write_policy=write_policy,
        )
