"""What is learnt of loads and prefills: through noise, outliers and changes."""

from __future__ import annotations

import math
import random

import pytest

from hicache.costs.fit import OnlineFit
from hicache.costs.measured import MeasuredCosts, tell_prefill
from hicache.errors import UsageError


@pytest.mark.parametrize(("start", "end", "seconds"), [(5, 5, 1.0), (-1, 5, 1.0), (0, 5, 0.0), (0, 5, math.nan)])
def test_a_prefill_that_cannot_be_is_refused(start: int, end: int, seconds: float) -> None:
    with pytest.raises(UsageError):
        tell_prefill(MeasuredCosts(), [(start, end)], seconds)


# -- what is learnt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_latency_and_bandwidth_are_told_apart_through_noise_and_outliers(seed: int) -> None:
    rng, fit = random.Random(seed), OnlineFit()
    for number in range(60):
        size = float(rng.choice([1, 2, 4, 8, 16, 64]) * 10_000)
        seconds = (0.01 + size / 1e6) * rng.uniform(0.85, 1.15)
        fit.add((size, 1.0), seconds * (20 if number % 9 == 4 else 1))
    for size in (10_000, 100_000, 640_000):
        found = fit.at((size, 1.0))
        assert found is not None
        assert abs(found / (0.01 + size / 1e6) - 1) < 0.2


def test_depth_and_the_fixed_cost_of_prefill_are_told_apart() -> None:
    costs = MeasuredCosts()
    for start, end in [(0, 1000), (0, 4000), (2000, 2100), (3900, 4000), (0, 100), (1000, 3000), (0, 2000)]:
        costs.computed(start, end, 0.005 + (end - start) * 1e-5 + (end**2 - start**2) * 1e-9)
    saved = costs.prefill_s(0, 4000)
    assert saved is not None
    assert abs(saved / (0.04 + 0.016) - 1) < 0.1


def test_without_a_sample_nothing_is_known_and_it_is_known_how_far_samples_reach() -> None:
    fit = OnlineFit()
    assert fit.at((10.0, 1.0)) is None
    fit.add((10.0, 1.0), 1.0)
    assert fit.at((40.0, 1.0)) == pytest.approx(4.0)
    assert fit.reaches(40)
    assert not fit.reaches(41)


def test_loads_far_larger_than_any_are_not_known_and_such_prefills_are_doubted() -> None:
    costs = MeasuredCosts()
    costs.moved("L3", 1000, 1.0)
    costs.computed(0, 100, 1.0)
    assert costs.transfer_s("L3", 4000) == pytest.approx(4.0)
    assert costs.transfer_s("L3", 4001) is None
    assert costs.transfer_s("L2", 1) is None
    assert costs.prefill_s(0, 400) == pytest.approx(4.0)
    assert costs.prefill_s(0, 404) == pytest.approx(4.04 / 4)


def test_times_and_sizes_of_nothing_teach_nothing() -> None:
    fit = OnlineFit()
    for row, seconds in [((0.0, 1.0), 1.0), ((10.0, 1.0), 0.0), ((10.0, 1.0), math.nan)]:
        fit.add(row, seconds)
    assert fit.at((1.0, 1.0)) is None


def test_one_outlier_changes_little_and_a_second_one_everything() -> None:
    fit = OnlineFit()
    for _ in range(20):
        fit.add((1000.0, 1.0), 1.0)
    fit.add((1000.0, 1.0), 50.0)
    assert fit.at((1000.0, 1.0)) == pytest.approx(1.0, rel=0.1)
    fit.add((1000.0, 1.0), 50.0)
    assert fit.at((1000.0, 1.0)) == pytest.approx(50.0, rel=0.1)
