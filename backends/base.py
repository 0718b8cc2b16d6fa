"""The contract that everything L3 can store into fulfils."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from hicache.outcome import Outcome

PHYSICAL_KEY_BYTES_MAX = 128
UNKNOWN_TAG = 0  # an object of a namespace that nobody named
WALK_OBJECTS_MAX = 1 << 10
SCAN_OBJECTS_MAX = 1 << 16


def is_storable_key(key: bytes) -> bool:
    """Whether ``key`` has a length that every backend takes."""
    return 1 <= len(key) <= PHYSICAL_KEY_BYTES_MAX


@dataclass(frozen=True, slots=True)
class PutItem:
    """One object to store. ``payload`` stays the caller's and must not change until ``put`` returns."""

    key: bytes
    payload: memoryview
    namespace_tag: int = UNKNOWN_TAG  # of the namespace that its key is from: see hicache/backends/namespaces.py


@dataclass(frozen=True, slots=True)
class GetItem:
    """One object to read into ``target``, which has exactly the size that the object must have."""

    key: bytes
    target: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class StoredBatch:
    """What ``scan`` tells of objects without reading their payloads, in columns of equal length: a start has millions.

    ``used_at_s`` is when each was last written or read, as far as the medium knows, in seconds since the epoch.
    """

    keys: list[bytes]
    sizes_bytes: NDArray[np.int64]
    used_at_s: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[tuple[bytes, int, float]]) -> Self:
        """From one (key, size_bytes, used_at_s) each."""
        keys, sizes_bytes, used_at_s = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(list(keys), np.array(sizes_bytes, dtype=np.int64), np.array(used_at_s, dtype=np.float64))


@dataclass(frozen=True, slots=True)
class WalkedObject:
    """What ``walk`` tells of one object. ``size_bytes`` is 0 where what the medium says of it is damaged."""

    key: bytes
    size_bytes: int
    used_at_s: float
    namespace_tag: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Space as it is on the medium. ``payload_bytes <= stored_bytes <= capacity_bytes``."""

    objects: int
    payload_bytes: int
    stored_bytes: int  # payloads with headers and rounding: what counts against the capacity
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Number:
    """One number that a backend tells about itself, named as a metric without ``_total``."""

    name: str
    description: str
    value: float
    is_counter: bool = False


class Backend(Protocol):
    """Stores checked objects of at least one byte under opaque keys of 1 to PHYSICAL_KEY_BYTES_MAX bytes.

    Any other key, and an empty payload (it would cost no capacity, so nothing would bound it), is REFUSED by ``put``
    and absent everywhere else.

    Thread-safe and blocking: callers use their own threads. Batches are the primitive; one bad item never spoils the
    others. No method raises for what can happen to one item: each gets an Outcome. BackendError means that the backend
    is broken as a whole.
    """

    name: str

    @property
    def store_id(self) -> bytes:
        """16 random bytes made with the store; a wiped store has another one."""
        ...

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """Store each object with its checksum, visible only when all of it is there.

        OK; EXISTS when the key is present already (nothing is copied, the first write wins, also within one batch);
        TOO_LARGE, NO_SPACE, IO_ERROR or REFUSED, after which the key is absent and its space given back.
        """
        ...

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Read each object into its target and verify the bytes there.

        OK; ABSENT; SIZE_MISMATCH; IO_ERROR; CORRUPT (also for an object that was stored under another key), after which
        the object has been dropped. A target whose outcome is not OK holds undefined bytes.
        """
        ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are present and complete."""
        ...

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """Drop objects and give their space back: OK, ABSENT or IO_ERROR. Works on a full medium."""
        ...

    def forget(self, gone: Sequence[tuple[bytes, int]]) -> None:
        """Objects that were stored, with these payload sizes, were ABSENT although nobody has deleted them here: give
        their space back. A program that cleans up has taken their files, for example.
        """
        ...

    def touch(self, used: Sequence[tuple[bytes, float]]) -> None:
        """Remember when objects were last used (seconds since the epoch), for the order that ``scan`` tells.

        Best effort: absent keys and failures are passed over. Costs a small write for each key, so callers batch it
        and keep it away from their hot path.
        """
        ...

    def scan(self) -> Iterator[StoredBatch]:
        """Every complete object, in no particular order, in batches of at most SCAN_OBJECTS_MAX.

        Partial ones have been removed when the backend was opened. Objects that come or go meanwhile may or may not be
        told.
        """
        ...

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """As ``scan``, with namespaces, in an order of the backend's own: only what comes behind the key ``after``, and
        only what the tenant with this digest has, where one is given, without reading what others have.

        The key of the last object that was told is where another walk goes on, also after a restart. Reads the medium,
        WALK_OBJECTS_MAX objects at a time. Raises BackendError where the medium cannot be read, or tells no order.
        """
        ...

    def usage(self) -> Usage:
        """Exact from the moment the backend is open. O(1)."""
        ...

    def numbers(self) -> Iterator[Number]:
        """What it tells beside what every backend does; never asks the medium, never blocks."""
        ...

    def problem(self) -> str:
        """What is wrong with the medium as a whole, for people; empty: nothing that can be told in a moment."""
        ...

    def stored_bytes(self, size_bytes: int) -> int:
        """What an object of ``size_bytes`` takes of the capacity."""
        ...

    def free_bytes(self) -> int | None:
        """What the file system has left to grow into; None when all space was taken when the backend was opened."""
        ...

    def resize(self, capacity_bytes: int, *, floor_bytes: int) -> None:
        """Another capacity from now on, beside other calls; what is stored stays.

        Raises ConfigError when there is no room for it, or not with ``floor_bytes`` left free, and BackendError when it
        is less than what is stored; then the old one stays.
        """
        ...

    def close(self) -> None:
        """Finish what is being written, flush, and let go of the medium. Idempotent."""
        ...
