"""Reads requests: keys, offsets and sizes from a client become checked values, or a refusal, or an outcome per item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache.backends import key_rows
from hicache.daemon.config import DaemonConfig
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session
from hicache.daemon.transfers import Extent
from hicache.daemon.turns import SLICE_KEYS, Steps
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from hicache.wire.protocol import RefusalCode, count_keys, split_keys


@dataclass(frozen=True, slots=True)
class Batch:
    """A checked batch: ``extents`` are the items worth trying; ``outcomes`` has a final value for all others."""

    extents: list[Extent]
    outcomes: list[Outcome]

    @property
    def total_bytes(self) -> int:
        """The payload of the extents."""
        return sum(extent.size_bytes for extent in self.extents)


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """The checked keys of a request, as they came: they are split a slice at a time."""

    packed: bytes
    key_bytes: int
    count: int

    @property
    def slice_starts(self) -> range:
        """Where slices begin."""
        return range(0, self.count, SLICE_KEYS)

    def physical(self, start: int, session: Session) -> list[bytes]:
        """The physical keys of ``[start, start + SLICE_KEYS)``."""
        part = self.packed[start * self.key_bytes : (start + SLICE_KEYS) * self.key_bytes]
        return [session.physical_key(key) for key in split_keys(part, self.key_bytes)]


def physical_keys(keys: PackedKeys, session: Session) -> Sequence[bytes]:
    """The names of the objects in the store, as a sequence that makes each when it is asked for: in no time."""
    if not keys.count:
        return ()
    return key_rows.PackedKeys(keys.packed, keys.key_bytes, prefix=session.tenant.digest)


def read_keys(packed: bytes, key_bytes: int, config: DaemonConfig) -> PackedKeys:
    """The object keys of a request, in no time. Raises Refusal(MALFORMED or BATCH_TOO_LARGE)."""
    try:
        count = count_keys(packed, key_bytes)
    except ValueError as error:
        raise Refusal(RefusalCode.MALFORMED, str(error)) from error
    check_key_count(count, config)
    return PackedKeys(packed, key_bytes, count)


def check_key_count(count: int, config: DaemonConfig) -> None:
    """Raises Refusal(BATCH_TOO_LARGE)."""
    if count > config.batch_keys_max:
        raise Refusal(RefusalCode.BATCH_TOO_LARGE, f"{count} keys: batch_keys_max is {config.batch_keys_max}")


def read_transfer(
    request: pb.TransferRequest, keys: PackedKeys, session: Session, region_bytes: int, config: DaemonConfig
) -> Steps[Batch]:
    """The extents of a Get or Put, each inside ``[0, region_bytes)``. Raises Refusal(MALFORMED, BATCH_TOO_LARGE
    or RATE_LIMITED).

    Integers are Python's: an offset and a size that would wrap around 64 bits simply end outside the region.
    """
    if not keys.count == len(request.offsets) == len(request.sizes):
        numbers = f"{keys.count} keys, {len(request.offsets)} offsets and {len(request.sizes)} sizes"
        raise Refusal(RefusalCode.MALFORMED, f"{numbers}: expected as many")
    batch = Batch([], [Outcome.OK] * keys.count)
    for start in keys.slice_starts:
        if start:
            yield
        offsets, sizes = (numbers[start : start + SLICE_KEYS] for numbers in (request.offsets, request.sizes))
        _read_slice(batch, start, keys.physical(start, session), offsets, sizes, region_bytes, config)
    _check_total(batch, session, config)
    return batch


def read_bulk(keys: Sequence[bytes], sizes: Sequence[int], session: Session, config: DaemonConfig) -> Batch:
    """The objects of a call on the bulk socket; offsets mean nothing. Raises as ``read_transfer``."""
    batch = Batch([], [Outcome.OK] * len(keys))
    physical = [session.physical_key(key) for key in keys]
    _read_slice(batch, 0, physical, [0] * len(keys), sizes, config.object_bytes_max, config)
    _check_total(batch, session, config)
    return batch


def _read_slice(
    batch: Batch,
    start: int,
    keys: Sequence[bytes],
    offsets: Sequence[int],
    sizes: Sequence[int],
    region_bytes: int,
    config: DaemonConfig,
) -> None:
    for index, (key, offset, size_bytes) in enumerate(zip(keys, offsets, sizes, strict=True), start=start):
        problem = check_size(size_bytes, config) or check_range(offset, size_bytes, region_bytes)
        if problem is not None:
            batch.outcomes[index] = problem
        else:
            batch.extents.append(Extent(index, key, offset, size_bytes))


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
