"""Loads beside compute, and saves, keep their place between steps on a device that is as late as it may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache.copy_order import CopyOrder, CudaOrder
from hicache.slot_directory import SlotDirectory, Step
from tests.engine.lazy_cuda import LazyCuda
from tests.engine.slot_lives import SlotLife

LOADS, STEPS_MAX = 150, 1500


def live(seed: int, order: Callable[[torch.device, LazyCuda], CopyOrder] = CudaOrder) -> SlotLife:
    """Until something has been loaded so often, or something wrong has been read."""
    life = SlotLife(seed, order)
    for _ in range(STEPS_MAX):
        life.step()
        if life.wrong or life.cache.stats.objects["load.ok"] > LOADS:
            break
    life.end()
    return life


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
