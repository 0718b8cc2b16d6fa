"""The objects of a store in the order of their last use, with what each tenant has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hicache.backends.base import StoredObject
from hicache.tenancy import TENANT_BYTES


@dataclass(slots=True)
class _TenantUse:
    payload_bytes: int = 0
    objects: int = 0


class Residents:
    """An index from key to payload size. Not thread-safe.

    least recently used [ ... ] most recently used
    """

    def __init__(self, found: Iterable[StoredObject] = ()) -> None:
        """Takes what ``Backend.scan`` tells, in any order."""
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._tenants: dict[bytes, _TenantUse] = {}
        for stored in sorted(found, key=lambda stored: stored.used_at_s):
            self.add(stored.key, stored.size_bytes)

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, key: bytes, size_bytes: int) -> None:
        """Add as the most recently used, or replace."""
        self.discard(key)
        self._sizes[key] = size_bytes
        use = self._tenants.setdefault(key[:TENANT_BYTES], _TenantUse())
        use.payload_bytes += size_bytes
        use.objects += 1

    def discard(self, key: bytes) -> int | None:
        """Remove; returns the payload size, None when it was not there."""
        size_bytes = self._sizes.pop(key, None)
        if size_bytes is None:
            return None
        tenant = key[:TENANT_BYTES]
        use = self._tenants[tenant]
        use.payload_bytes -= size_bytes
        use.objects -= 1
        if use.objects == 0:
            del self._tenants[tenant]
        return size_bytes

    def refresh(self, key: bytes) -> bool:
        """Make it the most recently used; False when it is not there."""
        if key not in self._sizes:
            return False
        self._sizes.move_to_end(key)
        return True

    def take_victims(
        self, enough_bytes: int, *, count_max: int, stored_bytes: Callable[[int], int], is_kept: Callable[[bytes], bool]
    ) -> list[tuple[bytes, int]]:
        """Remove the least recently used that together store ``enough_bytes``, ``count_max`` at most.

        Those that are kept count as used now, so that they are met once and not again by every call. Returns keys and
        payload sizes; fewer bytes than asked for when nothing else may go.
        """
        victims: list[tuple[bytes, int]] = []
        freed_bytes = 0
        for _ in range(len(self._sizes)):
            if freed_bytes >= enough_bytes or len(victims) >= count_max:
                break
            key = next(iter(self._sizes))
            if is_kept(key):
                self._sizes.move_to_end(key)
                continue
            size_bytes = self.discard(key)
            assert size_bytes is not None
            victims.append((key, size_bytes))
            freed_bytes += stored_bytes(size_bytes)
        return victims

    def tenant_usage(self, tenant: bytes) -> tuple[int, int]:
        """Payload bytes and objects of one tenant."""
        use = self._tenants.get(tenant, _TenantUse())
        return use.payload_bytes, use.objects

    def tenants(self) -> list[bytes]:
        """Tenants that have objects."""
        return list(self._tenants)
