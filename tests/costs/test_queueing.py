"""Queueing: what can be calculated by hand, what is conserved, and what is refused."""

from __future__ import annotations

import random

import pytest

from bench.admission.queueing import Arrival, Overlap, Queueing, Reads, WaitS, run_queueing
from hicache.costs.machine import Tier
from hicache.costs.model import ModelCosts, Prefill
from hicache.errors import ConfigError

COSTS = ModelCosts(
    Prefill(token_s=0.01, pair_s=0.0), {"L3": Tier(bytes_per_s=100.0, latency_s=0.5, shared=True)}, token_bytes=1
)
NOTHING = Reads()


def reads(loaded: int) -> Reads:
    return Reads(0, (("L3", loaded),))


@pytest.mark.parametrize(
    ("overlap", "ttft_s"),
    [("serial", 2.0), ("ahead", 2.0), ("layerwise", 1.5 + 0.5 / 10), ("split", 1.25)],
)
def test_one_request_takes_what_its_overlap_says(overlap: Overlap, ttft_s: float) -> None:
    """100 tokens loaded in 1.5 s, 50 computed in 0.5 s; split, computing 75 meets loading 25 after 0.75 s."""
    result = run_queueing(
        [Arrival(0.0, 150)], lambda number, now_s, wait_s: reads(100), COSTS, Queueing(overlap=overlap, layers=10)
    )
    assert result.ttft_s[0] == pytest.approx(ttft_s, abs=0.01)


def test_prefills_come_one_after_another_and_decode_goes_on_when_there_is_none() -> None:
    how = Queueing(decode_token_s=0.1)
    result = run_queueing(
        [Arrival(0.0, 100, 11), Arrival(0.5, 100, 11)], lambda number, now_s, wait_s: NOTHING, COSTS, how
    )
    assert list(result.ttft_s) == pytest.approx([1.0, 1.5])
    assert list(result.total_s) == pytest.approx([3.0, 2.5]), (
        "the first one's decode waits for the second one's prefill"
    )


def test_two_groups_prefill_at_a_time_and_a_tier_serves_one_after_another() -> None:
    both = [Arrival(0.0, 110)] * 2
    result = run_queueing(both, lambda number, now_s, wait_s: reads(100), COSTS, Queueing(gpu_groups=2))
    assert list(result.ttft_s) == pytest.approx([1.6, 2.6])
    assert result.tier_busy_s == {"L3": pytest.approx(2.0)}


def test_writes_are_in_the_way_of_reads() -> None:
    plan = [Reads(writes=(("L3", 400),)), reads(100)]
    result = run_queueing(
        [Arrival(0.0, 100), Arrival(1.0, 100)], lambda number, now_s, wait_s: plan[number], COSTS, Queueing()
    )
    assert result.ttft_s[1] == pytest.approx(4 + 1.5)


@pytest.mark.parametrize("overlap", ["serial", "ahead", "layerwise", "split"])
@pytest.mark.parametrize("sessions", [None, 3])
def test_every_request_ends_and_the_gpu_is_busy_for_no_longer_than_the_run(
    overlap: Overlap, sessions: int | None
) -> None:
    rng = random.Random(1)
    arrivals = [Arrival(rng.uniform(0, 60), rng.randrange(100, 300), 20) for _ in range(200)]
    asked: list[float] = []

    def decide(number: int, now_s: float, wait_s: WaitS) -> Reads:
        asked.append(now_s)
        return Reads(20, (("L3", number % 60),) if number % 2 else ())

    how = Queueing(overlap=overlap, sessions=sessions, gpu_groups=2, decode_token_s=0.01)
    result = run_queueing(arrivals, decide, COSTS, how)
    assert asked == sorted(asked), "asked in the order of time"
    assert len(asked) == 200
    assert all(0 < first <= total for first, total in zip(result.ttft_s, result.total_s, strict=True))
    assert result.gpu_busy_s <= 2 * result.span_s
    assert result.tier_busy_s["L3"] <= result.span_s
    assert result.to_dict()["requests"] == 200


def test_a_speed_up_makes_them_wait_longer() -> None:
    arrivals = [Arrival(float(number), 90) for number in range(50)]
    slow, fast = (
        run_queueing(arrivals, lambda number, now_s, wait_s: NOTHING, COSTS, Queueing(speedup=speedup))
        for speedup in (1, 2)
    )
    assert max(slow.ttft_s) == pytest.approx(0.9)
    assert max(fast.ttft_s) > 10


@pytest.mark.parametrize(
    "wrong", [{"overlap": "ideal"}, {"gpu_groups": 0}, {"sessions": 0}, {"speedup": 0.0}, {"decode_token_s": -1.0}]
)
def test_what_cannot_be_is_refused_with_its_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Queueing(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="arrivals"):
        run_queueing([], lambda number, now_s, wait_s: NOTHING, COSTS, Queueing())
