"""Engines of several ranks: a leader, workers in processes of their own, and what the engine itself says to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.rank_patterns import Slot, compute, differing, seed_of
from hicache.cache import HiCache
from hicache.connect import open_l3
from hicache.errors import ConfigError, RankLost
from hicache.pools import L1Pool, L2Pool
from hicache.ranks.settings import Ranks
from hicache.ranks.worker import RankWorker
from hicache.sequence import Request
from hicache.spec import CacheSpec, Group, HeadSplit, PagedGroup, StateField, StateGroup
from tests.core.small_engine import PAGE, STORE_BYTES
from tests.simulation.rank_faults import ShardL3, Wire
from tests.simulation.scheduler import Fiber, Process, SimulationError

if TYPE_CHECKING:
    from tests.simulation.world import World

SPLIT: tuple[Group, ...] = (
    PagedGroup("attn", (0, 3), heads=2, head_dim=3, dtype="float32"),
    PagedGroup("swa", (4,), heads=2, head_dim=5, dtype="float32", window_tokens=6),
    StateGroup(
        "gdn",
        (1, 2),
        (
            StateField("conv", (3, 12), "float32", split=HeadSplit(1, ((2, 2), (2, 2), (2, 2)))),
            StateField("ring", (2, 4), "float32", transient=True, split=HeadSplit(0)),
            StateField("ssm", (2, 5), "float32", split=HeadSplit(0)),
        ),
    ),
)
START_S_MAX = 30.0
SILENCE_S_MAX = 5.0
COPY_S_MAX = 8.0
END_S_MAX = 60.0  # without its leader a worker gives everything back within
LOOK_S = 0.5
STEP_S_MAX = 6.0  # of a slow rank
KILLED_SHARE = 0.01  # of steps, in the middle of which a rank dies while faults come
STARTS_MAX = 20  # of a replica whose ranks die while they find each other
LEAVE = object()


def shapes_of(name: str) -> tuple[tuple[CacheSpec, bool], ...]:
    """What engines that share L3 may be: their spec, and whether the leader has no rank itself."""
    if name == "stages":
        staged = CacheSpec("m", "r", SPLIT, page_tokens=PAGE, pp_layers=(2, 3))
        return (staged, False), (staged, True)
    one, two = (CacheSpec("m", "r", SPLIT, page_tokens=PAGE, tp_size=size, tp_lcm=2) for size in (1, 2))
    return (two, False), (two, True), (one, False), (two, False)


class Mailbox:
    """What one process says to another, in order. No lock: whoever dies with it in hand keeps nobody waiting."""

    def __init__(self, scheduler: Any) -> None:
        self._sim = scheduler
        self._items: deque[Any] = deque()
        self._reader: Fiber | None = None

    def put(self, item: object) -> None:
        self._items.append(item)
        if self._reader is not None:
            self._sim.wake(self._reader)

    def get(self, *, within_s: float | None = None) -> Any:
        """The next one; None when there is none in time."""
        until_s = None if within_s is None else self._sim.now_s + within_s
        while not self._items:
            if until_s is not None and self._sim.now_s >= until_s:
                return None
            self._reader = self._sim.current
            self._sim.park(until_s=until_s)
            self._reader = None
        return self._items.popleft()


class Worker:
    """One rank in a process of its own."""

    def __init__(self, crew: Crew, rank: int) -> None:
        self._crew, self._world, self.rank = crew, crew.world, rank
        self.process = Process(f"{crew.name}:rank{rank}")
        self._asked, self._answers = Mailbox(crew.world.scheduler), Mailbox(crew.world.scheduler)
        self.worker: RankWorker | None = None  # once its leader has taken it
        crew.world.scheduler.spawn(self._main, name=self.process.name, process=self.process)

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return not self.process.is_alive

    def ask(self, step: int, slots: Sequence[Slot]) -> None:
        """Compute these slots in a step."""
        self._asked.put((step, slots))

    def wait_answer(self, cache: HiCache) -> None:
        """Until the step has been computed, or never will be."""
        while self._answers.get(within_s=LOOK_S) is None:
            if self.is_gone or self.rank in cache.stats.ranks_lost:
                return

    def leave(self) -> None:
        """Have it end, when it has done what it was asked before."""
        self._asked.put(LEAVE)

    def _main(self) -> None:
        try:
            worker = self._join()
        except ConfigError:  # its leader has gone, or does not wait for this one
            self._world.scheduler.kill(self.process)
            return
        self.worker = worker
        while (asked := self._asked.get(within_s=LOOK_S)) is not LEAVE:
            try:
                if asked is not None:
                    self._step(worker, *asked)
                elif worker.wait(0) is not None:
                    break
            except RankLost:
                break
        worker.close()
        self._check_nothing_is_held(worker)
        self._world.scheduler.kill(self.process)  # with every thread that is stuck

    def _join(self) -> RankWorker:
        """Raises ConfigError."""
        crew = self._crew
        l1 = L1Pool(crew.spec, rank=self.rank, pages=crew.l1, state_slots=crew.l1)
        l2 = L2Pool(crew.spec, [crew.l2] * len(crew.spec.groups), rank=self.rank)
        l3 = crew.open_l3(l2, self.rank)
        try:
            return RankWorker(crew.spec, rank=self.rank, leader=crew.meeting, l1=l1, l2=l2, l3=l3, copies=crew.copies)
        except ConfigError:
            l3.close()
            l2.close()
            raise

    def _step(self, worker: RankWorker, step: int, slots: Sequence[Slot]) -> None:
        world, sim = self._world, self._world.scheduler
        with worker.step(step):
            if sim.rng.random() < world.rank_faults.slow_share:
                sim.sleep(sim.rng.uniform(0, STEP_S_MAX))
            if world.is_storming and sim.rng.random() < KILLED_SHARE:
                world.tally.rank_kills += 1
                sim.kill(self.process)
                sim.give_way()
            compute(worker.l1, slots)
        self._answers.put(step)

    def _check_nothing_is_held(self, worker: RankWorker) -> None:
        """Harness 1 in a rank that has left: what it was asked for is over, and nobody has raised."""
        executor = worker._executor
        held = {kind: count for kind, count in executor.open_jobs().items() if count}
        raised = {name: count for name, count in executor.faults().items() if name.startswith(("l3.", "on_", "bad_"))}
        if held or raised:
            raise SimulationError(f"{self.process.name} has left with {held} open, and {raised} raised or nonsense")


class Crew:
    """The workers of one replica, and the wire that some of them go over to their leader."""

    def __init__(self, world: World, *, name: str, tenant: int) -> None:
        rng = world.rng
        self.world, self.name, self._tenant = world, name, tenant
        self.spec, self.leads_only = rng.choice(world.shapes)
        self.l1, self.l2 = rng.choice((8, 12, 32)), rng.choice((8, 12, 32))
        self.copies = rng.choice(("reference", "direct"))
        timeouts = {"start_timeout_s": START_S_MAX, "silence_timeout_s": SILENCE_S_MAX, "copy_timeout_s": COPY_S_MAX}
        leader_path = f"{world.folder}/{name}.ranks"
        self.leader = self.meeting = Ranks(f"unix://{leader_path}", **timeouts)
        self.wire: Wire | None = None
        if rng.random() < 0.5:
            self.wire = Wire(world, path=f"{world.folder}/{name}.wire", leader_path=leader_path)
            self.meeting = Ranks(f"unix://{self.wire.path}", **timeouts)
        self.workers = [Worker(self, rank) for rank in range(0 if self.leads_only else 1, self.spec.rank_count)]

    def open_l3(self, l2: L2Pool, rank: int) -> Any:  # Any: a DaemonL3 within
        """The L3 of one rank."""
        world = self.world
        address = f"unix://{world.settings['socket']}"
        l3 = open_l3(address, spec=self.spec, memory=l2, token=world.token(self._tenant), capacity_bytes=STORE_BYTES)
        return ShardL3(world, l3, l2, rank)

    def wait_up(self) -> None:
        """Until every worker has heard that it was taken, or is gone."""
        while any(worker.worker is None and not worker.is_gone for worker in self.workers):
            self.world.scheduler.sleep(LOOK_S)

    def end(self) -> None:
        """Have the processes end."""
        for worker in self.workers:
            worker.leave()
        self.wait_gone()

    def wait_gone(self) -> None:
        """Processes whose leader has gone end by themselves. Raises SimulationError when one stays."""
        sim = self.world.scheduler
        until_s = sim.now_s + END_S_MAX
        while any(not worker.is_gone for worker in self.workers):
            if sim.now_s >= until_s:
                left = [worker.process.name for worker in self.workers if not worker.is_gone]
                raise SimulationError(f"{', '.join(left)} have not ended within {END_S_MAX:g} s")
            sim.sleep(LOOK_S)
        self._cut()

    def kill(self) -> None:
        """All of them at once, as a supervisor does."""
        for worker in self.workers:
            if not worker.is_gone:
                self.world.scheduler.kill(worker.process)
        self._cut()

    def _cut(self) -> None:
        if self.wire is not None:
            self.world.scheduler.kill(self.wire.process)


def start_replica(world: World, *, name: str, tenant: int, **settings: Any) -> Replica:
    """A replica in place of the last one of this name, of which a supervisor leaves nobody, or which ends by itself.

    Ranks that die while they find each other, or that find each other too late, are started again, all of them.
    """
    left = world.crews.pop(name, None)
    if left is not None:
        if world.scheduler.rng.random() < 0.5:
            left.kill()
        left.wait_gone()
    for _ in range(STARTS_MAX):
        crew = world.crews[name] = Crew(world, name=name, tenant=tenant)
        try:
            replica = Replica(crew, **settings)
        except ConfigError as error:
            if not world.is_storming:
                raise SimulationError(f"ranks do not find each other although nothing hinders them: {error}") from error
            crew.kill()
        else:
            crew.wait_up()
            world.tally.replicas += crew.spec.rank_count > 1
            return replica
    raise SimulationError(f"ranks did not find each other {STARTS_MAX} times")


class Replica:
    """An engine of several ranks, as its life and its checks see it: like a SmallEngine."""

    def __init__(self, crew: Crew, **settings: Any) -> None:
        """Raises ConfigError when its ranks do not come. ``settings``: of HiCache."""
        self.crew, self.spec = crew, crew.spec
        if crew.leads_only:
            self.cache = HiCache.lead(crew.spec, ranks=crew.leader, **settings)
            return
        l1 = L1Pool(crew.spec, rank=0, pages=crew.l1, state_slots=crew.l1)
        l2 = L2Pool(crew.spec, [crew.l2] * len(crew.spec.groups), rank=0)
        l3 = crew.open_l3(l2, 0)
        try:
            self.cache = HiCache(crew.spec, l1=l1, l2=l2, l3=l3, ranks=crew.leader, copies=crew.copies, **settings)
        except ConfigError:
            l3.close()
            l2.close()
            raise

    @property
    def has_lost(self) -> bool:
        """Whether it has to be started again."""
        return bool(self.cache.stats.ranks_lost)

    @property
    def l3s(self) -> list[Any]:
        """The clients of all ranks."""
        own = [] if self.cache.l3 is None else [self.cache.l3]
        return own + [worker.worker.l3 for worker in self.crew.workers if worker.worker is not None]

    def write_page(self, request: Request, tokens: Sequence[int], end: int) -> None:
        """One step in which every rank computes the page that ends at ``end``."""
        slots: list[Slot] = []
        for index, group in enumerate(self.spec.groups):
            slot = (
                request.page_table(index)[end // PAGE - 1]
                if isinstance(group, PagedGroup)
                else request.state_slot(index)
            )
            assert slot is not None, "what is computed has a page"
            slots.append(Slot(index, slot, seed_of(tokens[:end])))
        step = self.cache.step()
        for worker in self.crew.workers:
            worker.ask(step, slots)
        if not self.crew.leads_only:
            compute(self.cache.l1, slots)
        for worker in self.crew.workers:
            worker.wait_answer(self.cache)

    def check(self, request: Request, tokens: Sequence[int], restored: int) -> None:
        """Every rank that is not lost holds its part of the restored prefix, byte for byte, and nothing transient."""
        slots: list[Slot] = []
        for index, group in enumerate(self.spec.groups):
            if isinstance(group, PagedGroup):
                pages = enumerate(request.page_table(index)[: restored // PAGE], start=1)
                slots += [Slot(index, slot, seed_of(tokens[: page * PAGE])) for page, slot in pages if slot is not None]
            else:
                slots.append(Slot(index, request.state_slot(index), seed_of(tokens[:restored]) if restored else 0))
        pools = {} if self.crew.leads_only else {0: self.cache.l1}
        pools |= {worker.rank: worker.worker.l1 for worker in self.crew.workers if worker.worker is not None}
        for rank, l1 in pools.items():
            wrong = [] if rank in self.cache.stats.ranks_lost else differing(l1, slots)
            if wrong:
                raise SimulationError(f"of {restored} restored tokens rank {rank} of {self.crew.name} has {wrong}")

    def close(self) -> None:
        """The leader first, or the ranks: whoever goes first, the others follow."""
        if self.crew.world.scheduler.rng.random() < 0.3:
            self.crew.end()
        self.crew.world.tally.ranks_lost += len(self.cache.stats.ranks_lost)
        self.cache.close()
        self.crew.end()
