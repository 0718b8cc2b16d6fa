"""The result codes of a Mooncake client (types.h of Mooncake 0.3.13), and what each of them means here."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.outcome import Outcome

INTERNAL = -1
NO_AVAILABLE_HANDLE = -200  # no node has room; eviction runs behind
INVALID_PARAMS = -600  # a get: the object is larger than the buffer
REPLICA_NOT_READY = -703  # somebody is writing it, or died while writing it
OBJECT_NOT_FOUND = -704
OBJECT_EXISTS = -705
OBJECT_HAS_LEASE = -706
LEASE_EXPIRED = -707  # during a get: the bytes may be another object's by now
OBJECT_GONE = -712
TRANSFER_FAIL = -800  # the node that has the bytes does not answer
CHECKSUM_MISMATCH = -801
RPC_FAIL = -900  # the master cannot be reached
RPC_TIMEOUT = -901
_HIGH_AVAILABILITY = range(-1099, -999)  # no master leads at the moment
TENANT_QUOTA = -1700

_OUTCOMES = {
    NO_AVAILABLE_HANDLE: Outcome.NO_SPACE,
    INVALID_PARAMS: Outcome.REFUSED,
    REPLICA_NOT_READY: Outcome.ABSENT,
    OBJECT_NOT_FOUND: Outcome.ABSENT,
    OBJECT_EXISTS: Outcome.EXISTS,
    LEASE_EXPIRED: Outcome.DEADLINE,
    OBJECT_GONE: Outcome.ABSENT,
    CHECKSUM_MISMATCH: Outcome.CORRUPT,
    RPC_FAIL: Outcome.UNAVAILABLE,
    RPC_TIMEOUT: Outcome.UNAVAILABLE,
    TENANT_QUOTA: Outcome.NO_SPACE,
}


def outcome_of(code: int) -> Outcome:
    """What a code says of one object; codes of 0 and more are OK, unknown ones IO_ERROR."""
    if code >= 0:
        return Outcome.OK
    if code in _HIGH_AVAILABILITY:
        return Outcome.UNAVAILABLE
    return _OUTCOMES.get(code, Outcome.IO_ERROR)


def is_without_master(codes: Sequence[int]) -> bool:
    """Whether the master answered none of a batch."""
    return bool(codes) and all(outcome_of(code) is Outcome.UNAVAILABLE for code in codes)
