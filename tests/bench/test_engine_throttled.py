"""bench.engine --engine tiny: the throttle, and how it is judged whether reading is slower than computing."""

from __future__ import annotations

import pytest

from bench.engine_throttled import LEARNING_REQUESTS, ThrottledL3, Workload, _row
from bench.tiny_engine import Generated
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from tests.core.memory_l3 import MemoryL3

WORKLOAD = Workload([[0]], stored_tokens=100, stored_bytes=1000)


class Memory:
    """As much of an L2 as a store that has nothing touches."""

    buffer = memoryview(bytearray(8))


def served(ttft_s: list[float], *, loaded: int = 0) -> list[Generated]:
    return [Generated((1,), ttft, ttft, 140, {"l3": loaded}, 0, 0, None) for ttft in ttft_s]


def judged(own_s: float, *, noise_s: float = 0.0) -> bool:
    """Whether ``own_s`` is slower than computing in 1 s, where the two that compute differ by up to ``noise_s``."""
    count = LEARNING_REQUESTS + 10
    again = [1.0 + noise_s * (-1) ** number for number in range(count)]
    times = {"latency": served([own_s] * count), "never": served([1.0] * count), "never again": served(again)}
    return _row("latency", times, WORKLOAD, 1e6).is_slower


def test_slower_is_what_is_above_the_noise_of_two_that_do_the_same() -> None:
    assert judged(1.1)
    assert not judged(1.02)
    assert not judged(1.1, noise_s=0.2)
    assert judged(2.0, noise_s=0.2)


def test_the_first_requests_are_told_apart() -> None:
    own = [5.0] * LEARNING_REQUESTS + [0.5] * 10
    count = len(own)
    times = {"latency": served(own, loaded=100), "never": served([1.0] * count), "never again": served([1.0] * count)}
    row = _row("latency", times, WORKLOAD, None)
    assert (row.of_recompute, row.learning_of_recompute, row.loaded_share) == (0.5, 5.0, 1.0)
    assert row.mb_per_s is None


@pytest.mark.parametrize("is_throttled", [False, True])
def test_gets_take_the_time_of_their_bytes_and_end_when_the_store_is_closed(is_throttled: bool) -> None:
    l3 = ThrottledL3(MemoryL3(Memory()), 1e-3 if is_throttled else None)  # type: ignore[arg-type]
    if is_throttled:
        l3._is_closed.set()  # as a close in the meantime does: nobody waits for the eight thousand seconds
    outcomes: list[Outcome] = []
    l3.get([L3Item(b"key", 0, 8)], timeout_s=10.0, done=outcomes.extend)
    assert outcomes == [Outcome.CANCELLED if is_throttled else Outcome.ABSENT]
    l3.close()
