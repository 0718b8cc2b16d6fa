"""Promises that objects are not evicted for a while."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

LEASES_MAX = 1 << 16
NO_LEASE = 0


@dataclass(slots=True)
class _Lease:
    keys: tuple[bytes, ...]
    expires_at_s: float


class Leases:
    """Which keys are leased, and until when. Not thread-safe; time is given by the caller."""

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}
        self._holders: dict[bytes, int] = {}  # how many leases each key has
        self._expiries: list[tuple[float, int]] = []  # a heap; renewed leases leave stale entries that are put back
        self._last_id = NO_LEASE

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: object) -> bool:
        return key in self._holders

    @property
    def key_count(self) -> int:
        """Keys under at least one lease, those included whose leases ended since the last ``expire``."""
        return len(self._holders)

    def grant(self, keys: Sequence[bytes], *, expires_at_s: float) -> int:
        """A new lease id; NO_LEASE, which protects nothing, for no keys or when LEASES_MAX are out."""
        if not keys or len(self._leases) >= LEASES_MAX:
            return NO_LEASE
        self._last_id += 1
        self._leases[self._last_id] = _Lease(tuple(keys), expires_at_s)
        heapq.heappush(self._expiries, (expires_at_s, self._last_id))
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) + 1
        return self._last_id

    def keys(self, lease_id: int) -> tuple[bytes, ...]:
        """What is under a lease; nothing when it has ended."""
        lease = self._leases.get(lease_id)
        return lease.keys if lease is not None else ()

    def renew(self, lease_id: int, *, now_s: float, expires_at_s: float) -> bool:
        """Move the end of a lease; False when it ended already. One heap entry a lease, so renewing costs no memory."""
        self.expire(now_s=now_s)
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        if expires_at_s < lease.expires_at_s:
            heapq.heappush(self._expiries, (expires_at_s, lease_id))
        lease.expires_at_s = expires_at_s
        return True

    def release(self, lease_id: int, *, now_s: float) -> bool:
        """End a lease; False when it ended already."""
        self.expire(now_s=now_s)
        if lease_id not in self._leases:
            return False
        self._end(lease_id)
        return True

    def expire(self, *, now_s: float) -> None:
        """End the leases whose time has come. A lease that ends at ``now_s`` has ended."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._expiries)
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease.expires_at_s <= now_s:
                self._end(lease_id)
            else:
                heapq.heappush(self._expiries, (lease.expires_at_s, lease_id))

    def _end(self, lease_id: int) -> None:
        for key in self._leases.pop(lease_id).keys:
            left = self._holders[key] - 1
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]
