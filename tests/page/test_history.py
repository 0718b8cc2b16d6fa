"""The last hour of a daemon: sums, differences, quantiles, and the slowest objects, all without a clock."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.admin.status import SAMPLE_S, SAMPLES_MAX
from hicache.daemon.counts import Counts, Times
from hicache.daemon.history import History, Levels
from hicache.daemon.slowest import KEPT_PER_PERIOD, PERIOD_S, PERIODS_MAX, Slowest

INFINITE = float("inf")


def counts_at(step: int) -> Counts:
    """Of a daemon that finds 3 of 4 objects, and reads 100 bytes, in each interval."""
    return Counts(
        asked=4 * step,
        found=3 * step,
        read_bytes=100 * step,
        times={"get": Times((0.1, INFINITE), (step, 0))},
        errors=Counter({("get objects", "corrupt"): step // 2}),
    )


def fill(history: History, steps: int) -> None:
    for step in range(steps):
        history.add(now_s=SAMPLE_S * step, at_s=1000.0 + SAMPLE_S * step, counts=counts_at(step), levels=Levels())


def test_a_sample_is_what_lies_between_two_moments() -> None:
    history = History()
    fill(history, 3)
    assert [sample.at_s for sample in history.samples] == [1000.0 + SAMPLE_S, 1000.0 + 2 * SAMPLE_S]
    last = history.samples[-1]
    assert last.hit_rate == 0.75
    assert last.read_bytes_per_s == 100 / SAMPLE_S
    assert last.get_p50_s == pytest.approx(0.05)
    assert last.put_p50_s is None
    assert [sample.errors for sample in history.samples] == [0, 1]


def test_an_hour_is_kept_and_no_more() -> None:
    history = History()
    fill(history, SAMPLES_MAX + 50)
    assert len(history.samples) == SAMPLES_MAX
    last = SAMPLES_MAX + 49
    seconds, hour = history.window(SAMPLE_S * last, counts_at(last))
    assert seconds == SAMPLES_MAX * SAMPLE_S
    assert hour.asked == 4 * SAMPLES_MAX
    assert hour.errors.total() == SAMPLES_MAX // 2


def test_what_has_been_less_than_an_hour_is_the_time_since_the_start() -> None:
    history = History()
    assert history.window(5.0, counts_at(1)) == (0.0, counts_at(1).since(counts_at(1)))
    fill(history, 2)
    seconds, hour = history.window(SAMPLE_S + 5.0, counts_at(9))
    assert (seconds, hour.asked) == (SAMPLE_S + 5.0, 36)


def test_rates_of_the_last_seconds_never_reach_back_far_nor_divide_by_nearly_nothing() -> None:
    history = History()
    fill(history, 100)
    for after_s in (0.0, 0.1, 5.0, 9.9):
        seconds, _ = history.lately(99 * SAMPLE_S + after_s, counts_at(99))
        assert 3.0 <= seconds < 3.0 + SAMPLE_S


@given(counts=st.lists(st.integers(0, 50), min_size=4, max_size=4), share=st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_that_its_rank_falls_into(counts: list[int], share: float) -> None:
    bounds_s = (0.1, 0.2, 0.4, INFINITE)
    times = Times(bounds_s, tuple(counts))
    found = times.quantile_s(share)
    if not sum(counts):
        assert found is None
        return
    values = [index for index, count in enumerate(counts) for _ in range(count)]
    rank = share * len(values)
    bucket = values[min(len(values) - 1, max(0, -int(-rank // 1) - 1))]
    lower_s, upper_s = (0.0, *bounds_s)[bucket], min(bounds_s[bucket], 0.4)
    assert found is not None
    assert lower_s - 1e-9 <= found <= upper_s + 1e-9


class Clock:
    """Stands still until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_slowest_objects_are_kept_by_their_time_and_named_by_a_hash() -> None:
    slowest = Slowest(clock=Clock(), wall_clock=lambda: 77.0)
    for number in range(100):
        key = b"t" * 16 + b"secret-key-%03d" % number
        slowest.note("get", number % 50, lambda key=key: [(10, b"t" * 16 + b"small"), (20, key)])
    found = slowest.slowest(3)
    assert [move.seconds for move in found] == [49, 49, 48]
    assert all((move.size_bytes, move.objects, move.at_s, move.kind) == (20, 2, 77.0, "get") for move in found)
    assert len({move.short_key for move in found}) == 3
    assert "secret" not in "".join(move.short_key for move in found)


def test_what_is_not_slow_costs_no_look_at_its_objects() -> None:
    slowest = Slowest(clock=Clock())
    for _ in range(KEPT_PER_PERIOD):
        slowest.note("put", 2.0, lambda: [(1, b"t" * 17)])

    def never() -> list[tuple[int, bytes]]:
        raise AssertionError("this is not among the slowest")

    slowest.note("put", 1.0, never)


def test_after_an_hour_a_slow_object_is_forgotten() -> None:
    clock = Clock()
    slowest = Slowest(clock=clock)
    slowest.note("put", 100.0, lambda: [(1, b"t" * 17)])
    for _ in range(PERIODS_MAX - 1):
        clock.now_s += PERIOD_S
        slowest.note("put", 1.0, lambda: [(1, b"t" * 17)])
    assert slowest.slowest(1)[0].seconds == 100.0
    clock.now_s += PERIOD_S
    assert slowest.slowest(1)[0].seconds == 1.0
