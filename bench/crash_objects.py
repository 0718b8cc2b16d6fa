"""The objects of the crash harness: size and bytes follow from the key, so whoever reads one knows what is right."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]

SIZES_BYTES = (100, 5_000, 64 << 10, 70_001, 300_000, 1 << 20, 3 << 20, 8 << 20, 28 << 20)
SIZE_WEIGHTS = (4, 4, 6, 4, 6, 6, 3, 2, 1)
LARGEST_SHARE = 8  # no object has more than one part in so many of the capacity
STORED_UNIT_BYTES = 17 * 4096  # no backend rounds an object up to more than whole units, and a block
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Belief(Enum):
    """What a client knows of an object."""

    STORED = "stored"  # acknowledged: it is there, unless it was evicted
    UNKNOWN = "unknown"  # a call about it was not answered
    DELETED = "deleted"  # acknowledged: it is not there


@dataclass(slots=True)
class Record:
    """What one client did to one object. Times are those of the monotonic clock, which all processes share."""

    key: bytes
    size_bytes: int
    belief: Belief = Belief.UNKNOWN
    put_s: float = 0.0  # when the put that stored it, or may have, began
    used_s: float = 0.0  # when the last call about it ended; infinite when that was not answered
    leased_until_s: float = 0.0
    kept_until_s: float = 0.0  # a lease may have kept it from eviction until then, which counts as use
    found: str = ""  # the outcome of the last check

    @property
    def stored_bytes(self) -> int:
        """No backend takes more for it."""
        return -(-self.size_bytes // (STORED_UNIT_BYTES - 16)) * STORED_UNIT_BYTES + 2 * 4096


class ObjectMaker:
    """Keys, sizes and payloads, the same in every process."""

    def __init__(self, *, capacity_bytes: int) -> None:
        sizes = [size for size in SIZES_BYTES if size <= capacity_bytes // LARGEST_SHARE]
        self._sizes = [size for size, weight in zip(sizes, SIZE_WEIGHTS, strict=False) for _ in range(weight)]
        self.largest_bytes = max(sizes)
        self._counting = np.arange(-(-self.largest_bytes // 8), dtype=np.uint64)

    def key(self, client: int, number: int) -> bytes:
        """The key of object ``number`` of a client."""
        return client.to_bytes(4, "little") + number.to_bytes(32, "little")

    def size_bytes(self, key: bytes) -> int:
        """What follows from the key."""
        return self._sizes[xxhash.xxh3_64_intdigest(key, 1) % len(self._sizes)]

    def record(self, client: int, number: int) -> Record:
        """A record about an object that nobody has put yet."""
        key = self.key(client, number)
        return Record(key, self.size_bytes(key))

    def write(self, key: bytes, target: memoryview) -> None:
        """Fill ``target`` with the payload."""
        target[:] = self._words(key, target.nbytes).data.cast("B")[: target.nbytes]

    def is_payload(self, key: bytes, found: memoryview) -> bool:
        """Whether these are the bytes of the object, every one of them."""
        expected = self._words(key, found.nbytes).view(np.uint8)[: found.nbytes]
        return np.array_equal(np.frombuffer(found, np.uint8), expected)

    def _words(self, key: bytes, size_bytes: int) -> Words:
        """Each word depends on the key and on its position."""
        words = self._counting[: -(-size_bytes // 8)] + np.uint64(xxhash.xxh3_64_intdigest(key))
        words *= _ODD
        return words
