"""What a tenant may have of a store, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PINNED_OBJECTS_MAX = 16_384
PIN_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of one tenant. 0 means none, where a bound may be absent."""

    weight: float = 1.0  # of its share when the store is full, beside the weights of others
    quota_bytes: int = 0  # as stored, with headers and rounding
    quota_objects: int = 0
    ttl_s: float = 0.0  # since the last use of an object
    pinned_objects_max: int = PINNED_OBJECTS_MAX


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The limits of all tenants, by digest; ``default`` are those of a tenant that is not named."""

    default: TenantLimits = field(default_factory=TenantLimits)
    by_tenant: Mapping[bytes, TenantLimits] = field(default_factory=dict)
    pin_share: float = PIN_SHARE  # of the capacity, for the pins of all tenants together

    def of(self, tenant: bytes) -> TenantLimits:
        """The limits of one tenant."""
        return self.by_tenant.get(tenant, self.default)

    @property
    def has_ttl(self) -> bool:
        """Whether objects of any tenant expire."""
        return self.default.ttl_s > 0 or any(limits.ttl_s > 0 for limits in self.by_tenant.values())

    def pinned_bytes_max(self, tenant: bytes, *, capacity_bytes: int) -> int:
        """What pins of one tenant may protect: its weight's part of ``pin_share``, whoever else has pins.

        Never more than its share of a full store, so pins keep no tenant above that.
        """
        own = self.of(tenant).weight
        others = sum(limits.weight for name, limits in self.by_tenant.items() if name != tenant)
        return int(capacity_bytes * self.pin_share * own / (own + others))
