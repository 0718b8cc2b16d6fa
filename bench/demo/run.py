"""The script of the demo: what is served, what is killed meanwhile, and what must come out of it."""

from __future__ import annotations

import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from bench.demo.processes import Daemon, DemoError, Engine
from bench.demo.store_watch import StoreBegun
from bench.demo.worker import (
    POISON,
    AwaitL3,
    CountCutOff,
    Flush,
    Inspect,
    Inspection,
    Reset,
    Serve,
    Served,
    Tenant,
    WatchStores,
    WorkerSettings,
)
from bench.demo.workload import TENANTS, Turn
from bench.tiny_config import TinyConfig

ENGINES = 2
MIB = 1024 * 1024
REPLAYS = 8  # prompts that are served again after each event
PROBES = 6  # prompts that another tenant asks for
FLUSH_TIMEOUT_S = 30.0
RECONNECT_TIMEOUT_S = 30.0
STORE_TIMEOUT_S = 10.0  # until a burst of fresh prompts is being stored
KILL_TRIES_MAX = 8  # kills of hicached until one meets a store half-way
SCAN_CHUNK_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Sizes:
    """Small enough that L1 overflows into L2 within the demo, large enough for one prompt and its neighbours."""

    l1_pages: int = 80
    l1_state_slots: int = 24
    l2_bytes: int = 24 * MIB
    l3_bytes: int = 512 * MIB


@dataclass(slots=True)
class Outcome:
    """Everything that was seen."""

    served: list[Served] = field(default_factory=list)
    cross_tenant_hits: int = 0
    cross_tenant_control_hits: int = 0
    survived_engine_restart: bool = False
    survived_daemon_kill: bool = False
    came_back_by_itself: bool = False
    stores_cut_off: int = 0  # objects whose store had begun when hicached was killed, had no answer, and failed
    inspections: list[Inspection] = field(default_factory=list)
    poison_in_l3: int = 0
    samples_looked_for: int = 0
    samples_in_l3: int = 0
    daemon_exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    tenant: str
    prompt: tuple[int, ...]
    output_tokens: int
    engine: int


class Demo:
    """Runs the script. ``advance`` is called with a line for people whenever a step is done, and how many remain."""

    def __init__(
        self, turns: Sequence[Turn], folder: Path, *, sizes: Sizes, seed: int, advance: Callable[[str, int], None]
    ) -> None:
        self._turns = turns
        self._rng = random.Random(seed)
        self._advance = advance
        self._outcome = Outcome()
        self._asked: list[_Asked] = []
        self._histories: dict[int, tuple[int, ...]] = {}
        self._serial = 0
        tenants = tuple(Tenant(name, secrets.token_hex(16), secrets.token_bytes(16)) for name in TENANTS)
        self._daemon = Daemon(folder, tenants, sizes.l3_bytes)
        self._engines = [Engine(number, self._settings(folder, number, sizes)) for number in range(ENGINES)]

    def _settings(self, folder: Path, number: int, sizes: Sizes) -> WorkerSettings:
        return WorkerSettings(
            l3=self._daemon.address,
            tenants=self._daemon.tenants,
            l1_pages=sizes.l1_pages,
            l1_state_slots=sizes.l1_state_slots,
            l2_bytes=sizes.l2_bytes,
            log_file=str(folder / f"engine-{number}.log"),
        )

    def run(self) -> Outcome:
        """The whole demo. Raises DemoError when a process does not do what it should; leaves none behind."""
        with ExitStack() as stack:
            stack.callback(self._daemon.kill)
            for engine in self._engines:
                stack.callback(engine.kill)
                engine.launch()
            self._daemon.start()
            for engine in self._engines:
                engine.await_ready()
                self._expect(engine, AwaitL3(RECONNECT_TIMEOUT_S), "a session with hicached")
            self._script()
            for engine in self._engines:
                engine.stop()
            self._outcome.daemon_exit_code = self._daemon.stop()
            self._search_l3()
        return self._outcome

    def _script(self) -> None:
        first, rest = self._turns[: len(self._turns) * 2 // 3], self._turns[len(self._turns) * 2 // 3 :]
        self._play(first, "two engines, two tenants")
        self._replay(self._asked[-REPLAYS:], "repeats on the same engine")
        self._replay(self._asked[:REPLAYS], "the oldest again, after L1 pressure")
        self._flush()
        self._replay(self._asked[:REPLAYS], "on the other engine", shift=1)
        self._restart_engine()
        self._kill_daemon()
        self._play(rest, "two engines again")
        self._probe_isolation()
        self._flush()
        for engine in self._engines:
            self._outcome.inspections.append(engine.ask(Inspect()))

    # -- serving -----------------------------------------------------------------------------------------------------

    def _play(self, turns: Iterable[Turn], title: str) -> None:
        """Serve turns on both engines at once; a conversation's turns follow each other, on alternating engines."""
        waiting = deque(turns)
        idle = deque(self._engines)
        busy: dict[Engine, tuple[Turn, _Asked]] = {}
        while waiting or busy:
            while idle and (turn := _next_turn(waiting, [turn for turn, _ in busy.values()])) is not None:
                engine = idle.popleft()
                busy[engine] = turn, self._ask(engine, turn)
            self._collect(busy, idle, title, left=len(waiting))

    def _ask(self, engine: Engine, turn: Turn) -> _Asked:
        history = () if turn.conversation is None else self._histories.get(turn.conversation, ())
        asked = _Asked(turn.tenant, history + turn.new_tokens, turn.output_tokens, engine.number)
        self._asked.append(asked)
        self._serial += 1
        engine.send(Serve(turn.tenant, asked.prompt, asked.output_tokens, speculative=self._serial % 3 == 0))
        return asked

    def _collect(self, busy: dict[Engine, tuple[Turn, _Asked]], idle: deque[Engine], title: str, *, left: int) -> None:
        ready = wait([engine.connection for engine in busy])
        for engine in [engine for engine in busy if engine.connection in ready]:
            turn, asked = busy.pop(engine)
            served: Served = engine.receive()
            self._note(served)
            if turn.conversation is not None:
                self._histories[turn.conversation] = asked.prompt + served.tokens
            idle.append(engine)
            self._advance(title, left)

    def _replay(self, asked: Sequence[_Asked], title: str, *, shift: int = 0) -> list[Served]:
        """Serve prompts again, each on its own engine or, shifted, on another one."""
        return [
            self._serve(self._engines[(again.engine + shift) % ENGINES], again, title, left=len(asked) - position)
            for position, again in enumerate(asked, start=1)
        ]

    def _serve(
        self, engine: Engine, asked: _Asked, title: str, *, left: int = 0, as_tenant: str | None = None
    ) -> Served:
        served: Served = engine.ask(Serve(asked.tenant, asked.prompt, asked.output_tokens, as_tenant=as_tenant))
        self._note(served)
        self._advance(title, left)
        return served

    def _note(self, served: Served) -> None:
        self._outcome.served.append(served)

    def _flush(self) -> None:
        for engine in self._engines:
            self._expect(engine, Flush(FLUSH_TIMEOUT_S), "everything written down")

    @staticmethod
    def _expect(engine: Engine, command: object, what: str) -> None:
        if not engine.ask(command):
            raise DemoError(f"engine {engine.number}: {what} was not reached in time: {command}")

    # -- events ------------------------------------------------------------------------------------------------------

    def _restart_engine(self) -> None:
        """SIGKILL an engine, start it again: what it had stored must come back from L3."""
        engine = self._engines[0]
        theirs = [asked for asked in self._asked if asked.engine == engine.number][-REPLAYS:]
        engine.kill()
        self._relaunch(engine)
        served = self._replay(theirs, "after SIGKILL of an engine")
        self._outcome.survived_engine_restart = _all_identical(served) and _tokens_from(served, "l3") > 0

    def _relaunch(self, engine: Engine) -> None:
        engine.launch()
        engine.await_ready()
        self._expect(engine, AwaitL3(RECONNECT_TIMEOUT_S), "a session with hicached")

    def _kill_daemon(self) -> None:
        """SIGKILL hicached while it stores; serve without it; start it again: what it had must still be there."""
        writer, other = self._engines
        acknowledged = self._asked[-REPLAYS:]
        self._flush()
        fresh = self._kill_in_mid_store(writer)
        away = [self._fresh_prompt(TENANTS[0]) for _ in range(2)]
        outage = [self._serve(writer, asked, "without hicached") for asked in away]
        outage += [self._serve(other, asked, "without hicached") for asked in acknowledged[:2]]
        self._daemon.start()
        self._outcome.came_back_by_itself = self._serve_reconnected(writer, other)
        for engine in self._engines:
            engine.ask(Reset())
        self._await_sessions()
        back = self._replay(acknowledged, "after the restart of hicached")
        self._replay(fresh + away, "what was cut off")
        survived = _all_identical(outage) and _all_identical(back) and _tokens_from(back, "l3") > 0
        self._outcome.survived_daemon_kill = survived

    def _kill_in_mid_store(self, writer: Engine) -> list[_Asked]:
        """Serve fresh prompts until a SIGKILL of hicached meets their store half-way; returns those prompts.

        hicached is dead afterwards, also when no kill of a bounded number met a store: ``stores_cut_off`` is 0 then.
        """
        fresh: list[_Asked] = []
        for number in range(KILL_TRIES_MAX):
            if number:
                self._daemon.start()
                self._await_sessions()
            fresh.append(self._fresh_prompt(TENANTS[0]))
            writer.ask(WatchStores())
            writer.send(Serve(fresh[-1].tenant, fresh[-1].prompt, fresh[-1].output_tokens))
            killed_at_s = self._kill_at_store(writer)
            self._note(writer.receive())
            self._advance("SIGKILL of hicached in mid-store", 0)
            writer.ask(Flush(FLUSH_TIMEOUT_S))  # every store that had begun has its answer then
            self._outcome.stores_cut_off = writer.ask(CountCutOff(killed_at_s))
            if self._outcome.stores_cut_off:
                break
        return fresh

    def _kill_at_store(self, writer: Engine) -> float:
        """SIGKILL hicached in the middle of the next store; returns the time.monotonic before it."""
        if writer.stores.poll(STORE_TIMEOUT_S):
            begun: StoreBegun = writer.stores.recv()
            time.sleep(max(0.0, begun.halfway_s - time.monotonic()))
        killed_at_s = time.monotonic()
        self._daemon.kill()
        return killed_at_s

    def _serve_reconnected(self, writer: Engine, other: Engine) -> bool:
        """Whether engines that lived through the outage store and find again, with nothing done to them."""
        title = "hicached is back"
        self._await_sessions(sessions_min=2)
        stored_before = self._stored_count(writer)
        asked = self._fresh_prompt(TENANTS[0])
        written = self._serve(writer, asked, title)
        self._flush()
        stored_count = self._stored_count(writer) - stored_before
        found = self._serve(other, asked, title)
        return _all_identical([written, found]) and stored_count > 0 and found.by_source["l3"] > 0

    def _await_sessions(self, *, sessions_min: int = 1) -> None:
        for engine in self._engines:
            self._expect(engine, AwaitL3(RECONNECT_TIMEOUT_S, sessions_min), "a session with the new hicached")

    @staticmethod
    def _stored_count(engine: Engine) -> int:
        inspection: Inspection = engine.ask(Inspect())
        return inspection.objects.get("store.ok", 0)

    def _probe_isolation(self) -> None:
        """Another tenant asks for what one tenant stored: by its own token, and by its own salt on the same engine."""
        title = "another tenant asks"
        owner, stranger = TENANTS
        prompts = [self._fresh_prompt(owner) for _ in range(PROBES)]
        for asked in prompts:
            self._serve(self._engines[0], asked, title)
        self._flush()
        for asked in prompts:
            foreign = _Asked(stranger, asked.prompt, asked.output_tokens, asked.engine)
            probes = [self._serve(engine, foreign, title) for engine in self._engines[:1]]
            probes.append(self._serve(self._engines[0], asked, title, as_tenant=stranger))
            self._outcome.cross_tenant_hits += sum(served.is_hit for served in probes)
        for asked in prompts:
            controls = [self._serve(engine, asked, "the owner asks") for engine in self._engines]
            self._outcome.cross_tenant_control_hits += sum(served.is_hit for served in controls)

    def _fresh_prompt(self, tenant: str) -> _Asked:
        prompt = tuple(self._rng.randrange(TinyConfig().vocab) for _ in range(200))
        return _Asked(tenant, prompt, 4, 0)

    # -- the search in L3 --------------------------------------------------------------------------------------------

    def _search_l3(self) -> None:
        """Look for poison in every byte that hicached keeps, and, as a control, for states that must be there."""
        samples = list({served.sample for served in self._outcome.served[-4 * PROBES :] if served.sample})
        found: set[bytes] = set()
        overlap = max(len(sample) for sample in [POISON_RUN, *samples]) - 1
        for path in sorted(self._daemon.data_folder.rglob("*")):
            if not path.is_file():
                continue
            with open(path, "rb") as file:
                tail = b""
                while chunk := file.read(SCAN_CHUNK_BYTES):
                    window = tail + chunk
                    self._outcome.poison_in_l3 += window.count(POISON_RUN)
                    found.update(sample for sample in samples if sample in window)
                    tail = window[-overlap:]
        self._outcome.samples_looked_for = len(samples)
        self._outcome.samples_in_l3 = len(found)


POISON_RUN = POISON * 4


def _next_turn(waiting: deque[Turn], busy: Sequence[Turn]) -> Turn | None:
    """Take the first turn whose conversation is not being served."""
    talking = {turn.conversation for turn in busy if turn.conversation is not None}
    for turn in waiting:
        if turn.conversation not in talking:
            waiting.remove(turn)
            return turn
    return None


def _all_identical(served: Sequence[Served]) -> bool:
    return bool(served) and not any(one.differences for one in served)


def _tokens_from(served: Sequence[Served], source: str) -> int:
    return sum(one.by_source[source] for one in served)
