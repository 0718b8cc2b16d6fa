"""What policies themselves take: the time of every call into them, without what the clock takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.admission.replay import TierSpec, replay
from bench.admission.traces import Trace

REQUESTS = 2000  # of a trace that are measured
_EVICTION = ("add", "remove", "pop", "first", "used", "expired")
_WRITE = ("touch", "admits")


@dataclass(slots=True)
class Meter:
    """Calls and their time."""

    calls: int = 0
    seconds: float = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, counted."""
        clock = time.thread_time  # not what other processes take meanwhile

        def counted(*arguments: Any) -> Any:
            start_s = clock()
            try:
                return call(*arguments)
            finally:
                self.seconds += clock() - start_s
                self.calls += 1

        return counted


class Metered:
    """Another policy whose calls are counted."""

    def __init__(self, policy: Any, names: tuple[str, ...], meter: Meter) -> None:
        self._policy = policy
        for name in names:
            setattr(self, name, meter.timed(getattr(policy, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def policy_cost(trace: Trace, spec: TierSpec) -> dict[str, float]:
    """Microseconds of one call, and of all calls for a request, over the first ``REQUESTS`` of a trace."""
    eviction, write = spec.policies()
    meter = Meter()
    metered = replace(
        spec,
        eviction=lambda items: Metered(eviction(items), _EVICTION, meter),
        write=lambda: Metered(write, _WRITE, meter),
    )
    part = replace(trace, requests=trace.requests[:REQUESTS])
    replay(part, [metered])
    overhead_s = _overhead_s()
    seconds = max(0.0, meter.seconds - meter.calls * overhead_s)
    return {
        "us_per_call": 1e6 * seconds / max(1, meter.calls),
        "us_per_request": 1e6 * seconds / len(part.requests),
        "calls_per_request": meter.calls / len(part.requests),
    }


@functools.cache
def _overhead_s() -> float:
    """What a call that does nothing seems to take, when nobody disturbs it."""
    return min(_idle_call_s() for _ in range(50))


def _idle_call_s() -> float:
    meter = Meter()
    nothing = meter.timed(lambda item: None)
    for _ in range(500):
        nothing(None)
    return meter.seconds / meter.calls
