"""What is sent and answered by the verbs about tenants. Tokens never are: only their hashes."""

from __future__ import annotations

import msgspec


class TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: what it may have, and what it has."""

    name: str
    lines: int  # of the tenants file: tokens, and users that are let in
    limits: dict[str, float]
    objects: int
    payload_bytes: int
    stored_bytes: int
    sessions: int


class TenantList(msgspec.Struct, frozen=True, kw_only=True):
    """All tenants, in the order of the file."""

    format: int = 1
    tenants: list[TenantRow]
    file: str  # empty: there is none, and one tenant without a token


class TenantAdd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new tenant."""

    name: str
    token_sha256: str  # 64 hexadecimal digits
    limits: dict[str, str] = {}


class TenantChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another token, or other limits; an empty value of a limit gives it its default back."""

    token_sha256: str = ""
    keeps_old_until: str = ""  # a moment; empty: old tokens end at once
    limits: dict[str, str] = {}


class TenantChanged(msgspec.Struct, frozen=True, kw_only=True):
    """It is in the file, and holds."""

    name: str
    file: str
