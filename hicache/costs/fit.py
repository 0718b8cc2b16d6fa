"""Fits seconds to what they were spent on, sample by sample, so that outliers and changes do no harm."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

SAMPLES_PER_SIZE = 8  # remembered of each power of two of the size: many small ones do not displace the few large
CHANGE_FACTOR = 2.0  # two samples in a row that miss by more, in one direction, say that everything has changed
OUTLIERS_MAD = 3.0  # median absolute deviations beyond which a sample is not believed
REACH = 4  # times the largest sample: further than that nothing is said

Row = tuple[float, ...]


class OnlineFit:
    """``seconds = sum(coefficients * row)`` with coefficients of at least 0, by least squares of relative errors.

    The first number of a row is its size. Fewer coefficients are preferred where they explain as much.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[Row, float]]] = {}  # by the power of two of the size
        self._missed: list[tuple[Row, float]] = []  # the last samples in a row that were far off, one way
        self._was_slower = False
        self._coefficients: NDArray[np.float64] | None = None

    def add(self, row: Row, seconds: float) -> None:
        """Something has taken so long. Nothing is learnt from sizes and times that are not above 0."""
        if not (seconds > 0 and row[0] > 0):
            return
        self._note_miss(row, seconds)
        if len(self._missed) == 2:
            self._samples.clear()
            for missed in self._missed:
                self._keep(*missed)
            self._missed.clear()
        else:
            self._keep(row, seconds)
        self._coefficients = None

    def at(self, row: Row) -> float | None:
        """How long it is going to take; None where no sample is as large as a quarter of it."""
        samples = [sample for of_size in self._samples.values() for sample in of_size]
        if not samples or row[0] > REACH * max(sample[0][0] for sample in samples):
            return None
        if self._coefficients is None:
            self._coefficients = _robust(samples)
        return float(self._coefficients @ np.asarray(row))

    def _note_miss(self, row: Row, seconds: float) -> None:
        expected = self.at(row)
        ratio = 1.0 if not expected else seconds / expected
        if 1 / CHANGE_FACTOR <= ratio <= CHANGE_FACTOR:
            self._missed.clear()
            return
        if self._missed and (ratio > 1) != self._was_slower:
            self._missed.clear()
        self._was_slower = ratio > 1
        self._missed.append((row, seconds))

    def _keep(self, row: Row, seconds: float) -> None:
        size = int(row[0]).bit_length()
        self._samples.setdefault(size, deque(maxlen=SAMPLES_PER_SIZE)).append((row, seconds))


def _robust(samples: Sequence[tuple[Row, float]]) -> NDArray[np.float64]:
    """Fit, leave out what is far off, and fit again."""
    rows = np.array([row for row, _ in samples])
    seconds = np.array([taken for _, taken in samples])
    relative = rows / seconds[:, None]
    # The start is where half of the samples agree, whatever the others say.
    rate = np.median(seconds / rows[:, 0])
    coefficients = _non_negative(relative) if len(samples) < 4 else _by_median(relative, rate)
    errors = np.abs(relative @ coefficients - 1)
    bound = max(OUTLIERS_MAD * float(np.median(errors)), 0.05)
    believed = errors <= bound
    return _non_negative(relative[believed]) if believed.sum() >= 2 else coefficients


def _by_median(relative: NDArray[np.float64], rate: float) -> NDArray[np.float64]:
    """Least absolute errors, by least squares with weights that are renewed a few times."""
    weights = np.ones(len(relative))
    coefficients = np.zeros(relative.shape[1])
    coefficients[0] = rate
    for _ in range(6):
        coefficients = _non_negative(relative, np.sqrt(weights))
        weights = 1 / np.maximum(np.abs(relative @ coefficients - 1), 1e-3)
    return coefficients


def _non_negative(relative: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """The coefficients of at least 0 that bring ``relative @ coefficients`` nearest to 1: of all subsets of columns."""
    if weights is None:
        weights = np.ones(len(relative))
    best, least = np.zeros(relative.shape[1]), np.inf
    for columns in _subsets(relative.shape[1]):
        chosen = relative[:, columns] * weights[:, None]
        scale = np.maximum(np.abs(chosen).max(axis=0), 1e-300)
        found = np.linalg.lstsq(chosen / scale, weights, rcond=1e-6)[0] / scale
        if (found < 0).any():
            continue
        error = float((((relative[:, columns] @ found - 1) * weights) ** 2).sum())
        if error < least * 0.98 - 1e-9:  # a coefficient more has to explain something
            best, least = np.zeros(relative.shape[1]), error
            best[list(columns)] = found
    return best


def _subsets(count: int) -> Iterator[list[int]]:
    for size in range(1, count + 1):
        yield from map(list, combinations(range(count), size))
