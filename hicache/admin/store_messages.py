"""What is sent and answered by the verbs about the content of a store. Times are seconds since the epoch."""

from __future__ import annotations

import msgspec

from hicache.errors import ConfigError

VERIFY_BYTES_PER_S = 200 << 20
VERIFY_BYTES_PER_S_MAX = 1 << 40
VERIFY_S_MAX = 30 * 86_400  # a slower one would not end before the content is another one


class NamespaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant has of one namespace. ``used_at_s`` is true to the minute."""

    tenant: str  # its name; where no tenant of that digest is known, the digest in hexadecimal
    namespace: str  # its digest in hexadecimal, or as much of it as is known; `unknown`
    model: str = ""
    fields: dict[str, str] = {}
    objects: int
    payload_bytes: int
    stored_bytes: int  # what that takes of the capacity
    used_at_s: float
    session_at_s: float | None = None  # when an engine that uses it was here last
    sessions: int = 0  # of engines that use it now


class Namespaces(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the store, by namespace; most space first."""

    format: int = 1
    namespaces: list[NamespaceRow]
    at_s: float  # by the clock of the daemon


class DropLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a drop, or of an erase: how far it has come."""

    objects: int
    payload_bytes: int
    failed: int = 0
    is_done: bool = False
    error: str = ""


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to verify, and how fast."""

    bytes_per_s: int = VERIFY_BYTES_PER_S  # of payload
    namespace: str = ""  # empty: all
    after: str = ""  # where another verify has stopped


def check_verify_rate(bytes_per_s: int, *, payload_bytes: int) -> None:
    """Whether a verify of so much payload would end. Raises ConfigError with the slowest rate at which it does."""
    least = max(1 << 16, -(-payload_bytes // VERIFY_S_MAX))
    if bytes_per_s < least:
        days = payload_bytes / max(1, bytes_per_s) / 86_400
        expected = (
            f"at least {least} bytes a second: {payload_bytes} bytes are stored, which would take {days:.3g} days, and "
            f"{VERIFY_S_MAX // 86_400} are the most"
        )
        raise ConfigError("rate", bytes_per_s, expected)
    if bytes_per_s > VERIFY_BYTES_PER_S_MAX:
        raise ConfigError("rate", bytes_per_s, f"at most {VERIFY_BYTES_PER_S_MAX} bytes a second")


class VerifyLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a verify: how far it has come, and what it has found so far."""

    objects: int
    payload_bytes: int
    corrupt: int = 0
    unreadable: int = 0
    gone: int = 0
    objects_stored: int = 0  # in the whole store
    after: str = ""
    is_done: bool = False
    error: str = ""


class ImportAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the objects of an export."""

    objects: int
    payload_bytes: int
    stored: int
    existing: int  # were there already
    damaged: int = 0
    too_large: int = 0
    failed: dict[str, int] = {}  # by outcome


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a trace is wanted."""

    seconds: float = 600.0
    bytes_max: int = 256 << 20
    block_tokens: int = 64
