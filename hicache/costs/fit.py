"""Fits seconds to what they were spent on, sample by sample, so that outliers and changes do no harm."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

SAMPLES_PER_SIZE = 8  # remembered of each power of two of the size: many small ones do not displace the few large
CHANGE_FACTOR = 2.0  # two samples in a row that miss by more, in one direction, say that everything has changed
ROUNDS = 3
GOOD_ENOUGH = 0.05  # a sample that was foretold as well as this changes nothing
SINGULAR = 1e-9  # samples that are all alike do not tell columns apart
OUTLIERS_MAD = 3.0  # median absolute deviations beyond which a sample is not believed
REACH = 4  # times the largest sample: further than that nothing is known

Row = tuple[float, ...]


class OnlineFit:
    """``seconds = sum(coefficients * row)`` with coefficients of at least 0, by least squares of relative errors.

    The first number of a row is its size. Fewer coefficients are preferred where they explain as much.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[Row, float]]] = {}  # by the power of two of the size
        self._missed: list[tuple[Row, float]] = []  # the last samples in a row that were far off, one way
        self._was_slower = False
        self._coefficients: list[float] | None = None

    def add(self, row: Row, seconds: float) -> None:
        """Something has taken so long. Nothing is learnt from sizes and times that are not above 0."""
        if not (seconds > 0 and row[0] > 0):
            return
        expected = self.at(row) if self.reaches(row[0]) else None
        self._note_miss(row, seconds, expected)
        if len(self._missed) == 2:
            self._samples.clear()
            for missed in self._missed:
                self._keep(*missed)
            self._missed.clear()
        else:
            self._keep(row, seconds)
        if expected is None or abs(seconds / max(expected, 1e-300) - 1) > GOOD_ENOUGH:
            self._coefficients = None

    def at(self, row: Row) -> float | None:
        """How long it is going to take, however large it is; None without a sample."""
        if not self._samples:
            return None
        if self._coefficients is None:
            self._coefficients = robust_fit(
                [sample for of_size in self._samples.values() for sample in of_size]
            ).tolist()
        return math.fsum(map(operator.mul, self._coefficients, row))

    def reaches(self, size: float) -> bool:
        """Whether something was seen that is at least a quarter as large."""
        return any(size <= REACH * row[0] for of_size in self._samples.values() for row, _ in of_size)

    def _note_miss(self, row: Row, seconds: float, expected: float | None) -> None:
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


def robust_fit(samples: Sequence[tuple[Row, float]]) -> NDArray[np.float64]:
    """The coefficients of ``(row, seconds)``: where most samples agree, without what is far off that."""
    relative = np.array([row for row, _ in samples]) / np.array([[seconds] for _, seconds in samples])
    weights, errors = np.ones(len(relative)), np.zeros(len(relative))
    for _ in range(ROUNDS if len(samples) > 3 else 1):  # towards least absolute errors
        coefficients = _non_negative(relative, weights)
        errors = np.abs(relative @ coefficients - 1)
        weights = 1 / np.maximum(errors, 1e-2)
    believed = errors <= max(OUTLIERS_MAD * float(np.median(errors)), 0.05)
    return _non_negative(relative, believed.astype(float))


def _non_negative(relative: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The coefficients of at least 0 that bring ``relative @ coefficients`` nearest to 1: of all subsets of columns."""
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    scaled = relative / scale
    weighted = scaled * weights[:, None]
    products, targets, total = scaled.T @ weighted, weighted.sum(axis=0), float(weights.sum())
    best, least = np.zeros(len(scale)), np.inf
    for columns in _subsets(len(scale)):
        matrix = products[np.ix_(columns, columns)]
        if len(columns) > 1 and np.linalg.det(matrix) < SINGULAR * np.prod(np.diag(matrix)):
            continue
        found = np.linalg.solve(matrix, targets[columns])
        if (found < 0).any():
            continue
        error = total - float(found @ targets[columns])
        if error < least * 0.98 - 1e-9 * total:  # a coefficient more has to explain something
            best, least = np.zeros(len(scale)), error
            best[columns] = found
    coefficients: NDArray[np.float64] = best / scale
    return coefficients


def _subsets(count: int) -> list[list[int]]:
    return [list(columns) for size in range(1, count + 1) for columns in combinations(range(count), size)]
