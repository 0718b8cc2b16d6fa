"""Namespaces that clients said hello with: checked, and remembered so that a mismatch can be named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec

from hicache.daemon.refusals import Refusal
from hicache.daemon.tenants import Tenant, Tenants
from hicache.errors import UsageError
from hicache.keys import KEY_HASHES, FieldValue
from hicache.spec import differing_fields, namespace_digest
from hicache.wire.protocol import (
    DESCRIPTOR_BYTES_MAX,
    DIFFERING_FIELDS_MAX,
    NAMESPACE_DIGEST_BYTES,
    RefusalCode,
)

NAMESPACES_PER_TENANT_MAX = 32

Descriptor = dict[str, FieldValue]

_decoder = msgspec.msgpack.Decoder(dict[str, Any])  # Any: namespace_digest refuses values that are no FieldValue


def read_descriptor(raw: bytes, digest: bytes) -> Descriptor:
    """The descriptor behind ``digest``. Raises Refusal(BAD_NAMESPACE) unless it is well formed and has this digest."""
    if len(digest) != NAMESPACE_DIGEST_BYTES:
        raise Refusal(
            RefusalCode.BAD_NAMESPACE, f"namespace_digest has {len(digest)} bytes: expected {NAMESPACE_DIGEST_BYTES}"
        )
    if len(raw) > DESCRIPTOR_BYTES_MAX:
        raise Refusal(
            RefusalCode.BAD_NAMESPACE, f"namespace_descriptor has {len(raw)} bytes: at most {DESCRIPTOR_BYTES_MAX}"
        )
    try:
        descriptor: Descriptor = _decoder.decode(raw)
        described = namespace_digest(descriptor)
    except (msgspec.DecodeError, UnicodeError, RecursionError, UsageError) as error:
        raise Refusal(RefusalCode.BAD_NAMESPACE, f"namespace_descriptor is not a map of fields: {error}") from error
    if described != digest:
        raise Refusal(RefusalCode.BAD_NAMESPACE, "namespace_descriptor does not have the digest namespace_digest")
    return descriptor


def check_key_hash(descriptor: Descriptor, tenants: Tenants) -> None:
    """Raises Refusal where the namespace's keys come from an unknown hash, or one that tenants could attack."""
    key_hash = descriptor.get("key_hash")
    if key_hash not in KEY_HASHES:
        raise Refusal(RefusalCode.BAD_NAMESPACE, f"key_hash is {key_hash!r}: expected one of {', '.join(KEY_HASHES)}")
    if key_hash != "blake2b" and not tenants.fast_keys_allowed:
        raise Refusal(
            RefusalCode.KEY_HASH_NOT_ALLOWED,
            f"key_hash is {key_hash!r}, which is for one trusted tenant; this daemon has {tenants.count}: use blake2b",
        )


class KnownNamespaces:
    """The last namespaces of each tenant, oldest dropped first. Nothing of one tenant is ever told to another."""

    def __init__(self) -> None:
        self._by_tenant: dict[Tenant, OrderedDict[bytes, Descriptor]] = {}

    def __len__(self) -> int:
        """How many are remembered."""
        return sum(len(known) for known in self._by_tenant.values())

    def latest(self) -> Iterator[tuple[Tenant, bytes, Descriptor]]:
        """Tenant, digest and descriptor of each, of every tenant the latest first."""
        for tenant, known in self._by_tenant.items():
            for digest, descriptor in reversed(known.items()):
                yield tenant, digest, descriptor

    def meet(self, tenant: Tenant, digest: bytes, descriptor: Descriptor) -> list[str]:
        """Remembers the namespace, and names the fields in which it differs from the nearest one of the same model.

        Empty where it is known already, or where nothing of this model is.
        """
        known = self._by_tenant.setdefault(tenant, OrderedDict())
        differences: list[str] = []
        if digest not in known:
            same_model = [other for other in known.values() if other.get("model") == descriptor.get("model")]
            candidates = [differing_fields(other, descriptor) for other in same_model]
            differences = min(candidates, key=len, default=[])
        known[digest] = descriptor
        known.move_to_end(digest)
        if len(known) > NAMESPACES_PER_TENANT_MAX:
            known.popitem(last=False)
        return differences[:DIFFERING_FIELDS_MAX]
