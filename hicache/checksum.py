"""The checksum that binds a payload to the key it is stored under."""

from __future__ import annotations

import xxhash


def payload_checksum(key: bytes, payload: bytes | memoryview) -> int:
    """xxh3_64 of ``payload``, seeded by ``key``: a payload under a foreign key does not verify. Returns a uint64."""
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(key))


def payload_hasher(key: bytes) -> xxhash.xxh3_64:
    """Fed with all bytes of a payload in order, its ``intdigest()`` is ``payload_checksum``."""
    return xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(key))
