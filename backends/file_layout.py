"""How an object lies in a file: its name, its folder, its header."""

from __future__ import annotations

import struct
from base64 import b32decode, b32encode
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX, UNKNOWN_TAG

HEADER_BYTES = 4096  # one block, so that the payload behind it is aligned for direct I/O
BLOCK_BYTES = 4096
FAN_OUT = 256  # folders; each takes millions of names on ext4, and until all exist many a put pays for a mkdir
_HEX_KEY_BYTES_MAX = 127  # a name has at most 255 characters
SEAL_BYTES = 40  # of an encrypted object, behind the key (backends/sealing.py)
_MAGIC = b"HICACHE1"
_SEALED_MAGIC = b"HICACHES"
_TAG = struct.Struct("<II")  # of the namespace, and a check over it and the key; zeros where it is not known
_TAG_AT = 512
_FIXED = struct.Struct("<8sQQQH")  # magic, check, size, checksum, length of the key; then the key

Size = TypeVar("Size", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """What a file says of the object in it."""

    key: bytes
    size_bytes: int
    checksum: int
    namespace_tag: int = UNKNOWN_TAG
    seal: bytes = b""  # of an encrypted object; its checksum is 0, since the seal says more

    def encode(self) -> bytes:
        """The header block."""
        tail = struct.pack("<QQH", self.size_bytes, self.checksum, len(self.key)) + self.key + self.seal
        raw = (_SEALED_MAGIC if self.seal else _MAGIC) + struct.pack("<Q", xxhash.xxh3_64_intdigest(tail)) + tail
        return raw.ljust(_TAG_AT, b"\0") + self._encode_tag().ljust(HEADER_BYTES - _TAG_AT, b"\0")

    def _encode_tag(self) -> bytes:
        return _TAG.pack(self.namespace_tag, _tag_check(self.key, self.namespace_tag)) if self.namespace_tag else b""


def decode_header(raw: bytes | memoryview) -> ObjectHeader | None:
    """The header; None when it is damaged, or of another format."""
    if len(raw) != HEADER_BYTES:
        return None
    magic, check, size_bytes, checksum, key_length = _FIXED.unpack_from(raw)
    if magic not in (_MAGIC, _SEALED_MAGIC) or key_length > PHYSICAL_KEY_BYTES_MAX:
        return None
    key_end = _FIXED.size + key_length
    end = key_end + (SEAL_BYTES if magic == _SEALED_MAGIC else 0)
    key = bytes(raw[_FIXED.size : key_end])
    if check != xxhash.xxh3_64_intdigest(raw[16:end]):
        return None
    tag, tag_check = _TAG.unpack_from(raw, _TAG_AT)
    is_tagged = tag != UNKNOWN_TAG and tag_check == _tag_check(key, tag)
    return ObjectHeader(key, size_bytes, checksum, tag if is_tagged else UNKNOWN_TAG, bytes(raw[key_end:end]))


def _tag_check(key: bytes, tag: int) -> int:
    """A tag is outside the header's own check, so that each version reads the headers of the other."""
    return xxhash.xxh32_intdigest(key, tag)


def stored_bytes_of(size_bytes: Size) -> Size:
    """Header and payload in whole blocks; also for a column of sizes."""
    return HEADER_BYTES + -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def object_path(root: str, key: bytes) -> str:
    """``root/ab/<key>``: folders by a hash of the key, the name by the key itself so that a scan reads names only."""
    return f"{root}/{xxhash.xxh3_64_intdigest(key) % FAN_OUT:02x}/{_name_of(key)}"


def _name_of(key: bytes) -> str:
    """The key in hexadecimal; too long a one in base32. Both keep names apart where case does not count."""
    return key.hex() if len(key) <= _HEX_KEY_BYTES_MAX else b32encode(key).decode().rstrip("=").lower()


def key_of_name(name: str) -> bytes | None:
    """The key that ``object_path`` made ``name`` of; None for a name that it does not make."""
    try:
        key = b32decode(name.upper() + "=" * (-len(name) % 8)) if len(name) % 2 else bytes.fromhex(name)
    except ValueError:
        return None
    return key if 1 <= len(key) <= PHYSICAL_KEY_BYTES_MAX and _name_of(key) == name else None
