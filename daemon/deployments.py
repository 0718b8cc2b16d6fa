"""Deployments: engines of one tenant that must find each other's state, so that another geometry is refused."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hicache.daemon.namespaces import Descriptor
from hicache.daemon.refusals import Refusal
from hicache.daemon.tenants import Tenant
from hicache.spec import differing_fields
from hicache.wire.protocol import (
    DEPLOYMENT_CHARS_MAX,
    DIFFERING_FIELDS_MAX,
    SALT_FINGERPRINT_BYTES,
    RefusalCode,
)

FIELD_CHARS_MAX = 160  # of one difference in a refusal: a list of layers may be long


@dataclass(frozen=True, slots=True)
class Membership:
    """What an engine says of its deployment."""

    name: str
    descriptor: Descriptor
    salt_fingerprint: bytes


@dataclass(slots=True)
class _Deployment:
    """``members`` sessions agree on what ``first`` said."""

    first: Membership
    members: int = 0


class Deployments:
    """What the sessions of each (tenant, name) agree on, from the first one that says the name to the end of the last.

    No more of them than sessions. Nothing of one tenant is ever compared with, or told to, another. Event loop only.
    """

    def __init__(self) -> None:
        self._by_name: dict[tuple[Tenant, str], _Deployment] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    @contextmanager
    def joined(self, tenant: Tenant, membership: Membership) -> Iterator[None]:
        """For as long as a session lasts. Raises Refusal(DEPLOYMENT_MISMATCH) with the fields that differ.

        A session without a name belongs to none.
        """
        if not membership.name:
            yield
            return
        key = (tenant, membership.name)
        deployment = self._by_name.setdefault(key, _Deployment(membership))
        if differences := _differences(deployment.first, membership):
            raise Refusal(RefusalCode.DEPLOYMENT_MISMATCH, _refusal_text(membership.name, differences))
        deployment.members += 1
        try:
            yield
        finally:
            deployment.members -= 1
            if not deployment.members:
                del self._by_name[key]


def read_membership(name: str, descriptor: Descriptor, salt_fingerprint: bytes) -> Membership:
    """What a hello says of a deployment. Raises Refusal(BAD_NAMESPACE) where that is malformed."""
    if len(name) > DEPLOYMENT_CHARS_MAX or not name.isprintable():
        text = f"deployment has {len(name)} characters: expected up to {DEPLOYMENT_CHARS_MAX} printable ones"
        raise Refusal(RefusalCode.BAD_NAMESPACE, text)
    if name and len(salt_fingerprint) != SALT_FINGERPRINT_BYTES:
        text = f"salt_fingerprint has {len(salt_fingerprint)} bytes: expected {SALT_FINGERPRINT_BYTES}"
        raise Refusal(RefusalCode.BAD_NAMESPACE, text)
    return Membership(name, descriptor, salt_fingerprint)


def _differences(first: Membership, other: Membership) -> list[str]:
    differences = differing_fields(first.descriptor, other.descriptor)
    if not hmac.compare_digest(first.salt_fingerprint, other.salt_fingerprint):
        differences.append("salt: another one")
    return differences


def _refusal_text(name: str, differences: list[str]) -> str:
    named = [text if len(text) <= FIELD_CHARS_MAX else text[: FIELD_CHARS_MAX - 3] + "..." for text in differences]
    if len(named) > DIFFERING_FIELDS_MAX:
        named[DIFFERING_FIELDS_MAX:] = [f"and {len(named) - DIFFERING_FIELDS_MAX} more"]
    return f"the engines of deployment {name!r} differ from this one in {'; '.join(named)}"
