"""Batches as they go over the wire: cut to the limits of the session, keys packed, outcomes one byte each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from hicache.client.session import SessionLimits
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire.bulk import BULK_REGION, BulkKind, pack_numbers, pack_request
from hicache.wire.protocol import pack_keys

TIMEOUT_MS_MAX = 2**32 - 1

# A number that a newer daemon may know is a failure here, whatever it means.
_OUTCOMES: tuple[Outcome, ...] = tuple(
    Outcome(number) if number in Outcome._value2member_map_ else Outcome.IO_ERROR for number in range(256)
)


def decode_outcomes(packed: bytes, *, count: int) -> list[Outcome]:
    """One outcome per item. IO_ERROR for all of them when the reply is not about ``count`` items."""
    if len(packed) != count:
        return [Outcome.IO_ERROR] * count
    return [_OUTCOMES[number] for number in packed]


def decode_outcome(number: int) -> Outcome:
    """The outcome that a number on the wire means; IO_ERROR for one that means nothing."""
    return _OUTCOMES[number] if 0 <= number < len(_OUTCOMES) else Outcome.IO_ERROR


def timeout_ms_of(left_s: float) -> int:
    """The time for a call as a request on the bulk socket names it; 0 would be no limit."""
    return min(max(1, int(left_s * 1000)), TIMEOUT_MS_MAX)


def pack_region_request(
    kind: BulkKind, region_id: int, items: Sequence[L3Item], *, timeout_ms: int, caller: bytes = b""
) -> bytes:
    """A request about registered memory, for the bulk socket. ``caller``: see ``Session.caller``."""
    keys, key_bytes = pack_keys([item.key for item in items])
    return b"".join(
        (
            pack_request(kind, key_bytes, len(items), timeout_ms=timeout_ms, caller=caller),
            keys,
            pack_numbers([item.size_bytes for item in items]),
            pack_numbers([item.offset for item in items]),
            BULK_REGION.pack(region_id),
        )
    )


def key_batches(keys: Sequence[bytes], *, batch_keys_max: int) -> Iterator[Sequence[bytes]]:
    """Consecutive parts of ``keys``, each of equally long keys and no more than the maximum."""
    for start in range(0, len(keys), batch_keys_max):
        part = keys[start : start + batch_keys_max]
        if len(set(map(len, part))) == 1:
            yield part
        else:
            for _, equally_long in groupby(part, key=len):
                yield list(equally_long)


def item_batches(items: Sequence[L3Item], positions: Sequence[int], *, limits: SessionLimits) -> Iterator[list[int]]:
    """``positions`` cut into consecutive batches, each within the limits on keys and on bytes, keys of one length."""
    batch: list[int] = []
    batch_bytes = 0
    for position in positions:
        item = items[position]
        if batch and (
            len(batch) == limits.batch_keys_max
            or batch_bytes + item.size_bytes > limits.batch_bytes_max
            or len(item.key) != len(items[batch[0]].key)
        ):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(position)
        batch_bytes += item.size_bytes
    if batch:
        yield batch


def unfit_outcome(item: L3Item, *, limits: SessionLimits, memory_bytes: int) -> Outcome | None:
    """Why ``item`` is not even sent, or None: its range leaves the memory, or it is above a limit of the session."""
    if item.offset < 0 or item.size_bytes < 1 or item.offset + item.size_bytes > memory_bytes:
        return Outcome.BAD_RANGE
    if item.size_bytes > limits.object_bytes_max:
        return Outcome.TOO_LARGE
    if not 1 <= len(item.key) <= limits.key_bytes_max:
        return Outcome.REFUSED
    return None
