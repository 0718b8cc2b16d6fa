"""The estimate of the hit-rate ceiling: how exact it is, what it costs, and that it is never below the hit rate."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.ceiling import BATCH_KEYS, PRECISION, SLICE_S, SLICES, Ceiling, CeilingReading, DistinctKeys
from hicache.histogram import LATENCY_S, Histogram

ERROR = 1.04 / 2 ** (PRECISION / 2)  # standard error


def keys(start: int, stop: int) -> list[bytes]:
    return [number.to_bytes(36, "little") for number in range(start, stop)]


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 20_000, 50_000, 200_000])
def test_the_estimate_is_as_exact_as_the_theory_says(count: int) -> None:
    estimates = []
    for seed in range(4):
        distinct = DistinctKeys(seed)
        distinct.add(keys(0, count))
        distinct.add(keys(0, count // 2))  # again: nothing new
        estimates.append(distinct.estimate())
    assert abs(np.mean(estimates) - count) <= 4 * ERROR / 2 * count + 0.5
    assert all(abs(estimate - count) <= 4 * ERROR * count + 0.5 for estimate in estimates)


def test_merging_is_as_if_all_had_been_added_to_one() -> None:
    one, other, both = DistinctKeys(1), DistinctKeys(1), DistinctKeys(1)
    one.add(keys(0, 3000))
    other.add(keys(2000, 5000))
    both.add(keys(0, 5000))
    one.merge(other)
    assert one.estimate() == both.estimate()


def test_it_takes_16_kib_whatever_comes() -> None:
    distinct = DistinctKeys(1)
    distinct.add(keys(0, 100_000))
    assert distinct._registers.nbytes == 16 * 1024


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 40))
def test_beside_a_cache_that_forgets_the_ceiling_lies_between_the_hit_rate_and_the_truth(seed: int, steps: int) -> None:
    """A cache of a few keys, evicting at random; the truth is a cache that never evicts."""
    rng = Random(seed)
    ceiling = Ceiling(clock=Clock())
    cache: list[bytes] = []
    seen: set[bytes] = set()
    asked = found = new = 0
    for _ in range(steps):
        batch = [b"%d" % rng.randrange(60) for _ in range(rng.randrange(1, 20))]
        missed = [key for key in batch if key not in cache]
        ceiling.note(len(batch), missed)
        asked, found = asked + len(batch), found + len(batch) - len(missed)
        new += len(set(batch) - seen)
        seen |= set(batch)
        cache = (cache + missed)[-30:]
    reading = ceiling.read()
    assert (reading.asked, reading.found) == (asked, found)
    assert reading.ceiling is not None
    assert reading.hit_rate is not None
    assert reading.hit_rate <= reading.ceiling <= 1.0
    # Every key was absent at first. Of so few, some may share a register: three in one of some thousand lives.
    assert abs(reading.new - new) <= 4 + 4 * ERROR * new


def test_the_window_forgets_what_is_older_than_an_hour() -> None:
    clock = Clock()
    ceiling = Ceiling(clock=clock)
    assert ceiling.read() == CeilingReading()
    assert (ceiling.read().hit_rate, ceiling.read().ceiling) == (None, None)
    ceiling.note(100, keys(0, 100))
    clock.now_s += (SLICES - 1) * SLICE_S
    ceiling.note(100, keys(0, 10))
    assert ceiling.read().asked == 200
    assert 98 <= ceiling.read().new <= 102, "the ten are no new ones"
    clock.now_s += SLICE_S
    assert (ceiling.read().asked, ceiling.read().found) == (100, 90)
    clock.now_s += 2 * SLICES * SLICE_S
    assert ceiling.read() == CeilingReading()
    assert len(ceiling._slices) <= SLICES


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 2 * BATCH_KEYS), max_size=4), moves=st.lists(st.integers(0, 4), max_size=3))
def test_keys_in_batches_count_as_if_each_had_been_counted_at_once(sizes: list[int], moves: list[int]) -> None:
    clock = Clock()
    batched, at_once = Ceiling(clock=clock), Ceiling(clock=clock)
    at_once._seed = batched._seed
    first = 0
    for number, size in enumerate(sizes):
        missed = keys(first, first + size)
        first += size // 2
        batched.note(size + 3, missed)
        at_once.note(3, [])
        for key in missed:
            at_once.note(1, [key])
            at_once._current().take_in()
        assert sum(len(part.waiting) for part in batched._slices) < BATCH_KEYS
        if number in moves:
            clock.now_s += SLICE_S
    assert batched.read() == at_once.read()
    assert not any(part.waiting for part in batched._slices)


@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=50), share=st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    exact = sorted(values)[max(0, min(len(values) - 1, int(np.ceil(share * len(values))) - 1))]
    estimate = histogram.quantile(share)
    assert estimate is not None
    bounds = [0.0, *LATENCY_S]
    low, high = next(((low, high) for low, high in pairwise(bounds) if exact <= high), (bounds[-1], bounds[-1]))
    assert low <= estimate <= high
    assert histogram.cumulative()[-1] == ("+Inf", len(values))
    assert sum(values) == pytest.approx(histogram.sum)


def test_a_histogram_since_another_has_what_came_between() -> None:
    histogram = Histogram()
    histogram.observe(0.003)
    before = histogram.copy()
    histogram.observe(2.0, count=3)
    between = histogram.since(before)
    assert (between.count, between.sum) == (3, 6.0)
    assert before.count == 1
    assert Histogram().quantile(0.5) is None
