"""The circuit breaker, against the rules in its docstrings."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache.breaker import BreakerLimits, BreakerState, CircuitBreaker, Permit
from hicache.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


LIMITS = BreakerLimits(consecutive_failures_max=3, window_calls=10, open_s=1.0, open_growth=2.0, open_s_max=5.0)


def broken(clock: Clock, limits: BreakerLimits = LIMITS) -> CircuitBreaker:
    breaker = CircuitBreaker(limits, clock=clock)
    for _ in range(limits.consecutive_failures_max):
        fail_once(breaker)
    assert breaker.state is BreakerState.OPEN
    return breaker


def state_of(breaker: CircuitBreaker) -> BreakerState:
    """The state, read anew each time: a type checker would take two reads of an attribute for one value."""
    return breaker.state


def fail_once(breaker: CircuitBreaker) -> None:
    permit = breaker.acquire()
    assert permit is not None
    breaker.fail(permit)


def succeed_once(breaker: CircuitBreaker) -> None:
    permit = breaker.acquire()
    assert permit is not None
    breaker.succeed(permit)


def test_it_opens_after_so_many_failures_in_a_row_and_not_before() -> None:
    breaker = CircuitBreaker(LIMITS, clock=Clock())
    fail_once(breaker)
    fail_once(breaker)
    succeed_once(breaker)
    fail_once(breaker)
    fail_once(breaker)
    assert state_of(breaker) is BreakerState.CLOSED
    fail_once(breaker)
    assert state_of(breaker) is BreakerState.OPEN
    assert breaker.acquire() is None


def test_it_opens_when_half_of_the_last_calls_failed_though_never_many_in_a_row() -> None:
    breaker = CircuitBreaker(LIMITS, clock=Clock())
    for _ in range(4):
        fail_once(breaker)
        succeed_once(breaker)
    succeed_once(breaker)
    assert state_of(breaker) is BreakerState.CLOSED
    fail_once(breaker)
    assert state_of(breaker) is BreakerState.OPEN


def test_after_the_interval_one_probe_is_admitted_and_nobody_else() -> None:
    clock = Clock()
    breaker = broken(clock)
    clock.now_s += 0.99
    assert breaker.acquire() is None
    clock.now_s += 0.01
    probe = breaker.acquire()
    assert probe is not None
    assert probe.is_probe
    assert breaker.acquire() is None
    breaker.succeed(probe)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.acquire() is not None


def test_the_interval_grows_with_each_failed_probe_up_to_its_cap() -> None:
    clock = Clock()
    breaker = broken(clock)
    intervals = []
    for _ in range(5):
        intervals.append(breaker.status().retry_in_s)
        clock.now_s += intervals[-1]
        fail_once(breaker)
    assert intervals == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_peer_that_fails_again_right_after_a_good_probe_is_asked_ever_more_rarely() -> None:
    clock = Clock()
    breaker = broken(clock)
    clock.now_s += 1.0
    succeed_once(breaker)
    for _ in range(3):
        fail_once(breaker)
    assert breaker.status().retry_in_s == 2.0


def test_the_interval_is_short_again_after_a_window_of_successes() -> None:
    clock = Clock()
    breaker = broken(clock)
    clock.now_s += 1.0
    for _ in range(1 + LIMITS.window_calls):
        succeed_once(breaker)
    for _ in range(3):
        fail_once(breaker)
    assert breaker.status().retry_in_s == 1.0


def test_an_answer_to_a_call_from_before_it_opened_changes_nothing() -> None:
    clock = Clock()
    breaker = CircuitBreaker(LIMITS, clock=clock)
    old = breaker.acquire()
    assert old is not None
    for _ in range(3):
        fail_once(breaker)
    breaker.succeed(old)
    assert state_of(breaker) is BreakerState.OPEN
    clock.now_s += 1.0
    probe = breaker.acquire()
    assert probe is not None
    breaker.fail(old)
    assert state_of(breaker) is BreakerState.HALF_OPEN


def test_an_abandoned_probe_lets_the_next_call_probe() -> None:
    clock = Clock()
    breaker = broken(clock)
    clock.now_s += 1.0
    probe = breaker.acquire()
    assert probe is not None
    breaker.abandon(probe)
    assert breaker.acquire() is not None


def test_news_of_the_peer_admit_a_probe_at_once() -> None:
    breaker = broken(Clock())
    assert breaker.acquire() is None
    breaker.retry_now()
    probe = breaker.acquire()
    assert probe is not None
    assert probe.is_probe


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("consecutive_failures_max", 0),
        ("window_calls", 0),
        ("failure_ratio", 0.0),
        ("failure_ratio", 1.5),
        ("open_s", 0.0),
        ("open_s_max", 0.1),
        ("open_growth", 0.5),
    ],
)
def test_limits_that_make_no_sense_name_the_setting(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match="breaker"):
        BreakerLimits(**{setting: value})  # type: ignore[arg-type]  # a table of settings of both kinds


class BreakerMachine(RuleBasedStateMachine):
    """Any order of calls, answers old and new, and time: the promises hold after every step."""

    @initialize(
        failures=st.integers(1, 4),
        window=st.integers(1, 8),
        ratio=st.sampled_from([0.25, 0.5, 1.0]),
        growth=st.sampled_from([1.0, 2.0]),
    )
    def make(self, failures: int, window: int, ratio: float, growth: float) -> None:
        self.clock = Clock()
        self.limits = BreakerLimits(
            consecutive_failures_max=failures,
            window_calls=window,
            failure_ratio=ratio,
            open_growth=growth,
            open_s=1.0,
            open_s_max=4.0,
        )
        self.breaker = CircuitBreaker(self.limits, clock=self.clock)
        self.running: list[Permit] = []
        self.answered = 0
        self.rejected = 0

    @rule()
    def call(self) -> None:
        before = self.breaker.status()
        permit = self.breaker.acquire()
        if permit is None:
            self.rejected += 1
            assert before.state is not BreakerState.CLOSED
            return
        assert before.state is not BreakerState.OPEN or before.retry_in_s == 0
        assert permit.is_probe == (before.state is not BreakerState.CLOSED)
        self.running.append(permit)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), answer=st.sampled_from(["succeed", "fail", "abandon"]))
    def end(self, data: st.DataObject, answer: str) -> None:
        permit = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        before = self.breaker.state
        getattr(self.breaker, answer)(permit)
        self.answered += answer != "abandon"
        if before is BreakerState.OPEN:
            assert self.breaker.state is BreakerState.OPEN
        if answer == "abandon":
            assert self.breaker.state is before

    @rule(seconds=st.sampled_from([0.125, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def hear_news(self) -> None:
        self.breaker.retry_now()

    @rule()
    def find_it_open_for_a_bounded_time(self) -> None:
        if self.breaker.state is BreakerState.OPEN:
            self.clock.now_s += self.limits.open_s_max
            permit = self.breaker.acquire()
            assert permit is not None
            assert permit.is_probe
            self.running.append(permit)

    @invariant()
    def only_one_probe_of_this_era_runs(self) -> None:
        status = self.breaker.status()
        assert 0 <= status.retry_in_s <= self.limits.open_s_max
        assert status.successes + status.failures == self.answered
        assert status.rejected == self.rejected
        newest = max((permit.era for permit in self.running if permit.is_probe), default=None)
        assert sum(permit.is_probe and permit.era == newest for permit in self.running) <= 1

    @invariant()
    def enough_failures_in_a_row_are_never_overlooked(self) -> None:
        status = self.breaker.status()
        if status.state is BreakerState.CLOSED:
            assert status.consecutive_failures < self.limits.consecutive_failures_max


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
