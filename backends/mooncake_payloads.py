"""Payloads on their way between callers and registered memory: with header, checked."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.backends.arena import Extent
from hicache.backends.base import GetItem, PutItem
from hicache.backends.mooncake_codes import INVALID_PARAMS, outcome_of
from hicache.backends.mooncake_layout import HEADER_BYTES, decode_header, encode_header
from hicache.backends.verified_copy import copy_then_hash
from hicache.outcome import Outcome


def fill_extent(extent: Extent, *, items: Sequence[PutItem]) -> None:
    """Headers and payloads, each hashed as it will be sent."""
    for item, view in zip(items, extent.views, strict=True):
        checksum = copy_then_hash(item.payload, view[HEADER_BYTES:], key=item.key)
        view[:HEADER_BYTES] = encode_header(item.key, item.payload.nbytes, checksum)


def take_payload(item: GetItem, code: int, staged: memoryview) -> Outcome:
    """Copy a payload to its target and verify it there. A length in ``code`` says nothing but that it was enough."""
    if code == INVALID_PARAMS:  # larger than the buffer
        return Outcome.SIZE_MISMATCH
    if code < HEADER_BYTES:
        return Outcome.CORRUPT if code >= 0 else outcome_of(code)
    header = decode_header(item.key, staged[:HEADER_BYTES])
    if header is None:
        return Outcome.CORRUPT
    size_bytes, checksum = header
    if size_bytes != item.target.nbytes:
        return Outcome.SIZE_MISMATCH
    if code != HEADER_BYTES + size_bytes:
        return Outcome.CORRUPT
    copied = copy_then_hash(staged[HEADER_BYTES:], item.target, key=item.key)
    return Outcome.OK if copied == checksum else Outcome.CORRUPT
