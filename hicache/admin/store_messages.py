"""What is sent and answered by the verbs about the content of a store. Times are seconds since the epoch."""

from __future__ import annotations

import msgspec

VERIFY_BYTES_PER_S = 200 << 20


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
