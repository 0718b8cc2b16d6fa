"""One engine process of the demo: the tiny model over one cache for each tenant, told what to do through a pipe."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.demo.store_watch import StoreWatch
from bench.tiny_engine import Busy, Generated, ScriptedDrafts, TinyEngine
from bench.tiny_hybrid import TinyConfig, TinyHybrid
from bench.tiny_reference import Reference, reference_generate, restored_differences
from hicache.cache import HiCache
from hicache.client import ClientState, DaemonL3
from hicache.policies.prefetch import PrefetchPolicy
from hicache.sequence import Request
from hicache.spec import StateGroup

# Written into the rings of every live state before it is snapshotted: must be found in L1, and nowhere below.
POISON = b"RING"
MODEL_SEED = 20_26


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the demo: its token for hicached, and the salt of its keys."""

    name: str
    token: str
    salt: bytes


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Sizes of one engine process. Pages and slots are per tenant."""

    l3: str
    tenants: tuple[Tenant, ...]
    l1_pages: int
    l1_state_slots: int
    l2_bytes: int
    log_file: str


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve a prompt in the cache of ``tenant``, salted for ``as_tenant`` (None: the same)."""

    tenant: str
    prompt: tuple[int, ...]
    output_tokens: int
    speculative: bool = False
    as_tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What was served, and how it compares with a full recompute of the same prompt."""

    tokens: tuple[int, ...]
    by_source: dict[str, int]
    prompt_tokens: int
    ttft_s: float
    recompute_ttft_s: float
    differences: tuple[str, ...]  # empty: same tokens, same bytes in every restored page and state
    sample: bytes = b""  # bytes of a restored state, to look for in L3
    is_compared: bool = False  # whether tokens and restored bytes were really compared with the recompute

    @property
    def is_hit(self) -> bool:
        """Whether anything at all was restored."""
        return self._restored_tokens > 0

    @property
    def source(self) -> str:
        """Where its time is counted: the farthest tier that something came from, if half of the prompt was restored."""
        if 2 * self._restored_tokens < self.prompt_tokens:
            return "computed"
        return next((tier for tier in ("l3", "l2", "l1") if self.by_source[tier]), "computed")

    @property
    def _restored_tokens(self) -> int:
        return sum(tokens for source, tokens in self.by_source.items() if source != "computed")


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait until everything has been written down. Answers whether it has."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget L1 and L2: caches are closed and opened anew."""


@dataclass(frozen=True, slots=True)
class AwaitL3:
    """Wait until every cache has a live session with hicached, its ``sessions_min``-th at least. Answers whether so."""

    timeout_s: float
    sessions_min: int = 1


@dataclass(frozen=True, slots=True)
class WatchStores:
    """Tell of the next store through the second pipe, as a StoreBegun."""


@dataclass(frozen=True, slots=True)
class CountCutOff:
    """Answers with the number of objects whose store was under way at ``moment_s`` of time.monotonic, and failed."""

    moment_s: float


@dataclass(frozen=True, slots=True)
class Inspect:
    """Answers with an Inspection."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """Counters summed over the process's caches, and where the poison was found."""

    objects: dict[str, int] = field(default_factory=dict)  # "<leg>.<outcome>" -> objects
    bytes_moved: dict[str, int] = field(default_factory=dict)  # leg -> payload bytes
    poison_in_l1: int = 0
    poison_in_l2: int = 0


def run_worker(connection: Connection, stores: Connection, settings: WorkerSettings) -> None:
    """The process's main function: answers each command, in order, until the pipe is closed.

    What it has to say goes to its log file, tracebacks and gRPC's lines too.
    """
    with open(settings.log_file, "ab") as log:
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    with _Worker(settings, StoreWatch(stores)) as worker:
        connection.send("ready")
        while True:
            try:
                command = connection.recv()
            except EOFError:
                return
            connection.send(worker.answer(command))


class _Worker:
    def __init__(self, settings: WorkerSettings, store_watch: StoreWatch) -> None:
        self._settings = settings
        self._store_watch = store_watch
        self._model = TinyHybrid(TinyConfig(), seed=MODEL_SEED)
        self._spec = self._model.spec()
        self._caches: dict[str, HiCache] = {}
        self._engines: dict[str, TinyEngine] = {}
        self._salts = {tenant.name: tenant.salt for tenant in settings.tenants}
        self._open()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def answer(self, command: object) -> Any:  # Any: each command has its own answer type, named in its docstring
        match command:
            case Serve():
                return self._serve(command)
            case Flush(timeout_s=timeout_s):
                return all(cache.flush(timeout_s=timeout_s) for cache in self._caches.values())
            case Reset():
                self._close()
                self._open()
                return None
            case AwaitL3():
                return _await(lambda: self._are_connected(command.sessions_min), command.timeout_s)
            case WatchStores():
                return self._store_watch.arm()
            case CountCutOff(moment_s=moment_s):
                return self._store_watch.cut_off_count(moment_s)
            case Inspect():
                return self._inspect()
        raise AssertionError(f"unknown command {command!r}")

    def _open(self) -> None:
        for tenant in self._settings.tenants:
            cache = HiCache.open(
                self._spec,
                l1_pages=self._settings.l1_pages,
                l1_state_slots=self._settings.l1_state_slots,
                l2_bytes=self._settings.l2_bytes,
                l3=self._settings.l3,
                token=tenant.token,
                salt=tenant.salt,
                prefetch=PrefetchPolicy(mode="timeout", base_s=2.0, hard_cap_s=5.0, threshold_tokens=32),
            )
            self._caches[tenant.name] = cache
            assert cache.l3 is not None
            self._store_watch.watch(cache.l3)
            self._engines[tenant.name] = TinyEngine(self._model, _PoisoningCache(cache))  # type: ignore[arg-type]

    def _close(self) -> None:
        for cache in self._caches.values():
            cache.close()

    def _are_connected(self, sessions_min: int) -> bool:
        return all(_is_connected(cache, sessions_min) for cache in self._caches.values())

    def _serve(self, command: Serve) -> Served:
        reference = reference_generate(self._model, command.prompt, command.output_tokens)
        drafts = None
        if command.speculative:
            vocab = self._model.config.vocab
            drafts = ScriptedDrafts(reference.tokens, wrong_share=0.3, vocab=vocab, seed=len(command.prompt))
        generated = self._engines[command.tenant].generate(
            command.prompt,
            command.output_tokens,
            salt=None if command.as_tenant is None else self._salts[command.as_tenant],
            drafts=drafts,
            copy_restored_bytes=True,
        )
        if isinstance(generated, Busy):
            raise RuntimeError(f"L1 of the demo is too small for a prompt of {len(command.prompt)} tokens")
        return self._compare(generated, reference)

    def _compare(self, generated: Generated, reference: Reference) -> Served:
        differences = [] if generated.tokens == reference.tokens else ["output tokens differ"]
        sample = b""
        if generated.restored is not None:
            differences += restored_differences(self._spec, generated.restored, reference)
            if generated.restored.tokens:
                temporal = generated.restored.state["temporal"].contiguous().view(torch.uint8).flatten()
                sample = bytes(temporal[:64].tolist())
        return Served(
            generated.tokens,
            dict(generated.by_source),
            generated.prompt_tokens,
            generated.ttft_s,
            reference.ttft_s,
            tuple(differences),
            sample,
            is_compared=generated.restored is not None,
        )

    def _inspect(self) -> Inspection:
        objects: dict[str, int] = {}
        bytes_moved: dict[str, int] = {}
        poison_in_l1 = poison_in_l2 = 0
        for cache in self._caches.values():
            for name, count in cache.stats.objects.items():
                objects[name] = objects.get(name, 0) + count
            for leg, count in cache.stats.bytes_moved.items():
                bytes_moved[leg] = bytes_moved.get(leg, 0) + count
            poison_in_l1 += sum(
                bytes(ring.contiguous().view(torch.uint8).flatten().numpy()).count(POISON)
                for group, fields in cache.l1.state.items()
                for name, ring in fields.items()
                if name.startswith("ring_")
            )
            if cache.l2 is not None:
                poison_in_l2 += bytes(cache.l2.buffer).count(POISON)
        return Inspection(objects, bytes_moved, poison_in_l1, poison_in_l2)


class _PoisoningCache:
    """A HiCache that fills the empty rings of a live state with poison before every snapshot."""

    def __init__(self, cache: HiCache) -> None:
        self._cache = cache
        self._poison = torch.frombuffer(bytearray(POISON), dtype=torch.float32).item()

    def __getattr__(self, name: str) -> Any:  # Any: whatever HiCache has
        return getattr(self._cache, name)

    def store(self, request: Request, *, computed: int, state_at: int | None = None, state_pending: int = 0) -> None:
        """See HiCache.store."""
        if state_at is not None and state_pending == 0:
            for index, group in enumerate(self._cache.spec.groups):
                if isinstance(group, StateGroup):
                    self._fill(index, group, request.state_slot(index))
        self._cache.store(request, computed=computed, state_at=state_at, state_pending=state_pending)

    def _fill(self, index: int, group: StateGroup, slot: int) -> None:
        for state_field in group.fields:
            if state_field.transient and state_field.dtype == "float32":
                self._cache.l1.state[index][state_field.name][:, slot] = self._poison


def _is_connected(cache: HiCache, sessions_min: int) -> bool:
    assert isinstance(cache.l3, DaemonL3)
    status = cache.l3.status()
    return status.state is ClientState.READY and status.sessions_opened >= sessions_min


def _await(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.02)
    return True
