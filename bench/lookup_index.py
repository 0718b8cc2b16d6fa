"""What the daemon's index costs by how many objects it has, without a daemon or a store around it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hicache.backends.key_rows import PackedKeys
from hicache.backends.residents import Residents
from hicache.tenancy import tenant_digest

LOOKUP_KEYS = 2000
OBJECT_KEY_BYTES = 36  # a 32-byte block key, group and shard
OBJECT_BYTES = 4000
LOADED_AT_ONCE = 1 << 16
_PREFIX = tenant_digest("bench")
_PAGE_BYTES = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IndexRow:
    """Medians: microseconds a key of a batch of LOOKUP_KEYS, or an object. ``longest_ms`` is the longest call."""

    objects: int
    lookup_us: float  # find 2,000 keys and count them as used
    absent_us: float
    lease_us: float  # hold and release them
    add_us: float
    victim_us: float  # to find and remove what was used least recently
    longest_ms: float
    load_us: float
    bytes_per_object: float  # resident memory


class _Clock:
    """Times calls, and remembers the longest."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def time(self, work: Callable[[], T]) -> tuple[float, T]:
        start_s = time.perf_counter()
        result = work()
        spent_s = time.perf_counter() - start_s
        self.longest_s = max(self.longest_s, spent_s)
        return spent_s, result


def measure_index(objects: int, *, repetitions: int) -> IndexRow:
    """An index of so many objects of one tenant, filled as at a start, looked up, added to and evicted from."""
    rng = np.random.default_rng(7)
    keys = rng.integers(0, 256, size=(objects, OBJECT_KEY_BYTES), dtype=np.uint8)
    empty_bytes = _resident_bytes()
    residents = Residents(stored_bytes=lambda size_bytes: size_bytes)
    load_s = _load(residents, keys)
    held_bytes = _resident_bytes() - empty_bytes
    now_s = time.time()
    clock = _Clock()

    def some(count: int) -> PackedKeys:
        return _packed(keys[rng.integers(0, objects, size=count)])

    lookups: list[float] = []
    absents: list[float] = []
    leases: list[float] = []
    adds: list[float] = []
    for _ in range(repetitions):
        known, unknown = some(LOOKUP_KEYS), _packed(rng.integers(0, 256, (LOOKUP_KEYS, OBJECT_KEY_BYTES), np.uint8))
        spent_s, slots = clock.time(lambda: residents.use(known, now_s=now_s))  # noqa: B023 (called at once)
        assert slots.all()
        lookups.append(spent_s / LOOKUP_KEYS)
        spent_s, found = clock.time(lambda: residents.find(unknown))  # noqa: B023
        assert not any(found)
        absents.append(spent_s / LOOKUP_KEYS)
        hold_s, held = clock.time(lambda: residents.hold(slots, bytes_max=2**62, tenant_bytes_max=2**62))  # noqa: B023
        release_s, _ = clock.time(lambda: residents.release(held))  # noqa: B023
        leases.append((hold_s + release_s) / LOOKUP_KEYS)
        for key in list(unknown)[:100]:
            adds.append(clock.time(lambda: residents.add(key, OBJECT_BYTES, now_s=now_s))[0])  # noqa: B023
    victims = [_evict(residents, clock, count=100) for _ in range(repetitions)]
    return IndexRow(
        objects,
        lookup_us=_median_us(lookups),
        absent_us=_median_us(absents),
        lease_us=_median_us(leases),
        add_us=_median_us(adds),
        victim_us=round(statistics.mean(victims) * 1e6, 3),
        longest_ms=round(clock.longest_s * 1e3, 3),
        load_us=round(load_s / objects * 1e6, 3),
        bytes_per_object=round(held_bytes / objects, 1),
    )


def _load(residents: Residents, keys: NDArray[np.uint8]) -> float:
    start_s = time.perf_counter()
    for start in range(0, len(keys), LOADED_AT_ONCE):
        some = _packed(keys[start : start + LOADED_AT_ONCE])
        residents.load(some, np.full(len(some), OBJECT_BYTES), start + np.arange(len(some), dtype=np.float64))
    return time.perf_counter() - start_s


def _packed(keys: NDArray[np.uint8]) -> PackedKeys:
    return PackedKeys(keys.tobytes(), OBJECT_KEY_BYTES, prefix=_PREFIX)


def _evict(residents: Residents, clock: _Clock, *, count: int) -> float:
    """Seconds for each of ``count`` victims, scans included."""
    total_s, left = 0.0, count
    while left > 0 and len(residents):
        spent_s, victims = clock.time(
            lambda: residents.take_victims(2**62, count_max=left, is_kept=lambda key: False, tenant=_PREFIX)  # noqa: B023
        )
        total_s += spent_s
        left -= len(victims or ())
    return total_s / count


def _median_us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 3)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
