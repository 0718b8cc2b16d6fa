"""Reads requests: keys, offsets and sizes from a client become checked values, or a refusal, or an outcome per item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache.daemon.config import DaemonConfig
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session
from hicache.daemon.transfers import Extent
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from hicache.wire.protocol import RefusalCode, split_keys


@dataclass(frozen=True, slots=True)
class Batch:
    """A checked batch: ``extents`` are the items worth trying; ``outcomes`` has a final value for all others."""

    extents: list[Extent]
    outcomes: list[Outcome]


def read_keys(packed: bytes, key_bytes: int, config: DaemonConfig) -> list[bytes]:
    """The object keys of a request. Raises Refusal(MALFORMED or BATCH_TOO_LARGE)."""
    try:
        keys = split_keys(packed, key_bytes)
    except ValueError as error:
        raise Refusal(RefusalCode.MALFORMED, str(error)) from error
    if len(keys) > config.batch_keys_max:
        raise Refusal(RefusalCode.BATCH_TOO_LARGE, f"{len(keys)} keys: batch_keys_max is {config.batch_keys_max}")
    return keys


def read_transfer(request: pb.TransferRequest, session: Session, region_bytes: int, config: DaemonConfig) -> Batch:
    """The extents of a Get or Put, each inside ``[0, region_bytes)``. Raises Refusal(MALFORMED or BATCH_TOO_LARGE).

    Integers are Python's: an offset and a size that would wrap around 64 bits simply end outside the region.
    """
    keys = read_keys(request.keys, request.key_bytes, config)
    return _batch(session, keys, request.offsets, request.sizes, region_bytes, config)


def read_stream_get(request: pb.StreamGetRequest, session: Session, config: DaemonConfig) -> Batch:
    """The objects of a GetStream; offsets mean nothing. Raises as ``read_transfer``."""
    keys = read_keys(request.keys, request.key_bytes, config)
    return _batch(session, keys, [0] * len(keys), request.sizes, config.object_bytes_max, config)


def _batch(
    session: Session,
    keys: Sequence[bytes],
    offsets: Sequence[int],
    sizes: Sequence[int],
    region_bytes: int,
    config: DaemonConfig,
) -> Batch:
    if not len(keys) == len(offsets) == len(sizes):
        raise Refusal(
            RefusalCode.MALFORMED, f"{len(keys)} keys, {len(offsets)} offsets and {len(sizes)} sizes: expected as many"
        )
    batch = Batch([], [Outcome.OK] * len(keys))
    for index, (key, offset, size_bytes) in enumerate(zip(keys, offsets, sizes, strict=True)):
        problem = check_size(size_bytes, config) or check_range(offset, size_bytes, region_bytes)
        if problem is not None:
            batch.outcomes[index] = problem
        else:
            batch.extents.append(Extent(index, session.physical_key(key), offset, size_bytes))
    total_bytes = sum(extent.size_bytes for extent in batch.extents)
    if total_bytes > config.batch_bytes_max:
        raise Refusal(RefusalCode.BATCH_TOO_LARGE, f"{total_bytes} bytes: batch_bytes_max is {config.batch_bytes_max}")
    return batch


def check_size(size_bytes: int, config: DaemonConfig) -> Outcome | None:
    """What is wrong with an object of this size, if anything."""
    if size_bytes < 1:
        return Outcome.BAD_RANGE
    return Outcome.TOO_LARGE if size_bytes > config.object_bytes_max else None


def check_range(offset: int, size_bytes: int, region_bytes: int) -> Outcome | None:
    """BAD_RANGE unless ``[offset, offset + size_bytes)`` lies in ``[0, region_bytes)``."""
    return None if 0 <= offset <= region_bytes - size_bytes else Outcome.BAD_RANGE
