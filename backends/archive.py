"""The file that a namespace is exported to: checked objects without their tenant, for any backend and any host.

    magic 8 | version 4 | header length 4 | header (msgpack) | check 8
    object: tag 4 | key length 2 | payload length 8 | payload checksum 8 | check 8 | key | payload    (any number)
    end:    tag 4 | objects 8 | payload bytes 8 | check 8

Each check covers what precedes it in its part, and the key: whoever reads believes no length that was damaged. A file
without its end was cut short. The checksum of a payload is bound to its key, without the tenant.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
import xxhash

from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX
from hicache.checksum import payload_checksum
from hicache.errors import HiCacheError
from hicache.tenancy import TENANT_BYTES

MAGIC = b"HICACHEX"
VERSION = 1
HEADER_BYTES_MAX = 1 << 20
OBJECT_KEY_BYTES_MAX = PHYSICAL_KEY_BYTES_MAX - TENANT_BYTES
OBJECT_BYTES_MAX = 4 << 30

_START = struct.Struct("<8sII")
_CHECK = struct.Struct("<Q")
_OBJECT = struct.Struct("<4sHQQ")
_END = struct.Struct("<4sQQ")
_OBJECT_TAG = b"OBJ1"
_END_TAG = b"END1"
_HEAD_BYTES_MAX = _OBJECT.size + _CHECK.size
_READ_BYTES = 1 << 20


class ArchiveError(HiCacheError):
    """A file is no export, or is damaged. The text names what was found, where, and what was expected."""


class ArchiveHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What an export says of itself."""

    namespace: bytes  # the digest, or the first bytes of it where no more is known; empty: unknown
    descriptor: bytes = b""  # of the namespace, in msgpack; empty: not known
    model: str = ""
    source: str = ""  # backend and id of the store that it came from: a part is continued from there only
    hicache_version: str = ""


@dataclass(frozen=True, slots=True)
class ArchivedObject:
    """One object. ``payload`` is valid until the next one is read; None: it does not verify."""

    key: bytes  # without the tenant
    size_bytes: int
    payload: memoryview | None


@dataclass(frozen=True, slots=True)
class ArchiveEnd:
    """What an export ends with: what is in it."""

    objects: int
    payload_bytes: int


class Source(Protocol):
    """What is read from: a file, or the body of a request."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none at the end."""
        ...


def encode_header(header: ArchiveHeader) -> bytes:
    """The first part of an export."""
    body = msgspec.msgpack.encode(header)
    assert len(body) <= HEADER_BYTES_MAX
    return _checked(_START.pack(MAGIC, VERSION, len(body)) + body)


def encode_object_head(key: bytes, payload: memoryview) -> bytes:
    """What goes before a payload."""
    assert 1 <= len(key) <= OBJECT_KEY_BYTES_MAX
    head = _OBJECT.pack(_OBJECT_TAG, len(key), payload.nbytes, payload_checksum(key, payload))
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head + key)) + key


def encode_end(end: ArchiveEnd) -> bytes:
    """The last part of an export."""
    return _checked(_END.pack(_END_TAG, end.objects, end.payload_bytes))


def _checked(raw: bytes) -> bytes:
    return raw + _CHECK.pack(xxhash.xxh3_64_intdigest(raw))


class ArchiveReader:
    """Reads an export part by part, in memory for one object. Raises ArchiveError for what is none, or is damaged."""

    def __init__(self, source: Source, *, object_bytes_max: int = OBJECT_BYTES_MAX) -> None:
        """Reads the header. An object above ``object_bytes_max`` is read over, and its payload is None."""
        self._source = source
        self._object_bytes_max = object_bytes_max
        self._objects = self._payload_bytes = 0
        self._payload = bytearray()
        self.offset = 0  # behind the last part that was read whole
        self.end: ArchiveEnd | None = None
        self.header = self._read_header()

    def _read_header(self) -> ArchiveHeader:
        start = self._read(_START.size, "the beginning")
        magic, version, header_bytes = _START.unpack(start)
        if magic != MAGIC:
            raise ArchiveError(f"it begins with {magic!r}: expected {MAGIC!r}, the export of a namespace by hicache")
        if version != VERSION:
            raise ArchiveError(f"it is an export of version {version}: this hicache reads version {VERSION}")
        if header_bytes > HEADER_BYTES_MAX:
            raise ArchiveError(f"its header has {header_bytes} bytes: expected at most {HEADER_BYTES_MAX}")
        raw = start + self._read(header_bytes + _CHECK.size, "its header")
        self._verify(raw, b"", "its header")
        try:
            header = msgspec.msgpack.decode(raw[_START.size : -_CHECK.size], type=ArchiveHeader)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ArchiveError(f"its header is no header: {error}") from error
        self.offset += len(raw)
        return header

    def __iter__(self) -> Iterator[ArchivedObject]:
        """The objects. Afterwards ``end`` is there, and the counts in it were right."""
        while self.end is None:
            tag = self._read(len(_OBJECT_TAG), "the next object")
            if tag == _OBJECT_TAG:
                yield self._read_object(tag)
            elif tag == _END_TAG:
                self._read_end(tag)
            else:
                raise ArchiveError(f"at byte {self.offset} is {tag!r}: expected an object or the end")

    def _read_object(self, tag: bytes) -> ArchivedObject:
        raw = tag + self._read(_HEAD_BYTES_MAX - len(tag), "an object's head")
        _, key_bytes, size_bytes, checksum = _OBJECT.unpack_from(raw)
        if not 1 <= key_bytes <= OBJECT_KEY_BYTES_MAX or not 1 <= size_bytes <= OBJECT_BYTES_MAX:
            raise ArchiveError(
                f"at byte {self.offset} is an object with a key of {key_bytes} and a payload of {size_bytes} bytes: "
                f"expected 1 to {OBJECT_KEY_BYTES_MAX}, and 1 to {OBJECT_BYTES_MAX}"
            )
        key = self._read(key_bytes, "an object's key")
        self._verify(raw, key, "an object's head")
        payload = self._read_payload(size_bytes)
        self._objects += 1
        self._payload_bytes += size_bytes
        self.offset += len(raw) + key_bytes + size_bytes
        is_good = payload is not None and payload_checksum(key, payload) == checksum
        return ArchivedObject(key, size_bytes, payload if is_good else None)

    def _read_payload(self, size_bytes: int) -> memoryview | None:
        """The buffer grows with what has come, not with what is announced."""
        is_kept = size_bytes <= self._object_bytes_max
        self._payload = payload = bytearray() if size_bytes > len(self._payload) or not is_kept else self._payload
        filled = 0
        while filled < size_bytes:
            part = self._read_some(min(size_bytes - filled, _READ_BYTES), "an object's payload")
            if is_kept:
                payload[filled : filled + len(part)] = part
            filled += len(part)
        return memoryview(payload)[:size_bytes] if is_kept else None

    def _read_end(self, tag: bytes) -> None:
        raw = tag + self._read(_END.size - len(tag) + _CHECK.size, "the end")
        self._verify(raw, b"", "the end")
        _, objects, payload_bytes = _END.unpack_from(raw)
        if (objects, payload_bytes) != (self._objects, self._payload_bytes):
            raise ArchiveError(
                f"it ends after {self._objects} objects of {self._payload_bytes} bytes: "
                f"expected {objects} of {payload_bytes}, as its end says"
            )
        self.end = ArchiveEnd(objects, payload_bytes)

    def _verify(self, raw: bytes, key: bytes, what: str) -> None:
        [check] = _CHECK.unpack_from(raw, len(raw) - _CHECK.size)
        if check != xxhash.xxh3_64_intdigest(raw[: -_CHECK.size] + key):
            raise ArchiveError(f"{what} at byte {self.offset} does not have its check: the file is damaged there")

    def _read(self, size_bytes: int, what: str) -> bytes:
        parts: list[bytes] = []
        while size_bytes:
            part = self._read_some(min(size_bytes, _READ_BYTES), what)
            parts.append(part)
            size_bytes -= len(part)
        return b"".join(parts)

    def _read_some(self, size_bytes: int, what: str) -> bytes:
        part = self._source.read(size_bytes)
        if not part:
            raise ArchiveError(
                f"it ends within {what}, behind byte {self.offset}: it was cut short, or is not complete"
            )
        return part
