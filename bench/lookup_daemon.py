"""What lookups, small objects, memory and a restart cost in a real hicached, by how many objects it holds."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from bench.daemon_process import TOKEN, BenchError, DaemonProcess
from bench.lookup_index import IndexRow
from bench.small_objects_daemon import OBJECT_BYTES, STORED_BYTES
from bench.store_client import SPEC, BenchMemory
from hicache.client import DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome

LOOKUP_KEYS = 2000
TRANSFER_KEYS = 100
FILL_KEYS = 4096
TIMEOUT_S = 60.0
_DISK_BYTES_PER_OBJECT = 2 * STORED_BYTES  # generous: the map has room to move and an index
_MEMORY_BYTES_PER_OBJECT = STORED_BYTES + 1024  # page cache and index


@dataclass(frozen=True, slots=True)
class CountRow:
    """Costs with so many resident objects: medians, in microseconds a key of a batch."""

    objects: int
    lookup_us: float
    get_us: float
    put_us: float
    lookup_p99_ms: float  # of a whole call of LOOKUP_KEYS keys
    null_call_us: float  # a lookup of one key: what any call costs
    heap_bytes_per_object: float


@dataclass(frozen=True, slots=True)
class RestartRow:
    """Seconds from the start of the process until clients are served; ``empty_s`` is that of an empty store."""

    objects: int
    ready_s: float
    empty_s: float


def counts_up_to(objects_max: int) -> list[int]:
    """10^4, 10^5, ... and the largest itself."""
    counts = [10**power for power in range(4, 12) if 10**power < objects_max]
    return [*counts, objects_max]


def why_not(objects: int, folder: Path) -> str | None:
    """What the machine lacks for so many objects; None when nothing."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < objects * _DISK_BYTES_PER_OBJECT:
        return (
            f"{objects} objects want {objects * _DISK_BYTES_PER_OBJECT >> 20} MiB of disk, there are {free_bytes >> 20}"
        )
    available_bytes = _available_memory_bytes()
    if available_bytes < objects * _MEMORY_BYTES_PER_OBJECT:
        wanted = objects * _MEMORY_BYTES_PER_OBJECT >> 20
        return f"{objects} objects want {wanted} MiB of memory, there are {available_bytes >> 20}"
    return None


def _available_memory_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


class CountBench:
    """One daemon that is filled further and further. Close it."""

    def __init__(self, folder: Path, *, objects_max: int, repetitions: int) -> None:
        self._repetitions = repetitions
        capacity_bytes = (objects_max + objects_max // 5 + 20_000) * STORED_BYTES * 10 // 9  # below the high watermark
        self._daemon = DaemonProcess(
            folder, backend="lmdb", capacity_bytes=capacity_bytes, module="bench.small_objects_daemon"
        )
        self._empty_s = self._daemon.start()
        self._empty_bytes = self._daemon.heap_bytes()
        self._memory = BenchMemory(FILL_KEYS * OBJECT_BYTES, is_shared=True)
        self._l3 = self._connect()
        self._count = 0
        self._random = random.Random(7)

    def _connect(self) -> DaemonL3:
        l3 = DaemonL3(self._daemon.address("memory"), spec=SPEC, memory=self._memory, token=TOKEN)
        if not l3.wait_ready(timeout_s=10):
            raise BenchError(f"no session: {l3.status().reason}")
        return l3

    def measure(self, objects: int) -> CountRow:
        """Fill up to so many objects and measure with them."""
        while self._count < objects:
            self._put(self._new_keys(min(FILL_KEYS, objects - self._count)))
        heap_bytes = (self._daemon.heap_bytes() - self._empty_bytes) / objects
        lookups = self._times(lambda: self._some_keys(LOOKUP_KEYS), self._lookup)
        nulls = self._times(lambda: self._some_keys(1), self._lookup)
        gets = self._times(lambda: self._some_keys(TRANSFER_KEYS), self._get)
        puts = self._times(lambda: self._new_keys(TRANSFER_KEYS), self._put)
        return CountRow(
            objects,
            lookup_us=round(statistics.median(lookups) / LOOKUP_KEYS * 1e6, 3),
            get_us=round(statistics.median(gets) / TRANSFER_KEYS * 1e6, 3),
            put_us=round(statistics.median(puts) / TRANSFER_KEYS * 1e6, 3),
            lookup_p99_ms=round(max(lookups) * 1e3, 3),
            null_call_us=round(statistics.median(nulls) * 1e6, 1),
            heap_bytes_per_object=round(heap_bytes, 1),
        )

    def restart(self) -> RestartRow:
        """Stop the daemon and start it on what it holds."""
        self._l3.close()
        self._daemon.stop()
        ready_s = self._daemon.start()
        self._l3 = self._connect()
        self._lookup(self._some_keys(LOOKUP_KEYS))  # raises unless all are still there
        return RestartRow(self._count, round(ready_s, 3), round(self._empty_s, 3))

    def close(self) -> None:
        """End the daemon."""
        self._l3.close()
        self._memory.close()
        self._daemon.kill()

    def _times(self, make: Callable[[], list[bytes]], work: Callable[[list[bytes]], None]) -> list[float]:
        times: list[float] = []
        for _ in range(self._repetitions):
            keys = make()
            start_s = time.perf_counter()
            work(keys)
            times.append(time.perf_counter() - start_s)
        return times

    def _new_keys(self, count: int) -> list[bytes]:
        self._count += count
        return [object_key(number) for number in range(self._count - count, self._count)]

    def _some_keys(self, count: int) -> list[bytes]:
        return [object_key(self._random.randrange(self._count)) for _ in range(count)]

    def _lookup(self, keys: list[bytes]) -> None:
        _require(self._l3.lookup(keys, timeout_s=TIMEOUT_S))

    def _put(self, keys: list[bytes]) -> None:
        self._l3.put(_items(keys), timeout_s=TIMEOUT_S, done=_require)

    def _get(self, keys: list[bytes]) -> None:
        self._l3.get(_items(keys), timeout_s=TIMEOUT_S, done=_require)


def object_key(number: int) -> bytes:
    """As long, and as evenly spread, as a real one."""
    return blake2b(number.to_bytes(8, "little"), digest_size=36).digest()


def growth(rows: Sequence[CountRow] | Sequence[IndexRow]) -> dict[str, float]:
    """How much more a key costs with the most objects than with the fewest."""
    if not rows:
        return {}
    first, last = rows[0], rows[-1]
    return {
        name: round(getattr(last, name) / getattr(first, name), 2)
        for name in ("lookup_us", "absent_us", "lease_us", "get_us", "put_us", "add_us", "victim_us")
        if getattr(first, name, 0)
    }


def _items(keys: list[bytes]) -> list[L3Item]:
    return [L3Item(key, place * OBJECT_BYTES, OBJECT_BYTES) for place, key in enumerate(keys)]


def _require(outcomes: list[Outcome]) -> None:
    wrong = {outcome.name for outcome in outcomes if outcome is not Outcome.OK}
    if wrong:
        raise BenchError(f"an object that must be there, or be stored, was {', '.join(sorted(wrong))}")
