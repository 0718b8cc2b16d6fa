"""The hit rate that no cache can exceed: how much of what was asked for had been asked for before."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

PRECISION = 14  # 2**14 registers of a byte: standard error 1.04 / 2**7 = 0.8%
RANK_MAX = 33  # of 32 bits of the hash: good for 2**46 distinct keys
SLICES = 12
SLICE_S = 300.0
BATCH_KEYS = 512  # an array costs 5 us before its first key: a few keys of one request alone would cost it 9


class DistinctKeys:
    """About how many different keys there were: HyperLogLog (Flajolet et al. 2007), read by Ertl's estimator (2017),
    which needs no table of corrections. 16 KiB, whatever comes. Not thread-safe."""

    def __init__(self, seed: int) -> None:
        """``seed``: nobody who does not know it can choose keys that all look alike."""
        self._seed = seed
        self._registers: NDArray[np.uint8] = np.zeros(1 << PRECISION, dtype=np.uint8)

    def add(self, keys: Iterable[bytes]) -> None:
        """Keys, again or for the first time."""
        digest, seed = xxhash.xxh3_64_intdigest, self._seed
        hashes = np.fromiter((digest(key, seed) for key in keys), dtype=np.uint64)
        places = (hashes >> np.uint64(64 - PRECISION)).astype(np.intp)
        bits = (hashes & np.uint64(0xFFFFFFFF)).astype(np.float64)  # exact, so that its exponent is its bit length
        np.maximum.at(self._registers, places, (RANK_MAX - np.frexp(bits)[1]).astype(np.uint8))

    def merge(self, other: DistinctKeys) -> None:
        """As if all keys of ``other``, which has the same seed, had been added here."""
        np.maximum(self._registers, other._registers, out=self._registers)

    def estimate(self) -> float:
        """How many."""
        size = 1 << PRECISION
        counts = np.bincount(self._registers, minlength=RANK_MAX + 1).tolist()
        z = size * _tau(1.0 - counts[RANK_MAX] / size)
        for count in counts[RANK_MAX - 1 : 0 : -1]:
            z = 0.5 * (z + count)
        z += size * _sigma(counts[0] / size)
        return size * size / (2.0 * math.log(2.0) * z)


def _sigma(x: float) -> float:
    if x == 1.0:
        return math.inf
    z, y, before = x, 1.0, -1.0
    while z != before:
        before = z
        x *= x
        z += x * y
        y += y
    return z


def _tau(x: float) -> float:
    if x in (0.0, 1.0):
        return 0.0
    z, y, before = 1.0 - x, 1.0, -1.0
    while z != before:
        before = z
        x = math.sqrt(x)
        y *= 0.5
        z -= (1.0 - x) ** 2 * y
    return z / 3.0


@dataclass(frozen=True, slots=True)
class CeilingReading:
    """The last hour. ``new``: about how many different keys were asked for and not there: a cache that forgets nothing
    would have missed them, too, once each; ``found <= asked - new <= asked``."""

    asked: int = 0
    found: int = 0
    new: int = 0

    @property
    def hit_rate(self) -> float | None:
        """The share of what was asked for that was there; None when nothing was asked for."""
        return self.found / self.asked if self.asked else None

    @property
    def ceiling(self) -> float | None:
        """The same of a cache that forgets nothing."""
        return (self.asked - self.new) / self.asked if self.asked else None


@dataclass(slots=True)
class _Slice:
    began_at_s: float
    distinct: DistinctKeys
    asked: int = 0
    missed: int = 0
    waiting: list[bytes] = field(default_factory=list)  # missed, and not yet in ``distinct``

    def take_in(self) -> None:
        self.distinct.add(self.waiting)
        self.waiting.clear()


@dataclass(slots=True)
class Ceiling:
    """Counts over a window of SLICES that move on by SLICE_S. Thread-safe; 196 KiB, and the last BATCH_KEYS keys.

    Only misses are counted as keys, so that a hit costs nothing, and in batches. A key that was there, was evicted and
    is asked for again within the window counts as new once: the ceiling is never above the true one, nor below the hit
    rate.
    """

    clock: Callable[[], float] = time.monotonic
    _seed: int = field(default_factory=lambda: secrets.randbits(64))
    _slices: deque[_Slice] = field(default_factory=lambda: deque(maxlen=SLICES))
    _ends_at_s: float = -math.inf  # that of the last slice
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, asked: int, missed: Sequence[bytes]) -> None:
        """So many keys were asked for, and these of them were not there."""
        with self._lock:
            current = self._current()
            current.asked += asked
            if missed:
                current.missed += len(missed)
                current.waiting += missed
                if len(current.waiting) >= BATCH_KEYS:
                    current.take_in()

    def read(self) -> CeilingReading:
        """The last hour, the slice included that is not over."""
        with self._lock:
            self._current().take_in()
            distinct = DistinctKeys(self._seed)
            for part in self._slices:
                distinct.merge(part.distinct)
            asked = sum(part.asked for part in self._slices)
            missed = sum(part.missed for part in self._slices)
        return CeilingReading(asked, asked - missed, min(missed, round(distinct.estimate())))

    def _current(self) -> _Slice:
        now_s = self.clock()
        if now_s >= self._ends_at_s:
            self._go_on(now_s)
        return self._slices[-1]

    def _go_on(self, now_s: float) -> None:
        """A slice has ended, and perhaps others before it."""
        if self._slices:
            self._slices[-1].take_in()
        while self._slices and now_s - self._slices[0].began_at_s >= SLICES * SLICE_S:
            self._slices.popleft()
        began_at_s = math.floor(now_s / SLICE_S) * SLICE_S
        self._slices.append(_Slice(began_at_s, DistinctKeys(self._seed)))
        self._ends_at_s = began_at_s + SLICE_S
