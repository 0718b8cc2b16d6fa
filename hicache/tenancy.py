"""How a tenant becomes part of the name under which its objects are stored."""

from __future__ import annotations

from hashlib import blake2b

TENANT_BYTES = 16
DEFAULT_TENANT = "default"

_TENANT = b"hicache.tenant.1"


def tenant_digest(name: str) -> bytes:
    """The TENANT_BYTES that every physical key of the tenant called ``name`` starts with."""
    return blake2b(name.encode(), digest_size=TENANT_BYTES, person=_TENANT).digest()


def physical_key(tenant: bytes, key: bytes) -> bytes:
    """The name of a stored object: ``tenant`` (a ``tenant_digest``) and the object key."""
    assert len(tenant) == TENANT_BYTES, f"a tenant digest has {TENANT_BYTES} bytes, not {len(tenant)}"
    return tenant + key
