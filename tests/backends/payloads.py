"""Payloads that can be told apart, and compared without keeping them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from hicache.backends.base import Backend, GetItem, PutItem
from hicache.outcome import Outcome

TENANT = b"tenant-of-a-test"
OTHER_TENANT = b"another-tenant.."


def key(number: int, tenant: bytes = TENANT) -> bytes:
    """A physical key of 52 bytes."""
    return tenant + hashlib.sha256(str(number).encode()).digest() + b"\0\0\0\1"


def payload(number: int, size_bytes: int) -> bytes:
    """Bytes that belong to ``number`` alone, and do not repeat within an object."""
    return hashlib.shake_128(str(number).encode()).digest(size_bytes)


def put(backend: Backend, *objects: tuple[bytes, bytes]) -> list[Outcome]:
    """Store pairs of key and payload in one batch."""
    return backend.put([PutItem(name, memoryview(content)) for name, content in objects])


class Stored(NamedTuple):
    """One object as ``scan`` tells it."""

    key: bytes
    size_bytes: int
    used_at_s: float


def scanned(backend: Backend) -> list[Stored]:
    """All that ``scan`` tells, one by one."""
    return [
        Stored(*row)
        for batch in backend.scan()
        for row in zip(batch.keys, batch.sizes_bytes.tolist(), batch.used_at_s.tolist(), strict=True)
    ]


def get(backend: Backend, name: bytes, size_bytes: int) -> tuple[Outcome, bytes]:
    """The outcome, and the target's bytes."""
    target = bytearray(size_bytes)
    return backend.get_into([GetItem(name, memoryview(target))])[0], bytes(target)


def get_many(backend: Backend, objects: Sequence[tuple[bytes, int]]) -> list[tuple[Outcome, bytes]]:
    """The same for a batch of keys and sizes."""
    targets = [bytearray(size_bytes) for _, size_bytes in objects]
    items = [GetItem(name, memoryview(target)) for (name, _), target in zip(objects, targets, strict=True)]
    return list(zip(backend.get_into(items), map(bytes, targets), strict=True))


def fill(backend: Backend, numbers: range) -> list[int]:
    """Put objects of 1 MiB until there is no space; returns which were stored."""
    stored = []
    for number in numbers:
        outcome = put(backend, (key(number), payload(number, 1 << 20)))[0]
        if outcome is not Outcome.OK:
            assert outcome is Outcome.NO_SPACE
            break
        stored.append(number)
    return stored
