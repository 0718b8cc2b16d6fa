"""Reads requests: keys, offsets and sizes from a client become checked values, or a refusal, or an outcome per item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache.backends.key_rows import PackedKeys
from hicache.daemon.config import DaemonConfig
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session
from hicache.daemon.transfers import Extent
from hicache.outcome import Outcome
from hicache.wire.protocol import RefusalCode, count_keys


@dataclass(frozen=True, slots=True)
class Batch:
    """A checked batch: ``extents`` are the items worth trying; ``outcomes`` has a final value for all others."""

    extents: list[Extent]
    outcomes: list[Outcome]

    @property
    def total_bytes(self) -> int:
        """The payload of the extents."""
        return sum(extent.size_bytes for extent in self.extents)


def read_keys(packed: bytes, key_bytes: int, session: Session, config: DaemonConfig) -> Sequence[bytes]:
    """What the objects of a request are called in the store. Each name is made when it is asked for, so this is quick.

    Raises Refusal(MALFORMED or BATCH_TOO_LARGE).
    """
    try:
        count = count_keys(packed, key_bytes)
    except ValueError as error:
        raise Refusal(RefusalCode.MALFORMED, str(error)) from error
    check_key_count(count, config)
    return PackedKeys(packed, key_bytes, prefix=session.tenant.digest) if count else ()


def check_key_count(count: int, config: DaemonConfig) -> None:
    """Raises Refusal(BATCH_TOO_LARGE)."""
    if count > config.batch_keys_max:
        raise Refusal(RefusalCode.BATCH_TOO_LARGE, f"{count} keys: batch_keys_max is {config.batch_keys_max}")


def read_region(
    keys: Sequence[bytes],
    offsets: Sequence[int],
    sizes: Sequence[int],
    session: Session,
    region_bytes: int,
    config: DaemonConfig,
) -> Batch:
    """The extents of a call about registered memory, each inside ``[0, region_bytes)``; as many keys, offsets and
    sizes. Raises Refusal(BATCH_TOO_LARGE or RATE_LIMITED).

    Integers are Python's: an offset and a size that would wrap around 64 bits simply end outside the region.
    """
    batch = Batch([], [Outcome.OK] * len(keys))
    for index, (key, offset, size_bytes) in enumerate(zip(keys, offsets, sizes, strict=True)):
        problem = check_size(size_bytes, config) or check_range(offset, size_bytes, region_bytes)
        if problem is not None:
            batch.outcomes[index] = problem
        else:
            batch.extents.append(Extent(index, session.physical_key(key), offset, size_bytes))
    _check_total(batch, session, config)
    return batch


def read_bulk(keys: Sequence[bytes], sizes: Sequence[int], session: Session, config: DaemonConfig) -> Batch:
    """The objects of a call that moves bytes over its connection; offsets mean nothing. Raises as ``read_region``."""
    return read_region(keys, [0] * len(keys), sizes, session, config.object_bytes_max, config)


def _check_total(batch: Batch, session: Session, config: DaemonConfig) -> None:
    total_bytes = batch.total_bytes
    if total_bytes > config.batch_bytes_max:
        raise Refusal(RefusalCode.BATCH_TOO_LARGE, f"{total_bytes} bytes: batch_bytes_max is {config.batch_bytes_max}")
    session.rates.admit_bytes(total_bytes)


def check_size(size_bytes: int, config: DaemonConfig) -> Outcome | None:
    """What is wrong with an object of this size, if anything."""
    if size_bytes < 1:
        return Outcome.BAD_RANGE
    return Outcome.TOO_LARGE if size_bytes > config.object_bytes_max else None


def check_range(offset: int, size_bytes: int, region_bytes: int) -> Outcome | None:
    """BAD_RANGE unless ``[offset, offset + size_bytes)`` lies in ``[0, region_bytes)``."""
    return None if 0 <= offset <= region_bytes - size_bytes else Outcome.BAD_RANGE
