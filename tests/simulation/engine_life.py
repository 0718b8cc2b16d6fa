"""One engine process after another: it serves prompts, and another thread of it observes what is usable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hicache.cache import HiCache
from hicache.node import Tier
from hicache.sequence import Request, Restored
from hicache.spec import CacheSpec
from tests.core.small_engine import PAGE, SmallEngine
from tests.simulation.daemon_life import STOP_S_MAX
from tests.simulation.replica import END_S_MAX
from tests.simulation.scheduler import Process, SimulationError

if TYPE_CHECKING:
    from tests.simulation.world import World

PROMPTS = 4
SALTS = (b"", b"one", b"two")
PAGES_MAX = 6
SERVE_S_MAX = 120.0  # no request takes longer, whatever happens: every wait in it has a deadline
REST_S_MAX = (
    600.0  # after its last request an engine has everything back within, from a disk that freezes again and again
)
RESTART_LOST_SHARE = 0.5  # of requests of a replica that has lost a rank, which restores nothing any more
RESTART_SHARE = 0.15  # of requests after which an engine goes and comes again, and finds in L3 what it has lost


class Engine(Protocol):
    """An engine process, or those of a replica, with all that is checked in it."""

    spec: CacheSpec
    cache: HiCache

    @property
    def has_lost(self) -> bool:
        """Whether a rank is lost, so that it has to be started again."""
        ...

    @property
    def l3s(self) -> list[Any]:  # Any: clients of hicached, of all ranks
        """How it reaches L3."""
        ...

    def check(self, request: Request, tokens: Sequence[int], restored: int) -> None: ...

    def write_page(self, request: Request, tokens: Sequence[int], end: int) -> None: ...

    def close(self) -> None: ...


class OneRank(SmallEngine):
    """The usual engine."""

    has_lost = False

    @property
    def l3s(self) -> list[Any]:
        return [self.cache.l3]


class EngineLife:
    """One engine process after another that serves its part of the prompts."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._name = f"engine{number}"
        self._tenant = number % world.tenant_count
        self._left = world.requests
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
        sim = self._world.scheduler
        engine = self._open()
        while self._left > 0:
            self._left -= 1
            self._serve(engine)
            if sim.rng.random() < (RESTART_LOST_SHARE if engine.has_lost else RESTART_SHARE):
                engine.cache.flush(timeout_s=10)
                self._close(engine)
                engine = self._open()
        engine.cache.flush(timeout_s=60)
        self._close(engine)
        self.is_done = True

    def _open(self) -> Engine:
        engine = self._world.make_engine(name=self._name, tenant=self._tenant)
        threading = self._world.node.threading
        self._is_closing = threading.Event()
        self._observer = threading.Thread(target=self._observe, args=(engine, self._is_closing), name="observer")
        self._observer.start()
        return engine

    def _observe(self, engine: Engine, is_closing: Any) -> None:
        """Harness 4: at any moment what is usable has all its pages, windows and states, and every byte of them."""
        world, sim = self._world, self._world.scheduler
        while not is_closing.wait(sim.rng.expovariate(2.0)):
            check_moment(engine)
            tokens, real, salt = self._draw()
            request = engine.cache.match(tokens, salt=salt)
            try:
                if sim.rng.random() < 0.5:
                    engine.cache.prefetch(request)
                    engine.cache.wait(request)
                restored = load(engine, request, timeout_s=2.0)
                if restored is not None:
                    engine.check(request, real, restored.tokens)
                    world.tally.observed += 1
            finally:
                if not sim.is_over:
                    engine.cache.release(request)

    def _draw(self) -> tuple[list[int], list[int], bytes]:
        """The tokens of a prompt, what this tenant computes for them, which is like nothing others do, and its salt."""
        rng = self._world.scheduler.rng
        family, pages, salt = rng.randrange(PROMPTS), rng.randint(1, PAGES_MAX), rng.choice((0, 0, 0, 1, 2))
        tokens = [10_000 * family + number for number in range(pages * PAGE + 1)]
        computed = [1_000_000 * (len(SALTS) * self._tenant + salt) + token for token in tokens]
        return tokens, computed, SALTS[salt]

    def _serve(self, engine: Engine) -> None:
        world, sim = self._world, self._world.scheduler
        began_s = sim.now_s
        tokens, computed, salt = self._draw()
        request = engine.cache.match(tokens, salt=salt)
        try:
            engine.cache.prefetch(request)
            is_served = sim.rng.random() < 0.9
            if is_served:
                engine.cache.wait(request)
                restored = load(engine, request, timeout_s=5.0)
                is_served = restored is not None
            if is_served and restored is not None:
                engine.check(request, computed, restored.tokens)
                is_served = self._compute(engine, request, computed, restored.tokens)
                world.tally.restored_tokens += restored.tokens
                world.tally.from_l3_tokens += restored.by_source.get("l3", 0)
            world.tally.served += is_served
            world.tally.aborted += not is_served
        finally:
            if not sim.is_over:
                engine.cache.release(request)
        if sim.now_s - began_s > SERVE_S_MAX:
            raise SimulationError(f"a request took {sim.now_s - began_s:g} s")
        sim.sleep(sim.rng.expovariate(1.0))

    def _compute(self, engine: Engine, request: Any, tokens: list[int], start: int) -> bool:
        """To the end of the prompt. False when a page finds no room."""
        for end in range(start + PAGE, len(tokens) + 1, PAGE):
            if not engine.cache.extend(request, tokens=end, timeout_s=5.0):
                return False
            engine.write_page(request, tokens, end)
            engine.cache.state_moved(request)
            engine.cache.store(request, computed=end, state_at=end if engine.spec.has_state else None)
            self._world.scheduler.maybe_switch()
        return True

    def _close(self, engine: Engine) -> None:
        sim = self._world.scheduler
        self._is_closing.set()
        self._observer.join()
        check_rest(engine, sim)
        raised = {name: count for name, count in faults_of(engine).items() if name.startswith(("l3.", "on_", "bad_"))}
        if raised:
            raise SimulationError(f"somebody raised or reported nonsense: {raised}")
        began_s = sim.now_s
        engine.close()
        if sim.now_s - began_s > STOP_S_MAX + END_S_MAX * self._world.has_ranks:
            raise SimulationError(f"closing an engine took {sim.now_s - began_s:g} s")


def load(engine: Engine, request: Request, *, timeout_s: float) -> Restored | None:
    """Harness 4 over shards: once a rank is lost, nothing is restored, whatever the other ranks have."""
    had_lost = engine.has_lost
    restored = engine.cache.load(request, timeout_s=timeout_s)
    if had_lost and restored is not None and restored.tokens:
        raise SimulationError(f"{restored.tokens} tokens were restored without {engine.cache.stats.ranks_lost}")
    return restored


def serve(engine: Engine, tokens: Sequence[int]) -> int:
    """A whole request, from a prompt to its last page: how many tokens of it were restored."""
    cache = engine.cache
    request = cache.match(tokens)
    cache.prefetch(request)
    cache.wait(request)
    restored = cache.load(request)
    if restored is None:
        raise SimulationError("L1 has no room in calm weather")
    engine.check(request, tokens, restored.tokens)
    for end in range(restored.tokens + PAGE, len(tokens) + 1, PAGE):
        if not cache.extend(request, tokens=end, timeout_s=20):
            raise SimulationError("L1 has no room in calm weather")
        engine.write_page(request, tokens, end)
        cache.state_moved(request)
        cache.store(request, computed=end, state_at=end if engine.spec.has_state else None)
    cache.release(request)
    return restored.tokens


def faults_of(engine: Engine) -> dict[str, int]:
    """What has gone wrong in its own executor, if it has one."""
    executor = engine.cache._replica.executor
    return {} if executor is None else executor.faults()


def check_moment(engine: Engine) -> None:
    """Harness 1 in an engine, of one moment: every token and object that was counted is in exactly one place."""
    reading = engine.cache.read()
    stats = reading.stats
    if stats.tokens_requested != sum(stats.tokens_by_source.values()):
        raise SimulationError(f"{stats.tokens_requested} tokens asked for, by source {stats.tokens_by_source}")
    dropped = sum(stats.prefetch_dropped.values())
    if stats.prefetch_found != stats.prefetch_used + dropped + stats.prefetch_in_flight:
        raise SimulationError(f"tokens found ahead do not add up: {stats}")
    for name, begun in reading.jobs.begun.items():
        seconds = reading.jobs.seconds.get(name)
        ended = 0 if seconds is None else seconds.count
        if begun != ended + reading.jobs.open.get(name, 0):
            raise SimulationError(f"{name}: {begun} objects begun, {ended} ended, {reading.jobs.open} open")


def check_rest(engine: Engine, sim: Any) -> None:
    """Harness 1 in an engine without requests: slots are those of what it keeps, and nothing is held or on its way.

    What hicached has not let go of yet, it does within REST_S_MAX.
    """
    until_s = sim.now_s + REST_S_MAX
    while (left := what_is_held(engine)) and sim.now_s < until_s:
        sim.sleep(1.0)
    if left:
        raise SimulationError(f"without a request the engine still has {left}")
    check_moment(engine)


def what_is_held(engine: Engine) -> list[str]:
    cache = engine.cache
    held = []
    with cache._changed:
        directory = cache._directory
        nodes = directory.index.nodes.values()
        for tier in Tier:
            for group, pool in enumerate(directory.index.pools[tier]):
                entries = [entry for node in nodes if (entry := node.entries[tier][group]) is not None]
                pins = sum(entry.pins for entry in entries)
                if (pool.used_count, pins) != (len(entries), 0):
                    held.append(f"{tier.name} {group}: {pool.used_count} slots of {len(entries)} pages, {pins} pins")
        held += [f"prefetched {number}" for number in directory._prefetcher.fetches.held if number]
        held += [f"{node.copying}, {node.storing} under way" for node in nodes if node.copying or node.storing]
        open_jobs = {name: count for name, count in cache._pump.times.read().open.items() if count}
        if open_jobs or directory.stats.prefetch_in_flight:
            held.append(f"{open_jobs}, {directory.stats.prefetch_in_flight} tokens on their way")
    return held
