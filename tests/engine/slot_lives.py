"""Random lives of an engine that owns its slots, on a device that is as late as it may be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from hicache.copies import PoolCopies
from hicache.copy_order import CopyOrder, CudaOrder
from hicache.executor import Executor
from hicache.pools import L1Pool, L2Pool
from hicache.slot_cache import SlotCache, SlotRequest
from hicache.slot_request import SlotLoad
from hicache.stats import DirectoryStats
from tests.engine.layer_lives import DEVICE, PAGE, SPEC, value
from tests.engine.lazy_cuda import EnqueuedCopies, LazyCuda

SLOTS = 10
LAYERS = ((0, 2, 4), (1, 3))  # by group
ATTENTION, STATE = 0, 1

Part = tuple[int, int]  # (group, page); of a state the last page before its boundary


class SlotLife:
    """One engine, of one thread. ``wrong``: what compute read that was not what it should be."""

    def __init__(self, seed: int, order: Callable[[torch.device, LazyCuda], CopyOrder] = CudaOrder) -> None:
        self.rng = random.Random(seed)
        self.cuda = LazyCuda(self.rng)
        self.wrong: list[str] = []
        self.l1 = L1Pool(SPEC, pages=SLOTS, state_slots=SLOTS)
        l2 = L2Pool(SPEC, (24, 12))
        copies = EnqueuedCopies(PoolCopies(self.l1, l2), self.cuda)

        def executor(*pools: Any, **settings: Any) -> Executor:
            return Executor(*pools, **{**settings, "copies": copies}, order=order(DEVICE, self.cuda))

        with patch("hicache.replica.Executor", executor):
            self.cache = SlotCache(SPEC, l1=self.l1, l2=l2, l3=None)
        self._stream = self.cuda.Stream(None)
        self.free = [list(range(SLOTS)) for _ in LAYERS]  # the last ones to be given back are the first to be taken
        self.trunks = [[self.rng.randrange(4) for _ in range(16)] for _ in range(3)]
        self.loading: list[tuple[SlotRequest, list[int], SlotLoad, dict[Part, int]]] = []

    @property
    def stats(self) -> DirectoryStats:
        return self.cache.stats

    def step(self) -> None:
        """A request begins or goes on, in a stream that other threads do not have by themselves."""
        with self.cuda.stream(self._stream):
            self._step()

    def _step(self) -> None:
        if len(self.loading) < 2:
            self._begin()
        else:
            self.cuda.run_until(lambda: any(load.done for _, _, load, _ in self.loading))
        for request in [each for each in self.loading if each[2].done]:
            self.loading.remove(request)
            self._go_on(*request)
        self.cuda.run_some(self.rng.randrange(12))

    def end(self) -> None:
        for request, *_ in self.loading:
            self.cache.release(request)
        self.cuda.run_until(lambda: self.cache.flush(timeout_s=0.0))
        self.cuda.run_all()
        self.cache.close()

    def _begin(self) -> None:
        trunk = self.rng.choice(self.trunks)
        tokens = [
            *trunk[: self.rng.randrange(4, 17)],
            *(self.rng.randrange(4) for _ in range(self.rng.randrange(1, 4))),
        ]
        pages = len(tokens) // PAGE
        hashes = [bytes(tokens[: (page + 1) * PAGE]) for page in range(pages)]
        request = self.cache.open(hashes, token_count=len(tokens))
        restored = self.cache.usable(request, beyond=0)
        targets = self._take(_parts(0, restored // PAGE))
        if not targets:
            self._serve(request, tokens, {})
        else:
            load = self.cache.load(request, beyond=0, tokens=restored, slots=_by_group(targets))
            self.loading.append((request, tokens, load, targets))

    def _go_on(self, request: SlotRequest, tokens: list[int], load: SlotLoad, targets: dict[Part, int]) -> None:
        if load.failed:
            self.wrong.append("a load failed")
        self._serve(request, tokens, targets)

    def _serve(self, request: SlotRequest, tokens: list[int], restored: dict[Part, int]) -> None:
        """A step computes all that is left, and saves it; all slots are free at once."""
        pages = len(tokens) // PAGE
        first = 1 + max((page for _, page in restored), default=-1)
        new = self._take(_parts(first, pages)) or {}  # without room it only reads
        step = self.cache.step(_by_slot(new))
        executor = self.cache._replica.executor
        assert executor is not None
        self.cuda.run_until(lambda: executor.wait_done(step.after, timeout_s=0.0))
        self.cuda.launch(partial(self._forward, tokens, dict(restored), dict(new)))
        self.cache.save(request, _by_group({**restored, **new}))
        if self.rng.random() < 0.5:  # another step, which computes what is in no full page yet
            self.cache.step({})
            self.cuda.launch(partial(self._forward, tokens, {**restored, **new}, {}))
        self.cache.release(request)
        self._give_back(restored)
        self._give_back(new)

    def _forward(self, tokens: list[int], restored: dict[Part, int], new: dict[Part, int]) -> None:
        for (group, page), slot in restored.items():
            for place, layer in enumerate(LAYERS[group]):
                if not torch.equal(self._memory(group, place, slot), self._expected(tokens, group, page, layer)):
                    self.wrong.append(f"page {page} in layer {layer}")
        for (group, page), slot in new.items():
            for place, layer in enumerate(LAYERS[group]):
                self._memory(group, place, slot).copy_(self._expected(tokens, group, page, layer))

    def _memory(self, group: int, place: int, slot: int) -> torch.Tensor:
        return self.l1.paged[group][place, slot] if group == ATTENTION else self.l1.state[group]["s"][place, slot]

    def _expected(self, tokens: list[int], group: int, page: int, layer: int) -> torch.Tensor:
        return value(tokens[: (page + 1) * PAGE], layer).expand_as(self._memory(group, 0, 0))

    def _take(self, parts: Sequence[Part]) -> dict[Part, int] | None:
        taken: dict[Part, int] = {}
        for group, page in parts:
            if not self.free[group]:
                self._give_back(taken)
                return None
            taken[group, page] = self.free[group].pop()
        return taken

    def _give_back(self, parts: dict[Part, int]) -> None:
        for (group, _), slot in parts.items():
            self.free[group].append(slot)


def _parts(first: int, stop: int) -> list[Part]:
    """What a step computes from one page boundary to another."""
    return [*((ATTENTION, page) for page in range(first, stop)), *([(STATE, stop - 1)] if stop > first else [])]


def _by_group(parts: dict[Part, int]) -> dict[int, dict[int, int]]:
    return {group: {page: slot for (of, page), slot in parts.items() if of == group} for group in range(len(LAYERS))}


def _by_slot(parts: dict[Part, int]) -> dict[int, list[int]]:
    return {group: [*by_page.values()] for group, by_page in _by_group(parts).items()}
