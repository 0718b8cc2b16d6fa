"""Token buckets and the rates of a tenant, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.daemon.rates import TenantRates, TokenBucket
from hicache.daemon.refusals import Refusal


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_second_may_come_at_once_and_then_the_rate_holds() -> None:
    clock = Clock()
    rates = TenantRates(calls_per_s_max=4.0, clock=clock)
    for _ in range(4):
        rates.admit_call()
    with pytest.raises(Refusal, match=r"^RATE_LIMITED: retry in 250 ms; calls_per_s_max is 4 "):
        rates.admit_call()
    clock.now_s += 0.25
    rates.admit_call()
    with pytest.raises(Refusal):
        rates.admit_call()
    clock.now_s += 3600.0
    for _ in range(4):
        rates.admit_call()
    with pytest.raises(Refusal):
        rates.admit_call()
    assert rates.refusals == {"calls": 3}


def test_less_than_one_call_a_second_is_a_rate_too() -> None:
    clock = Clock()
    rates = TenantRates(calls_per_s_max=0.1, clock=clock)
    rates.admit_call()
    clock.now_s += 9.0
    with pytest.raises(Refusal, match="retry in 1000 ms"):
        rates.admit_call()
    clock.now_s += 1.0
    rates.admit_call()


def test_a_batch_larger_than_a_second_passes_when_it_was_quiet_and_is_paid_off() -> None:
    clock = Clock()
    rates = TenantRates(bytes_per_s_max=1000, clock=clock)
    rates.admit_bytes(5000)
    for pause_s in (0.0, 4.0):
        clock.now_s += pause_s
        with pytest.raises(Refusal, match="bytes_per_s_max is 1000"):
            rates.admit_bytes(1)
    clock.now_s += 0.5
    rates.admit_bytes(500)
    assert rates.refusals == {"bytes": 2}


def test_what_did_not_move_is_given_back() -> None:
    rates = TenantRates(bytes_per_s_max=1000, clock=Clock())
    rates.admit_bytes(1000)
    rates.give_back_bytes(400)
    rates.admit_bytes(400)
    with pytest.raises(Refusal):
        rates.admit_bytes(1)


def test_no_rate_is_no_limit() -> None:
    rates = TenantRates(clock=Clock())
    for _ in range(1000):
        rates.admit_call()
        rates.admit_bytes(1 << 40)
    assert not rates.refusals


def test_a_clock_that_goes_back_gives_and_takes_nothing() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, clock=clock)
    bucket.take(2.0)
    clock.now_s -= 50.0
    assert bucket.wait_s(1.0) == 0.5
    clock.now_s += 0.5
    assert bucket.wait_s(1.0) == 0.0


@given(
    rate=st.floats(0.5, 1000),
    calls=st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 5000)), min_size=1, max_size=60),
)
def test_over_any_time_no_more_passes_than_the_rate_and_one_burst(
    rate: float, calls: list[tuple[float, float]]
) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, clock=clock)
    passed = largest = 0.0
    for pause_s, cost in calls:
        clock.now_s += pause_s
        if bucket.wait_s(cost) == 0.0:
            bucket.take(cost)
            passed += cost
            largest = max(largest, cost)
    burst = max(1.0, rate, largest)
    assert passed <= rate * (clock.now_s - 100.0) + burst + max(1.0, rate) + 1e-6
