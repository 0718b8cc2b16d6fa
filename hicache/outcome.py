"""The outcome of one item of a batch: the same small values in backends, on the wire, in jobs and in metrics."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """One byte per item on the wire. Numbers are part of the protocol: never reuse one."""

    OK = 0  # done: stored, read and verified, or present
    EXISTS = 1  # put only: already there, nothing was copied
    ABSENT = 2  # no such object
    CORRUPT = 3  # bytes did not match their checksum; the object has been dropped
    SIZE_MISMATCH = 4  # the stored size is not the size asked for
    TOO_LARGE = 5  # above the object size limit
    NO_SPACE = 6  # no room, even after eviction
    IO_ERROR = 7  # the medium failed
    DEADLINE = 8  # not done in time
    UNAVAILABLE = 9  # L3 cannot be reached or its breaker is open
    CANCELLED = 10  # given up before it started
    BAD_RANGE = 11  # offset and size leave the registered memory
    REFUSED = 12  # not allowed, or over a limit of this session or tenant

    @property
    def is_ok(self) -> bool:
        """Whether the object is now where it was asked to be."""
        return self <= Outcome.EXISTS
