"""How an object lies in a Mooncake store: its name, and the header before its payload."""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode

import xxhash

from hicache.backends.base import is_storable_key

NAME_PREFIX = "hicache1."  # the pool may have other users
HEADER_BYTES = 32
_HEADER = struct.Struct("<8sQQQ")  # magic, payload size, payload checksum, check
_CHECKED = struct.Struct("<8sQQ")
_MAGIC = b"HICACHE1"


def object_name(key: bytes) -> str:
    """The name under which ``key`` is stored: base64, which costs the master a third less memory than hexadecimal."""
    return NAME_PREFIX + urlsafe_b64encode(key).decode().rstrip("=")


def key_of_name(name: str) -> bytes | None:
    """The key that ``object_name`` made ``name`` of; None for a name that it does not make."""
    if not name.startswith(NAME_PREFIX):
        return None
    try:
        key = urlsafe_b64decode(name.removeprefix(NAME_PREFIX) + "=" * (-(len(name) - len(NAME_PREFIX)) % 4))
    except ValueError:
        return None
    return key if is_storable_key(key) and object_name(key) == name else None


def encode_header(key: bytes, size_bytes: int, checksum: int) -> bytes:
    """The header of an object, bound to its key."""
    checked = _CHECKED.pack(_MAGIC, size_bytes, checksum)
    return checked + struct.pack("<Q", _check(key, checked))


def decode_header(key: bytes, raw: bytes | memoryview) -> tuple[int, int] | None:
    """Payload size and checksum; None when it is damaged, or another key's."""
    magic, size_bytes, checksum, check = _HEADER.unpack(raw)
    if magic != _MAGIC or check != _check(key, bytes(raw[: _CHECKED.size])):
        return None
    return size_bytes, checksum


def _check(key: bytes, checked: bytes) -> int:
    return xxhash.xxh3_64_intdigest(checked, xxhash.xxh3_64_intdigest(key))
