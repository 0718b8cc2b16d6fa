"""Random lives of an engine that loads by layer, on a device that is as late as it may be."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

import torch

from hicache import HiCache
from hicache.copies import PoolCopies
from hicache.copy_order import CopyOrder, CudaOrder
from hicache.executor import Executor
from hicache.layer_runs import layer_runs
from hicache.policies.prefetch import PrefetchPolicy
from hicache.pools import L1Pool, L2Pool
from hicache.sequence import Request
from hicache.spec import CacheSpec, PagedGroup, StateField, StateGroup
from hicache.stats import DirectoryStats
from tests.engine.fakes import MemoryL3
from tests.engine.lazy_cuda import EnqueuedCopies, LazyCuda

PAGE = 4
SPEC = CacheSpec(
    "layers",
    "1",
    (
        PagedGroup("attention", (0, 2, 4), heads=1, head_dim=8, dtype="uint8"),
        StateGroup("state", (1, 3), (StateField("s", (8,), "uint8"), StateField("ring", (8,), "uint8", True))),
    ),
    page_tokens=PAGE,
)
LAYERS = range(5)
PAGED = {layer: place for place, layer in enumerate((0, 2, 4))}
STATES = {layer: place for place, layer in enumerate((1, 3))}
DEVICE = torch.device("cuda", 0)  # so it is said: there is none


def value(tokens: list[int], layer: int) -> torch.Tensor:
    """What a layer makes of a prefix."""
    digest = hashlib.blake2b(bytes([layer, *tokens]), digest_size=8).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


class LayerLife:
    """One engine. ``wrong``: what compute read that was not what it should be."""

    def __init__(self, seed: int, order: Callable[[torch.device, LazyCuda], CopyOrder] = CudaOrder) -> None:
        self.rng = random.Random(seed)
        self.cuda = LazyCuda(self.rng)
        self.wrong: list[str] = []
        self.l1 = L1Pool(SPEC, pages=9, state_slots=5)
        l2 = L2Pool(SPEC, (7, 3))
        copies = EnqueuedCopies(PoolCopies(self.l1, l2), self.cuda)

        def executor(*pools: Any, **settings: Any) -> Executor:
            return Executor(*pools, **{**settings, "copies": copies}, order=order(DEVICE, self.cuda))

        with patch("hicache.replica.Executor", executor):
            self.cache = HiCache(
                SPEC,
                l1=self.l1,
                l2=l2,
                l3=MemoryL3(l2),
                layerwise=True,
                prefetch=PrefetchPolicy("best_effort", threshold_tokens=0),
            )
        self.trunks = [[self.rng.randrange(4) for _ in range(16)] for _ in range(3)]
        self.running: list[tuple[Request, list[int], int]] = []

    @property
    def stats(self) -> DirectoryStats:
        return self.cache.stats

    def step(self) -> None:
        """One request begins or goes on; the device does a little."""
        with patch("hicache.copy_jobs.layer_runs", partial(layer_runs, run_bytes_min=1)):
            if len(self.running) < 2 and self.rng.random() < 0.7:
                self._begin()
            elif self.running:
                self._go_on()
        if self.rng.random() < 0.4:  # what was to be written down has been
            executor = self.cache._replica.executor
            assert executor is not None
            self.cuda.run_until(lambda: not executor.open_jobs()["backup"])
        self.cuda.run_some(self.rng.randrange(8))

    def end(self) -> None:
        for request, _, _ in self.running:
            self.cache.release(request)
        self.cuda.run_until(lambda: self.cache.flush(timeout_s=0.0))
        self.cache.close()
        self.cuda.run_all()

    def _begin(self) -> None:
        trunk = self.rng.choice(self.trunks)
        tokens = [*trunk[: self.rng.randrange(4, 17)], *(self.rng.randrange(4) for _ in range(3))]
        request = self.cache.match(tokens)
        self.cache.prefetch(request, mode=self.rng.choice(["best_effort", "wait_complete"]))
        self.cache.wait(request)
        restored = self.cache.load(request)
        if restored is None:
            self.cache.release(request)
            self.cuda.run_some(20)
        elif self.rng.random() < 0.3:  # aborted while its copies are in flight
            if restored.tokens and self.rng.random() < 0.5:  # or over: its state is the snapshot in L1
                self.cache.store(request, computed=restored.tokens, state_at=restored.tokens, donate=True)
            self.cache.release(request)
        else:
            self.running.append((request, tokens, restored.tokens))

    def _go_on(self) -> None:
        """A step of the forward up to a page boundary, and the request is over."""
        request, tokens, restored = self.running.pop(self.rng.randrange(len(self.running)))
        end = len(tokens) // PAGE * PAGE
        if end > restored and self.cache.extend(request, tokens=end):
            self._forward(request, tokens, restored, end)
            self.cache.store(request, computed=end, state_at=end)
        self.cache.release(request)

    def _forward(self, request: Request, tokens: list[int], restored: int, end: int) -> None:
        table, slot = [*request.page_table(0)], request.state_slot(1)
        for layer in LAYERS:
            self.cache.wait_layer(layer)
            if layer in PAGED:
                self.cuda.launch(partial(self._attention, layer, table, tokens, restored, end))
            else:
                self.cuda.launch(partial(self._recurrence, layer, slot, tokens, restored, end))

    def _attention(self, layer: int, table: list[int], tokens: list[int], restored: int, end: int) -> None:
        held = self.l1.paged[0][PAGED[layer]]
        for page in range(end // PAGE):
            expected = value(tokens[: (page + 1) * PAGE], layer)
            if page * PAGE >= restored:
                held[table[page]] = expected
            elif not bool((held[table[page]] == expected).all()):
                self.wrong.append(f"page {page} in layer {layer}")

    def _recurrence(self, layer: int, slot: int, tokens: list[int], restored: int, end: int) -> None:
        place = STATES[layer]
        state, ring = self.l1.state[1]["s"][place, slot], self.l1.state[1]["ring"][place, slot]
        expected = value(tokens[:restored], layer) if restored else torch.zeros(8, dtype=torch.uint8)
        if not torch.equal(state, expected) or bool(ring.any()):
            self.wrong.append(f"state after {restored} in layer {layer}")
        state.copy_(value(tokens[:end], layer))
        ring.fill_(1)


class Lives(Protocol):
    """A life: of this engine, or of one that owns its slots."""

    wrong: list[str]

    @property
    def stats(self) -> DirectoryStats: ...

    def step(self) -> None: ...

    def end(self) -> None: ...


Life = TypeVar("Life", bound=Lives)


def lived(life: Life, *, loads: int, steps_max: int) -> Life:
    """Until something has been loaded so often, or something wrong has been read."""
    for _ in range(steps_max):
        life.step()
        if life.wrong or life.stats.objects["load.ok"] > loads:
            break
    life.end()
    return life
