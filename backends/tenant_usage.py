"""What tenants have of a store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant has."""

    payload_bytes: int = 0
    stored_bytes: int = 0  # what that takes of the capacity
    objects: int = 0


@dataclass(slots=True)
class Owner:
    """The same, as an index counts it under a number of its own."""

    number: int
    payload_bytes: int = 0
    stored_bytes: int = 0
    objects: int = 0
    aside: int = 0  # of the objects: met by an eviction and not to go

    def change(self, *, objects: int, payload_bytes: int, stored_bytes: int) -> None:
        """It has so many more."""
        self.objects += objects
        self.payload_bytes += payload_bytes
        self.stored_bytes += stored_bytes

    def usage(self) -> TenantUsage:
        """What it has now."""
        return TenantUsage(self.payload_bytes, self.stored_bytes, self.objects)


class Owners:
    """Those that have objects, by tenant and by number. A tenant that comes again has another number."""

    def __init__(self) -> None:
        self._by_tenant: dict[bytes, Owner] = {}
        self._by_number: dict[int, Owner] = {}
        self._last_number = 0

    @property
    def version(self) -> tuple[int, int]:
        """Another one when ``tenants`` are others."""
        return self._last_number, len(self._by_tenant)

    def tenants(self) -> list[bytes]:
        """All of them."""
        return list(self._by_tenant)

    def get(self, tenant: bytes) -> Owner | None:
        """None: it has nothing."""
        return self._by_tenant.get(tenant)

    def __getitem__(self, number: int) -> Owner:
        return self._by_number[number]

    def of(self, tenant: bytes) -> Owner:
        """Made when the tenant is new."""
        owner = self._by_tenant.get(tenant)
        if owner is None:
            self._last_number += 1
            owner = self._by_tenant[tenant] = self._by_number[self._last_number] = Owner(self._last_number)
        return owner

    def drop(self, tenant: bytes) -> None:
        """It has nothing any more."""
        del self._by_number[self._by_tenant.pop(tenant).number]
