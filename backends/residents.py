"""The objects of a store in the order of their last use, with what each tenant has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hicache.backends.base import StoredObject
from hicache.tenancy import TENANT_BYTES

EXAMINED_MAX = 4096  # by one take_victims, which runs under the lock of the store


@dataclass(slots=True)
class _TenantUse:
    payload_bytes: int = 0
    objects: int = 0


class Residents:
    """An index from key to payload size. Not thread-safe.

    least recently used [ ... ] most recently used   |   set aside: met by ``take_victims`` and not to go now
    """

    def __init__(self, found: Iterable[StoredObject] = ()) -> None:
        """Takes what ``Backend.scan`` tells, in any order."""
        self._order: OrderedDict[bytes, int] = OrderedDict()
        self._aside: dict[bytes, int] = {}
        self._tenants: dict[bytes, _TenantUse] = {}
        for stored in sorted(found, key=lambda stored: stored.used_at_s):
            self.add(stored.key, stored.size_bytes)

    def __contains__(self, key: object) -> bool:
        return key in self._order or key in self._aside

    def __len__(self) -> int:
        return len(self._order) + len(self._aside)

    @property
    def has_candidates(self) -> bool:
        """Whether ``take_victims`` would look at anything."""
        return bool(self._order)

    def size_bytes(self, key: bytes) -> int:
        """The payload size of an object that is there."""
        size_bytes = self._order.get(key)
        return self._aside[key] if size_bytes is None else size_bytes

    def add(self, key: bytes, size_bytes: int) -> None:
        """Add as the most recently used, or replace."""
        self.discard(key)
        self._order[key] = size_bytes
        use = self._tenants.setdefault(key[:TENANT_BYTES], _TenantUse())
        use.payload_bytes += size_bytes
        use.objects += 1

    def discard(self, key: bytes) -> int | None:
        """Remove; returns the payload size, None when it was not there."""
        size_bytes = self._order.pop(key, None)
        if size_bytes is None:
            size_bytes = self._aside.pop(key, None)
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
        if key in self._order:
            self._order.move_to_end(key)
            return True
        return key in self._aside

    def put_back(self, keys: Sequence[bytes]) -> None:
        """What kept these has ended: those set aside are now the most recently used, the first as the last."""
        for key in reversed(keys):
            size_bytes = self._aside.pop(key, None)
            if size_bytes is not None:
                self._order[key] = size_bytes

    def take_victims(
        self, enough_bytes: int, *, count_max: int, stored_bytes: Callable[[int], int], is_kept: Callable[[bytes], bool]
    ) -> list[tuple[bytes, int]]:
        """Remove the least recently used that together store ``enough_bytes``, ``count_max`` at most.

        Those that are kept are set aside until ``put_back``, so that they are met once and not again by every call.
        Looks at EXAMINED_MAX at most: with no victims and ``has_candidates``, ask again. Returns keys and payload
        sizes.
        """
        victims: list[tuple[bytes, int]] = []
        freed_bytes = 0
        for _ in range(min(len(self._order), EXAMINED_MAX)):
            if freed_bytes >= enough_bytes or len(victims) >= count_max:
                break
            key = next(iter(self._order))
            if is_kept(key):
                self._aside[key] = self._order.pop(key)
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
