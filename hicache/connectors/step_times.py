"""How long an engine's steps compute: taken by each worker's device, and told to the read policy by the scheduler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import torch

from hicache.errors import UsageError

Part: TypeAlias = tuple[int, int]  # tokens [start, end) of one prompt
_STEPS_MAX = 64  # that have been given to the device, or to the workers, and not been heard of: the oldest is forgotten
_PREFILL_SHARE = 0.5  # of a step's tokens: where most of them are decoded, its time says little of prefills


class StepClock(Protocol):
    """Times what one thread has its device compute. Waits for nothing."""

    def begin(self, step: int) -> None:
        """From here on, in the order of compute."""
        ...

    def end(self) -> None:
        """Up to here. Does nothing without ``begin``."""
        ...

    def take(self) -> dict[int, float]:
        """Seconds of the steps that have been computed since the last call, by their numbers."""
        ...


class HostClock:
    """For a CPU, where compute is done when it returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun: tuple[int, float] | None = None
        self._done: dict[int, float] = {}

    def begin(self, step: int) -> None:
        """See StepClock."""
        self._begun = step, self._clock()

    def end(self) -> None:
        """See StepClock."""
        if self._begun is not None:
            step, begun_s = self._begun
            self._done[step] = self._clock() - begun_s
            self._begun = None

    def take(self) -> dict[int, float]:
        """See StepClock."""
        done, self._done = self._done, {}
        return done


class EventClock:
    """For CUDA: events of the stream that computes, asked when they have come to pass."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:  # Any: a module, or its double in tests
        self._device = device
        self._cuda = cuda
        self._begun: tuple[int, Any] | None = None
        self._ended: deque[tuple[int, Any, Any]] = deque(maxlen=_STEPS_MAX)

    def begin(self, step: int) -> None:
        """See StepClock."""
        self._begun = step, self._event()

    def end(self) -> None:
        """See StepClock."""
        if self._begun is not None:
            self._ended.append((*self._begun, self._event()))
            self._begun = None

    def take(self) -> dict[int, float]:
        """See StepClock."""
        done: dict[int, float] = {}
        while self._ended and self._ended[0][2].query():
            step, begun, ended = self._ended.popleft()
            done[step] = begun.elapsed_time(ended) / 1000
        return done

    def _event(self) -> Any:  # of torch.cuda
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event


def step_clock_for(device: torch.device) -> StepClock:
    """The clock that tells what compute on ``device`` takes."""
    return EventClock(device) if device.type == "cuda" else HostClock()


class PrefillTimes:
    """Brings what workers have timed together with what was computed in that step.

    A step's time is shared by all that it computes. Costs are sums over tokens and pairs of tokens, so such a step
    teaches as much as one for a single prompt, as long as it mostly prefills.
    """

    def __init__(self, tell: Callable[[Sequence[Part], float], None], *, stages: int = 1) -> None:
        """``stages`` of a pipeline: a prompt goes through them one after the other."""
        self._tell = tell
        self._stages = stages
        self._steps: dict[int, tuple[list[Part], dict[int, float]]] = {}  # what each computes, and its stages so far

    def planned(self, step: int, parts: Iterable[Part]) -> bool:
        """So much will be computed. Returns whether its time is worth taking."""
        found = [part for part in parts if part[0] < part[1]]
        tokens = sum(end - start for start, end in found)
        if sum(end - start for start, end in found if end - start > 1) <= tokens * _PREFILL_SHARE:
            return False
        self._steps[step] = found, {}
        if len(self._steps) > _STEPS_MAX:
            del self._steps[min(self._steps)]
        return True

    def computed(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """By step and stage. What nobody planned, or has forgotten since, tells nothing."""
        for (step, stage), stage_s in seconds.items():
            if step not in self._steps:
                continue
            parts, stages = self._steps[step]
            stages[stage] = max(stage_s, stages.get(stage, 0.0))
            if len(stages) == self._stages:
                del self._steps[step]
                with suppress(UsageError):  # of a clock that says that no time has passed
                    self._tell(parts, sum(stages.values()))


def slower(
    one: Mapping[tuple[int, int], float], other: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """What two workers tell: of one stage, the one that took longer counts."""
    return dict(one) | {key: max(seconds, one.get(key, 0.0)) for key, seconds in other.items()}
