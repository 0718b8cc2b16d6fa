"""Keys as rows of a numpy array, so that a batch is hashed and compared at once."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Sequence
from operator import mul
from typing import overload

import numpy as np
from numpy.typing import NDArray

from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX

ROW_WORDS = (8, 17)  # of 8 bytes: a cache line, which a tenant with a 32-byte block key fits into, and all the rest
_SHORT_BYTES_MAX = ROW_WORDS[0] * 8 - 1
_MASK = (1 << 64) - 1
_MIX_1, _MIX_2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53  # the finalizer of MurmurHash3

Rows = NDArray[np.uint64]  # [n, words]: the bytes of the key, zeros, and its length in the last byte
Hashes = NDArray[np.uint64]  # [n]


class PackedKeys(Sequence[bytes]):
    """Keys of equal length as one string, behind a prefix that all of them have. Reads as their sequence."""

    def __init__(self, packed: bytes, key_bytes: int, *, prefix: bytes = b"") -> None:
        assert key_bytes > 0
        assert len(packed) % key_bytes == 0
        self.packed = packed
        self.key_bytes = key_bytes
        self.prefix = prefix

    def __len__(self) -> int:
        return len(self.packed) // self.key_bytes

    def __iter__(self) -> Iterator[bytes]:
        step, prefix, packed = self.key_bytes, self.prefix, self.packed
        return (prefix + packed[start : start + step] for start in range(0, len(packed), step))

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        start = range(0, len(self.packed), self.key_bytes)[index]
        return self.prefix + self.packed[start : start + self.key_bytes]

    @property
    def width(self) -> int:
        """The width of their rows."""
        return width_of(len(self.prefix) + self.key_bytes)

    def rows(self) -> Rows:
        """One row a key."""
        length = len(self.prefix) + self.key_bytes
        row_bytes = ROW_WORDS[self.width] * 8
        raw = np.zeros((len(self), row_bytes), dtype=np.uint8)
        raw[:, : len(self.prefix)] = np.frombuffer(self.prefix, dtype=np.uint8)
        raw[:, len(self.prefix) : length] = np.frombuffer(self.packed, dtype=np.uint8).reshape(-1, self.key_bytes)
        raw[:, -1] = length
        return raw.view(np.uint64)


def width_of(key_bytes: int) -> int:
    """The index in ROW_WORDS for keys of this length."""
    return 0 if key_bytes <= _SHORT_BYTES_MAX else 1


def row_of(key: bytes) -> bytes:
    """The row of one key."""
    row_bytes = ROW_WORDS[width_of(len(key))] * 8
    return key.ljust(row_bytes - 1, b"\0") + bytes((len(key),))


def key_of(row: bytes) -> bytes:
    """The key of a row."""
    return row[: row[-1]]


def by_length(keys: Sequence[bytes]) -> list[tuple[NDArray[np.intp] | slice, PackedKeys]]:
    """Keys, put together by their length, with their places; without those that no backend stores."""
    if isinstance(keys, PackedKeys):
        return [(slice(None), keys)] if len(keys) else []
    lengths = set(map(len, keys))
    if len(lengths) == 1 and 1 <= (length := min(lengths)) <= PHYSICAL_KEY_BYTES_MAX:
        return [(slice(None), PackedKeys(b"".join(keys), length))]
    places: dict[int, list[int]] = {length: [] for length in lengths if 1 <= length <= PHYSICAL_KEY_BYTES_MAX}
    for place, key in enumerate(keys):
        if len(key) in places:
            places[len(key)].append(place)
    return [
        (np.asarray(found, dtype=np.intp), PackedKeys(b"".join(keys[place] for place in found), length))
        for length, found in places.items()
    ]


class KeyHash:
    """A hash of rows that who chooses the keys cannot foresee, nor fill one bucket with.

    Multiply-shift over 32-bit words with random 64-bit factors: two keys meet with a chance of 2**-33, whatever they
    are (Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic without
    primes"). The finalizer spreads what has a regular distance.
    """

    def __init__(self, words: int) -> None:
        self._unpack = struct.Struct(f"<{2 * words}I").unpack
        self._factors = [secrets.randbits(64) for _ in range(2 * words)]
        self._factor_array = np.array(self._factors, dtype=np.uint64)

    def of_rows(self, rows: Rows) -> Hashes:
        """One hash a row."""
        hashes: Hashes = rows.view("<u4").astype(np.uint64) @ self._factor_array
        hashes ^= hashes >> np.uint64(33)
        hashes *= np.uint64(_MIX_1)
        hashes ^= hashes >> np.uint64(33)
        hashes *= np.uint64(_MIX_2)
        hashes ^= hashes >> np.uint64(33)
        return hashes

    def of_row(self, row: bytes) -> int:
        """The same for one."""
        mixed: int = sum(map(mul, self._unpack(row), self._factors)) & _MASK
        mixed = (mixed ^ mixed >> 33) * _MIX_1 & _MASK
        mixed = (mixed ^ mixed >> 33) * _MIX_2 & _MASK
        return mixed ^ mixed >> 33
