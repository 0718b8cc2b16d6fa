"""Block keys: what a page of tokens is called, so that equal bytes meet and unequal ones never do."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Literal, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from hicache.errors import ConfigError, UsageError

KeyHash: TypeAlias = Literal["blake2b", "xxh3_128"]
FieldValue: TypeAlias = bool | int | str | bytes | None
Tokens: TypeAlias = Sequence[int] | NDArray[np.integer]

KEY_HASHES: tuple[KeyHash, ...] = ("blake2b", "xxh3_128")

_ROOT = b"hicache.root.v1"
_PAGE = b"hicache.page.v1"
_CHAINED = b"hicache.chained"
_DIGEST = b"hicache.digest1"
_OBJECT_SUFFIX = struct.Struct(">HH")
_KNOWN_KEYS: dict[KeyHash, str] = {  # of the page that ``_check_hash`` makes
    "blake2b": "d1917b64b36c9f7e1de5b08bbe623e4a5a50b8b45110d6ac4dae51953034cead",
    "xxh3_128": "11501e007b894072ca8b07ec6d0a1976",
}


def encode_fields(fields: Iterable[tuple[str, FieldValue]]) -> bytes:
    """An injective encoding: every field carries its name, its type and its length.

    Absent (``None``), empty and zero differ, ``True`` differs from ``1``, ``"1"`` from ``1`` and from ``b"1"``, and
    no concatenation of fields reads like another one. The order given is the order encoded.
    """
    parts: list[bytes] = []
    for name, value in fields:
        tag, raw = _encode_value(name, value)
        name_raw = _encode_text(name, name)
        parts += (struct.pack("<I", len(name_raw)), name_raw, tag, struct.pack("<Q", len(raw)), raw)
    return b"".join(parts)


def _encode_value(name: str, value: FieldValue) -> tuple[bytes, bytes]:
    match value:
        case None:
            return b"n", b""
        case bool():
            return b"t", b"\x01" if value else b"\x00"
        case int():
            return b"i", _encode_whole(value)
        case str():
            return b"s", _encode_text(name, value)
        case bytes():
            return b"b", value
        case _:
            raise UsageError(f"identity field {name!r} is a {type(value).__name__}; use None, bool, int, str or bytes")


def _encode_text(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, such as in a path that is no UTF-8
        raise UsageError(f"identity field {name!r} has {text!r}: expected Unicode text, or bytes") from error


def _encode_whole(value: int) -> bytes:
    try:
        return str(value).encode()
    except ValueError:  # of more digits than Python writes
        return hex(value).encode()


def digest_fields(fields: Iterable[tuple[str, FieldValue]]) -> bytes:
    """32-byte BLAKE2b of ``encode_fields(fields)``."""
    return blake2b(encode_fields(fields), digest_size=32, person=_DIGEST).digest()


class BlockKeys:
    """Makes the block keys of one namespace.

    ``root = H(namespace | salt | extras)`` and ``key_i = H(key_{i-1} | tokens of page i)``, full pages only. BLAKE2b is
    used in its keyed mode, with the previous key as the key, and gives 32 bytes; ``xxh3_128`` gives 16 and is for one
    trusted tenant only.
    """

    def __init__(self, namespace: bytes, *, page_tokens: int, key_hash: KeyHash = "blake2b") -> None:
        if key_hash not in KEY_HASHES:
            raise ConfigError("key_hash", key_hash, f"one of {', '.join(KEY_HASHES)}")
        if page_tokens < 1:
            raise ConfigError("page_tokens", page_tokens, "at least 1")
        _check_hash(key_hash)
        self.namespace = namespace
        self.page_tokens = page_tokens
        self.key_hash = key_hash
        self.key_bytes = 32 if key_hash == "blake2b" else 16

    def root(self, *, salt: bytes | None = None, extras: Mapping[str, FieldValue] | None = None) -> bytes:
        """The parent of a sequence's first page. ``extras`` (LoRA id, multimodal hashes, ...) in any order."""
        fields: list[tuple[str, FieldValue]] = [("namespace", self.namespace), ("salt", salt)]
        fields += [(f"extra.{name}", value) for name, value in sorted((extras or {}).items())]
        encoded = encode_fields(fields)
        if self.key_hash == "blake2b":
            return blake2b(encoded, digest_size=32, person=_ROOT).digest()
        return xxhash.xxh3_128_digest(_ROOT + encoded)

    def chain(self, tokens: Tokens, *, parent: bytes) -> list[bytes]:
        """Keys of all full pages of ``tokens``, which follow ``parent`` (a root, or the key of the page before).

        One call, linear in the number of tokens. Equal token ids give equal keys from a list, int32 or int64.
        """
        page_bytes = self.page_tokens * 8
        raw = token_array(tokens).data.cast("B")
        ends = range(page_bytes, len(raw) + 1, page_bytes)
        keys: list[bytes] = []
        key = parent
        if self.key_hash == "blake2b":
            for end in ends:
                key = blake2b(raw[end - page_bytes : end], digest_size=32, key=key, person=_PAGE).digest()
                keys.append(key)
        else:
            for end in ends:
                key = xxhash.xxh3_128_digest(key + raw[end - page_bytes : end])
                keys.append(key)
        return keys


def _check_hash(key_hash: KeyHash) -> None:
    """Raises ConfigError where this process makes other keys than all others, and would find nothing of theirs."""
    page = token_array([0, 1, -1, 2**40]).tobytes()
    if key_hash == "blake2b":
        made = blake2b(page, digest_size=32, key=bytes(32), person=_PAGE).hexdigest()
    else:
        made = xxhash.xxh3_128_hexdigest(bytes(16) + page)
    if made != _KNOWN_KEYS[key_hash]:
        expected = (
            f"the key {_KNOWN_KEYS[key_hash]} for a known page, where this Python makes {made}: another build of it"
        )
        raise ConfigError("key_hash", key_hash, expected)


def chained_key(root: bytes, page_hash: bytes) -> bytes:
    """The key of a page that an engine names by a hash of its own, which stands for all tokens up to its end."""
    if type(page_hash) is not bytes or not page_hash:
        raise UsageError(f"a page hash is {page_hash!r}: expected bytes, the engine's hash of all tokens up to there")
    return blake2b(page_hash, digest_size=32, key=root, person=_CHAINED).digest()


def token_array(tokens: Tokens) -> NDArray[np.int64]:
    """Token ids as a contiguous little-endian int64 vector. Raises UsageError for anything that is not that."""
    try:
        vector = _from_integers(tokens) if isinstance(tokens, list) else np.asarray(tokens)
    except ValueError as error:  # nested and ragged
        raise UsageError(f"token ids must be a flat sequence of integers: {error}") from error
    if vector.size == 0 and vector.ndim == 1:
        return np.empty(0, dtype="<i8")
    if vector.ndim != 1 or vector.dtype.kind not in "iu":
        raise UsageError(f"token ids must be a flat sequence of integers, not {vector.dtype} of shape {vector.shape}")
    if vector.dtype.kind == "u" and vector.dtype.itemsize == 8 and vector.size and int(vector.max()) > 2**63 - 1:
        raise UsageError(f"token id {int(vector.max())} does not fit into a signed 64-bit integer")
    return np.ascontiguousarray(vector, dtype="<i8")


def _from_integers(tokens: list[int]) -> NDArray[np.generic]:
    """The same as ``np.asarray``, four times as fast for plain integers: it looks for no common type."""
    if tokens and type(tokens[0]) is int:
        try:
            return np.frombuffer(array("q", tokens), dtype=np.int64)
        except (TypeError, OverflowError):
            pass  # something else is among them
    return np.asarray(tokens)


def object_key(block_key: bytes, *, group: int, shard: int) -> bytes:
    """The L3 name of one group's bytes for one page and one shard: block key, group index, shard index (both uint16).

    The namespace digest inside the block key fixes what the two indices mean.
    """
    return block_key + _OBJECT_SUFFIX.pack(group, shard)


def page_of_object(name: bytes) -> tuple[bytes, int]:
    """The block key and the group of an object with this L3 name: see ``object_key``."""
    end = len(name) - _OBJECT_SUFFIX.size
    group, _ = _OBJECT_SUFFIX.unpack_from(name, end)
    return name[:end], int(group)
