"""Which objects are in the memory of this process: a bounded number of bytes, the hot ones, and no torn one ever."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from hicache.backends.arena import Arena, Extent

OBJECT_SHARE_MAX = 4  # an object above the capacity divided by this is never taken in: it would turn out too many
EVICTIONS_MAX = 64  # for one object; when that makes no room in one piece it is not taken in
USES_MAX = 1 << 16  # keys whose first use is remembered


@dataclass(slots=True, eq=False)
class Resident:
    """One object in memory. Whoever was given it may read ``view`` until giving it back, whatever happens meanwhile."""

    key: bytes
    size_bytes: int
    extent: Extent
    checksum: int = 0
    holders: int = 1
    is_gone: bool = False  # nobody is given it any more; its memory is free when the last holder gives it back

    @property
    def view(self) -> memoryview:
        """Its bytes."""
        return self.extent.views[0]


@dataclass(slots=True)
class RamStats:
    """What the tier did so far; ``objects`` and ``used_bytes`` as they are now."""

    capacity_bytes: int
    used_bytes: int = 0  # whole pages, with what is being filled and what is gone but still read
    objects: int = 0
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    admitted: int = 0
    evicted: int = 0
    corrupt: int = 0


@dataclass(slots=True)
class _Uses:
    """Keys that were used once, as far back as their objects would fit into memory: an object that is used again later
    than that would not have been there any more, however it had been taken in. A scan leaves nothing but these."""

    bytes_max: int
    sizes: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    total_bytes: int = 0

    def take(self, key: bytes) -> bool:
        size_bytes = self.sizes.pop(key, None)
        self.total_bytes -= size_bytes or 0
        return size_bytes is not None

    def add(self, key: bytes, size_bytes: int) -> None:
        self.take(key)
        self.sizes[key] = size_bytes
        self.total_bytes += size_bytes
        while self.total_bytes > self.bytes_max or len(self.sizes) > USES_MAX:
            self.total_bytes -= self.sizes.popitem(last=False)[1]


class RamResidents:
    """Least recently used first out; taken in at the second use. Thread-safe, never blocks, copies nothing itself."""

    def __init__(self, capacity_bytes: int) -> None:
        self._lock = threading.Lock()  # everything below
        self._arena = Arena(capacity_bytes)
        self._residents: OrderedDict[bytes, Resident] = OrderedDict()  # the least recently used first
        self._filling: dict[bytes, Resident] = {}
        self._uses = _Uses(bytes_max=self._arena.size_bytes)
        self._stats = RamStats(capacity_bytes=self._arena.size_bytes)
        self._is_closed = False

    def acquire(self, key: bytes, size_bytes: int) -> Resident | None:
        """The object, to be given back; None: not here, or of another size, and a miss. Counts as a use."""
        with self._lock:
            resident = self._residents.get(key)
            if resident is None or resident.size_bytes != size_bytes:
                self._stats.misses += 1
                return None
            self._residents.move_to_end(key)
            resident.holders += 1
            return resident

    def note(self, key: bytes, size_bytes: int) -> None:
        """An object that is not here was used."""
        with self._lock:
            self._uses.add(key, size_bytes)

    def reserve(self, key: bytes, size_bytes: int) -> Resident | None:
        """Memory to fill, then to ``publish`` or ``abandon``, for an object that was used before. None: leave it out.

        Only one thread at a time fills an object. A first use is remembered.
        """
        with self._lock:
            is_of_fitting_size = 1 <= size_bytes <= self._arena.size_bytes // OBJECT_SHARE_MAX
            if self._is_closed or not is_of_fitting_size or key in self._filling:
                return None
            if not self._uses.take(key):
                self._uses.add(key, size_bytes)
                return None
            extent = self._make_room(size_bytes)
            if extent is None:
                return None
            self._filling[key] = Resident(key, size_bytes, extent)
            return self._filling[key]

    def publish(self, resident: Resident, checksum: int) -> None:
        """It is whole: give it to others, unless it was dropped meanwhile. Gives it back."""
        with self._lock:
            resident.checksum = checksum
            self._filling.pop(resident.key)
            if not resident.is_gone:
                self._drop(resident.key)
                self._residents[resident.key] = resident
                self._stats.admitted += 1
            self._release(resident)

    def abandon(self, resident: Resident) -> None:
        """It could not be filled. Gives it back."""
        with self._lock:
            self._filling.pop(resident.key)
            resident.is_gone = True
            self._release(resident)

    def release(self, resident: Resident, *, was_read: bool) -> None:
        """Give back what ``acquire`` gave; a hit when it was read."""
        with self._lock:
            if was_read:
                self._stats.hits += 1
                self._stats.hit_bytes += resident.size_bytes
            self._release(resident)

    def drop(self, key: bytes, *, is_corrupt: bool = False) -> None:
        """It is not to be given to anybody any more; what is being filled will not be, either."""
        with self._lock:
            self._drop(key)
            self._uses.take(key)
            if key in self._filling:
                self._filling[key].is_gone = True
            self._stats.corrupt += is_corrupt

    def stats(self) -> RamStats:
        """The numbers as they are now."""
        with self._lock:
            now = self._stats
            now.objects = len(self._residents)
            now.used_bytes = self._arena.size_bytes - self._arena.free_bytes
            return RamStats(**{name: getattr(now, name) for name in RamStats.__slots__})

    def close(self) -> None:
        """Forget everything, and take nothing in any more. Idempotent."""
        with self._lock:
            self._is_closed = True
            for key in list(self._residents):
                self._drop(key)
            for resident in self._filling.values():
                resident.is_gone = True

    def _make_room(self, size_bytes: int) -> Extent | None:
        for _ in range(EVICTIONS_MAX + 1):
            extent = self._arena.acquire([size_bytes], timeout_s=0)
            if extent is not None:
                return extent
            victim = next((resident for resident in self._residents.values() if resident.holders == 0), None)
            if victim is None:
                return None
            self._drop(victim.key)
            self._stats.evicted += 1
        return None

    def _drop(self, key: bytes) -> None:
        resident = self._residents.pop(key, None)
        if resident is not None:
            resident.is_gone = True
            if resident.holders == 0:
                resident.extent.release()

    def _release(self, resident: Resident) -> None:
        resident.holders -= 1
        if resident.holders == 0 and resident.is_gone:
            resident.extent.release()
