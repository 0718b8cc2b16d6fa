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
from typing import Literal

from bench.daemon_process import TOKEN, BenchError, DaemonProcess
from bench.lookup_index import IndexRow
from bench.small_objects_daemon import MODULE, OBJECT_BYTES, STORED_BYTES
from bench.store_client import SPEC, BenchMemory
from hicache.client import DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome

LOOKUP_KEYS = 2000
TRANSFER_KEYS = 100
RECENT_KEYS = 100  # stored last, so that they are there after evictions
FILL_KEYS = 4096
TIMEOUT_S = 60.0
LEAVING_PART = 10  # of the objects, beside them: what a tenant has who is erased in the end
HIGH_WATERMARK = 0.95
CAPACITY_BYTES_MIN = 1 << 20  # of hicached
_DISK_BYTES_PER_OBJECT = {
    "lmdb": 3 * STORED_BYTES["lmdb"],
    "file": STORED_BYTES["file"] + 512,
}  # with index and folders
_MEMORY_BYTES_PER_OBJECT = 1024  # index and what must stay of the page cache


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

    ended_by: str  # what ended the process before
    objects: int
    ready_s: float
    empty_s: float


def counts_up_to(objects_max: int) -> list[int]:
    """10^4, 10^5, ... and the largest itself."""
    counts = [10**power for power in range(4, 12) if 10**power < objects_max]
    return [*counts, objects_max]


def why_not(objects: int, folder: Path, *, backend: str) -> str | None:
    """What the machine lacks for so many objects; None when nothing."""
    free_bytes, wanted_bytes = shutil.disk_usage(folder).free, objects * _DISK_BYTES_PER_OBJECT[backend]
    if free_bytes < wanted_bytes:
        return f"{objects} objects want {wanted_bytes >> 20} MiB of disk, there are {free_bytes >> 20}"
    available_bytes, wanted_bytes = _available_memory_bytes(), objects * _MEMORY_BYTES_PER_OBJECT
    if available_bytes < wanted_bytes:
        return f"{objects} objects want {wanted_bytes >> 20} MiB of memory, there are {available_bytes >> 20}"
    return None


def _available_memory_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


class CountBench:
    """One daemon that is filled further and further, until it is full up to its high watermark. Close it."""

    def __init__(self, folder: Path, *, backend: str, counts: Sequence[int], repetitions: int) -> None:
        self._repetitions = repetitions
        room = counts[-1] + counts[-1] // LEAVING_PART + len(counts) * repetitions * TRANSFER_KEYS
        self.daemon = DaemonProcess(
            folder,
            backend=backend,
            capacity_bytes=max(int(room * STORED_BYTES[backend] / HIGH_WATERMARK) + 1, CAPACITY_BYTES_MIN),
            module=MODULE,
            settings={"http": "127.0.0.1:0", "high-watermark": str(HIGH_WATERMARK)},
        )
        self._empty_s = self.daemon.start()
        self._empty_bytes = self.daemon.heap_bytes()
        self._memory = BenchMemory(FILL_KEYS * OBJECT_BYTES, is_shared=True)
        self._l3 = self.connect()
        self.count = 0  # of objects, the last of which are there if any is
        self._random = random.Random(7)

    def connect(self, token: str = TOKEN) -> DaemonL3:
        """A session of a tenant, over the memory of this benchmark. Close it."""
        l3 = DaemonL3(self.daemon.address("memory"), spec=SPEC, memory=self._memory, token=token)
        if not l3.wait_ready(timeout_s=10):
            raise BenchError(f"no session: {l3.status().reason}")
        return l3

    def measure(self, objects: int) -> CountRow:
        """Fill up to so many objects and measure with them."""
        self.put_new(objects - self.count)
        heap_bytes = (self.daemon.heap_bytes() - self._empty_bytes) / objects
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

    def put_new(self, count: int) -> float:
        """Store so many more; returns the seconds of the longest call."""
        self.count += count
        return self.put(range(self.count - count, self.count), self._l3)

    def put(self, numbers: range, l3: DaemonL3) -> float:
        """Store these in the session of a tenant; returns the seconds of the longest call."""
        longest_s = 0.0
        for first in range(0, len(numbers), FILL_KEYS):
            keys = [object_key(number) for number in numbers[first : first + FILL_KEYS]]
            start_s = time.perf_counter()
            l3.put(_items(keys), timeout_s=TIMEOUT_S, done=_require)
            longest_s = max(longest_s, time.perf_counter() - start_s)
        return longest_s

    def restart(self, ended_by: Literal["SIGTERM", "SIGKILL"]) -> RestartRow:
        """End the daemon and start it on what it holds."""
        self._l3.close()
        if ended_by == "SIGKILL":
            self.daemon.kill()
        else:
            self.daemon.stop()
        ready_s = self.daemon.start()
        self._l3 = self.connect()
        self._lookup([object_key(number) for number in range(self.count - RECENT_KEYS, self.count)])
        return RestartRow(ended_by, self.count, round(ready_s, 3), round(self._empty_s, 3))

    def close(self) -> None:
        """End the daemon."""
        self._l3.close()
        self._memory.close()
        self.daemon.kill()

    def _times(self, make: Callable[[], list[bytes]], work: Callable[[list[bytes]], None]) -> list[float]:
        times: list[float] = []
        for _ in range(self._repetitions):
            keys = make()
            start_s = time.perf_counter()
            work(keys)
            times.append(time.perf_counter() - start_s)
        return times

    def _new_keys(self, count: int) -> list[bytes]:
        self.count += count
        return [object_key(number) for number in range(self.count - count, self.count)]

    def _some_keys(self, count: int) -> list[bytes]:
        return [object_key(self._random.randrange(self.count)) for _ in range(count)]

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
