"""An engine process of a prefill and decode pair: the tiny model over one cache, told what to do through a pipe."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.tiny_engine import Generated, ScriptedDrafts, TinyEngine
from bench.tiny_hybrid import TinyConfig, TinyHybrid
from bench.tiny_reference import RestoredBytes
from hicache import HiCache, PrefetchPolicy, Stored
from hicache.cache import Request
from hicache.client import ClientState, DaemonL3
from hicache.l3 import Done, L3Item
from hicache.outcome import Outcome

MODEL_SEED = 5
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Side:
    """Where an engine belongs."""

    l3: str
    token: str
    deployment: str = "chat"
    prefetch_cap_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve a prompt; then wait for L3 to have it, for another engine. Answers with a Turn."""

    prompt: tuple[int, ...]
    count: int
    answer: tuple[int, ...] = ()  # drafts that are right now and then, for speculative decode; none without
    handover_timeout_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of it."""

    tokens: tuple[int, ...]
    by_source: dict[str, int]
    restored: RestoredBytes
    stored: Stored


@dataclass(frozen=True, slots=True)
class HoldPuts:
    """From now on only ``count`` objects get to L3, and the others wait. Answers when that holds."""

    count: int


@dataclass(frozen=True, slots=True)
class LetPutsGo:
    """All of them."""


@dataclass(frozen=True, slots=True)
class AwaitL3:
    """Answers whether hicached is connected within ``timeout_s``."""

    timeout_s: float = 30.0


class HeldPuts:
    """Stands before the ``put`` of an L3 client."""

    def __init__(self, client: DaemonL3) -> None:
        self._put = client.put
        client.put = self.put  # type: ignore[method-assign]  # the one way to stand between executor and client
        self._lock = threading.Lock()
        self._left: int | None = None  # objects that may still pass; None: all
        self._go = threading.Event()

    def hold(self, count: int) -> None:
        with self._lock:
            self._left = count
            self._go.clear()

    def let_go(self) -> None:
        with self._lock:
            self._left = None
            self._go.set()

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """See L3.put. Blocks its thread as long as some of its objects are held."""
        with self._lock:
            passing = len(items) if self._left is None else min(self._left, len(items))
            if self._left is not None:
                self._left -= passing
        parts: list[list[Outcome]] = []
        if passing:
            self._put(items[:passing], timeout_s=timeout_s, done=parts.append)
        if passing < len(items):
            self._go.wait()
            self._put(items[passing:], timeout_s=timeout_s, done=parts.append)
        done([outcome for part in parts for outcome in part])


class HandingOver:
    """A HiCache that waits, before it lets a request go, until another engine can go on with it."""

    def __init__(self, cache: HiCache) -> None:
        self._cache = cache
        self.timeout_s = 0.0
        self.stored = Stored(0, is_complete=False)

    def __getattr__(self, name: str) -> Any:  # Any: whatever HiCache has
        return getattr(self._cache, name)

    def release(self, request: Request) -> None:
        """See HiCache.release."""
        try:
            self.stored = self._cache.wait_stored(request, timeout_s=self.timeout_s)
        finally:
            self._cache.release(request)


def run_engine(connection: Connection, side: Side) -> None:
    """The process's main function: answers each command, in order, until the pipe is closed."""
    torch.set_num_threads(1)
    model = TinyHybrid(TinyConfig(), seed=MODEL_SEED)
    cache = HiCache.open(
        model.spec(),
        l1_pages=80,
        l1_state_slots=12,
        l2_bytes=16 * MIB,
        l3=side.l3,
        token=side.token,
        deployment=side.deployment,
        prefetch=PrefetchPolicy("wait_complete", hard_cap_s=side.prefetch_cap_s, threshold_tokens=0),
    )
    assert isinstance(cache.l3, DaemonL3)
    puts = HeldPuts(cache.l3)
    handing_over = HandingOver(cache)
    engine = TinyEngine(model, handing_over, chunk_tokens=64)  # type: ignore[arg-type]
    with cache:
        connection.send("ready")
        while True:
            try:
                command = connection.recv()
            except EOFError:
                return
            match command:
                case Serve():
                    connection.send(serve(engine, handing_over, command))
                case HoldPuts(count):
                    connection.send(puts.hold(count))
                case LetPutsGo():
                    connection.send(puts.let_go())
                case AwaitL3(timeout_s):
                    is_ready = cache.l3.wait_ready(timeout_s=timeout_s)
                    connection.send(is_ready and cache.l3.status().state is ClientState.READY)


def serve(engine: TinyEngine, cache: HandingOver, command: Serve) -> Turn:
    drafts = None
    if command.answer:
        vocab = engine.model.config.vocab
        drafts = ScriptedDrafts(command.answer, wrong_share=0.3, vocab=vocab, seed=len(command.prompt))
    cache.timeout_s = command.handover_timeout_s
    generated = engine.generate(command.prompt, command.count, drafts=drafts, copy_restored_bytes=True)
    assert isinstance(generated, Generated), f"L1 is too small: {generated}"
    assert generated.restored is not None
    return Turn(generated.tokens, dict(generated.by_source), generated.restored, cache.stored)
