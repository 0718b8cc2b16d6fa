"""How long steps compute, and what of that is told to the read policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hicache.connectors.step_times import EventClock, HostClock, Part, PrefillTimes, slower
from hicache.costs.measured import MeasuredCosts, tell_prefill


class FakeEvent:
    """An event of a device that computes as far as it is told to."""

    def __init__(self, device: FakeCuda) -> None:
        self.device = device

    def record(self, stream: object) -> None:
        self.at_ms = self.device.asked_ms

    def query(self) -> bool:
        return self.at_ms <= self.device.done_ms

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


class FakeCuda:
    def __init__(self) -> None:
        self.asked_ms = self.done_ms = 0.0

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # as torch names it
        assert enable_timing
        return FakeEvent(self)

    def current_stream(self, device: torch.device) -> object:
        return device


class Told:
    def __init__(self, *, stages: int = 1) -> None:
        self.told: list[tuple[list[Part], float]] = []
        self.times = PrefillTimes(self.tell, stages=stages)

    def tell(self, parts: Sequence[Part], seconds: float) -> None:
        tell_prefill(MeasuredCosts(), parts, seconds)
        self.told.append((list(parts), seconds))


def test_a_device_is_asked_and_never_waited_for() -> None:
    cuda = FakeCuda()
    clock = EventClock(torch.device("cuda"), cuda)
    for step in (1, 2):
        clock.begin(step)
        cuda.asked_ms += 10 * step
        clock.end()
    assert clock.take() == {}
    cuda.done_ms = 10
    assert clock.take() == {1: 0.01}
    cuda.done_ms = 30
    assert clock.take() == {2: 0.02}
    assert clock.take() == {}


def test_a_device_that_ends_nothing_takes_no_more_and_more_memory() -> None:
    cuda = FakeCuda()
    clock = EventClock(torch.device("cuda"), cuda)
    for step in range(1000):
        clock.begin(step)
        cuda.asked_ms += 1
        clock.end()
    cuda.done_ms = cuda.asked_ms
    assert len(clock.take()) == 64


def test_an_end_without_a_beginning_is_no_time() -> None:
    now_s = iter([1.0, 3.5])
    clock = HostClock(lambda: next(now_s))
    clock.end()
    clock.begin(7)
    clock.end()
    clock.end()
    assert clock.take() == {7: 2.5}


def test_a_step_is_told_with_all_that_it_has_computed() -> None:
    told = Told()
    assert told.times.planned(1, [(0, 100), (300, 301), (40, 80)])
    told.times.computed({(1, 0): 0.5})
    told.times.computed({(1, 0): 0.7})
    assert told.told == [([(0, 100), (300, 301), (40, 80)], 0.5)]


@pytest.mark.parametrize("parts", [[], [(9, 9)], [(10, 11), (20, 21)], [(0, 4), *[(n, n + 1) for n in range(4)]]])
def test_steps_that_mostly_decode_are_not_timed(parts: list[Part]) -> None:
    told = Told()
    assert not told.times.planned(1, parts)
    told.times.computed({(1, 0): 0.5})
    assert not told.told


def test_a_prompt_has_been_computed_when_all_stages_have() -> None:
    told = Told(stages=2)
    told.times.planned(1, [(0, 100)])
    told.times.computed({(1, 1): 0.25})
    assert not told.told
    told.times.computed({(1, 0): 0.5})
    assert told.told == [([(0, 100)], 0.75)]


def test_of_two_workers_of_a_stage_the_slower_one_counts() -> None:
    assert slower({(1, 0): 0.5, (2, 0): 0.1}, {(1, 0): 0.75, (1, 1): 0.2}) == {(1, 0): 0.75, (2, 0): 0.1, (1, 1): 0.2}


def test_steps_that_nobody_tells_of_are_forgotten_and_no_time_is_none() -> None:
    told = Told()
    for step in range(1000):
        told.times.planned(step, [(0, 100)])
    told.times.computed({(0, 0): 1.0, (999, 0): 0.0, (998, 0): 1.0})
    assert len(told.told) == 1


def test_prompts_that_are_computed_together_teach_what_one_alone_does() -> None:
    def second(parts: Sequence[Part]) -> float:
        return 0.01 + sum(1e-4 * (end - start) + 1e-8 * (end**2 - start**2) for start, end in parts)

    costs = MeasuredCosts()
    for size in (500, 1000, 2000, 4000):
        for parts in ([(0, size), (size, 2 * size)], [(0, size), (5 * size, 6 * size)], [(0, size)]):
            costs.computed_together(parts, second(parts))
    assert costs.prefill_s(1000, 3000) == pytest.approx(second([(1000, 3000)]) - 0.01, rel=0.02)
