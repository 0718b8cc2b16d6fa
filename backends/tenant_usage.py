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
