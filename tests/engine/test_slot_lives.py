"""Loads beside compute, and saves, keep their place between steps on a device that is as late as it may be."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hicache.copy_order import CopyOrder, CudaOrder
from hicache.slot_directory import SlotDirectory, Step
from tests.engine.layer_lives import PAGE, LayerLife, lived
from tests.engine.lazy_cuda import LazyCuda
from tests.engine.slot_lives import SlotLife

LOADS, STEPS_MAX = 150, 1500


def live(seed: int, order: Callable[[torch.device, LazyCuda], CopyOrder] = CudaOrder) -> SlotLife:
    return lived(SlotLife(seed, order), loads=LOADS, steps_max=STEPS_MAX)


@pytest.mark.parametrize("seed", range(6))
def test_br_002_no_step_reads_what_has_not_been_loaded_and_no_save_what_is_not_computed(seed: int) -> None:
    life = live(seed)
    assert not life.wrong
    assert life.cache.stats.objects["load.ok"] > LOADS


class LoadsBeforeTheLastReader(CudaOrder):
    """Such as a step that still reads a slot that its request has given back."""

    def run_after(self, mark: Any, copy: Callable[[], None], *, loads: bool = False) -> None:
        super().run_after([] if loads else mark, copy, loads=loads)


class SavesBeforeTheStep(CudaOrder):
    def run_after(self, mark: Any, copy: Callable[[], None], *, loads: bool = False) -> None:
        super().run_after(mark if loads else [], copy, loads=loads)


class DoneWhenEnqueued(CudaOrder):
    def run_after(self, mark: Any, copy: Callable[[], None], *, loads: bool = False) -> None:
        stream = self._load_stream if loads else self._backup_stream
        for event in mark:
            stream.wait_event(event)
        with self._cuda.stream(stream):
            copy()


@pytest.mark.parametrize(
    "order", [LoadsBeforeTheLastReader, SavesBeforeTheStep, DoneWhenEnqueued], ids=lambda order: order.__name__
)
def test_lives_find_an_order_that_is_wrong(order: Callable[[torch.device, LazyCuda], CopyOrder]) -> None:
    assert any(live(seed, order).wrong for seed in range(20))


def test_lives_find_a_step_that_does_not_wait_for_the_saves_of_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotDirectory, "step", lambda directory, reuses=None: Step(directory._jobs.number(), ()))
    assert any(live(seed).wrong for seed in range(20))


def test_br_002_a_load_that_has_waited_for_a_save_still_follows_the_last_reader() -> None:
    """It is asked for in a thread of copies, which computes nothing."""
    life = SlotLife(0)
    cache, cuda, slot = life.cache, life.cuda, life.l1.paged[0][0, 0]
    model = cuda.Stream(None)
    read: list[int] = []
    with cuda.stream(model):
        request = cache.open([b"page 0"], token_count=PAGE + 1)
        cuda.launch(lambda: slot.fill_(1))
        cache.save(request, {0: {0: 0}, 1: {0: 0}})
        cuda.run_until(lambda: cache.flush(timeout_s=0.0))
        other = cache.open([b"another"], token_count=PAGE + 1)
        cuda.launch(lambda: slot.fill_(2))
        cache.save(other, {0: {0: 0}, 1: {0: 1}})
        hold = cuda.Event()
        hold.point.is_reached = False
        model.wait_event(hold)
        cuda.launch(lambda: read.append(int(slot.max())))
        load = cache.load(request, beyond=0, tokens=PAGE, slots={0: {0: 0}, 1: {0: 2}})
    executor = cache._replica.executor
    assert executor is not None
    order: Any = executor._order
    cuda.run_until(lambda: load.done or (bool(order._load_stream.queue) and not cuda.step()))
    assert not load.done, "it has overtaken compute"
    hold.point.is_reached = True
    cuda.run_until(lambda: load.done)
    assert not load.failed
    assert (read, int(slot.max())) == ([2], 1)
    life.end()


def test_copies_that_follow_from_others_are_ordered_against_the_stream_of_the_last_load() -> None:
    """Such as pages that L3 has lost, which go down again when it answers."""
    life = LayerLife(0)
    model = life.cuda.Stream(None)
    request = life.cache.match([0, 1, 2])
    with life.cuda.stream(model):
        life.cache.load(request)
    executor = life.cache._replica.executor
    assert executor is not None
    life.cuda.run_all()
    with ThreadPoolExecutor(1) as another:
        another.submit(executor._order.mark).result()
    assert model.queue, "nothing of it is waited for"
    life.cache.release(request)
    life.end()
