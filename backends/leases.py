"""Promises that objects are not evicted for a while."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEASES_MAX = 1 << 16
NO_LEASE = 0


@dataclass(slots=True)
class _Lease:
    keys: tuple[bytes, ...]
    expires_at_s: float


def _ignore(keys: list[bytes]) -> None:
    pass


def _nothing(key: bytes) -> int:
    return 0


class Leases:
    """Which keys are leased, and until when. Not thread-safe; time is given by the caller."""

    def __init__(
        self,
        *,
        bytes_max: int = 0,
        bytes_of: Callable[[bytes], int] = _nothing,
        on_freed: Callable[[list[bytes]], None] = _ignore,
    ) -> None:
        """All leased keys together have at most ``bytes_max`` by ``bytes_of``, asked when a key is leased first.

        ``on_freed`` is told which keys have no lease any more, in the order of their lease.
        """
        self._bytes_max = bytes_max
        self._bytes_of = bytes_of
        self._on_freed = on_freed
        self._leases: dict[int, _Lease] = {}
        self._holders: dict[bytes, int] = {}  # how many leases each key has
        self._sizes: dict[bytes, int] = {}  # of the same keys
        self._leased_bytes = 0
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
        """A new lease id; NO_LEASE, which protects nothing, for no keys or when LEASES_MAX are out.

        Where ``bytes_max`` does not allow all keys, the first ones get the lease, and those that had one.
        """
        if not keys or len(self._leases) >= LEASES_MAX:
            return NO_LEASE
        held = self._hold(keys)
        if not held:
            return NO_LEASE
        self._last_id += 1
        self._leases[self._last_id] = _Lease(tuple(held), expires_at_s)
        heapq.heappush(self._expiries, (expires_at_s, self._last_id))
        return self._last_id

    def _hold(self, keys: Sequence[bytes]) -> list[bytes]:
        held: list[bytes] = []
        is_full = False
        for key in keys:
            holders = self._holders.get(key, 0)
            if not holders:
                size_bytes = self._bytes_of(key)
                is_full = is_full or self._leased_bytes + size_bytes > self._bytes_max
                if is_full:
                    continue
                self._leased_bytes += size_bytes
                self._sizes[key] = size_bytes
            self._holders[key] = holders + 1
            held.append(key)
        return held

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
        freed: list[bytes] = []
        for key in self._leases.pop(lease_id).keys:
            left = self._holders[key] - 1
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]
                self._leased_bytes -= self._sizes.pop(key)
                freed.append(key)
        self._on_freed(freed)
