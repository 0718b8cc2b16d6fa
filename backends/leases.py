"""Promises that objects are not evicted for a while."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

LEASES_MAX = 1 << 16
NO_LEASE = 0

Held = TypeVar("Held")


@dataclass(slots=True)
class _Lease(Generic[Held]):
    held: Held
    expires_at_s: float


class Leases(Generic[Held]):
    """What is held until when. Not thread-safe; time is given by the caller."""

    def __init__(self, *, on_ended: Callable[[Held], None]) -> None:
        """``on_ended`` is told what each lease held that has been released or has expired."""
        self._on_ended = on_ended
        self._leases: dict[int, _Lease[Held]] = {}
        self._expiries: list[tuple[float, int]] = []  # a heap; renewed leases leave stale entries that are put back
        self._last_id = NO_LEASE

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def is_full(self) -> bool:
        """Whether LEASES_MAX are out, and none may be granted."""
        return len(self._leases) >= LEASES_MAX

    def grant(self, held: Held, *, expires_at_s: float) -> int:
        """A new lease id. Not when ``is_full``."""
        assert not self.is_full
        self._last_id += 1
        self._leases[self._last_id] = _Lease(held, expires_at_s)
        heapq.heappush(self._expiries, (expires_at_s, self._last_id))
        return self._last_id

    def held(self, lease_id: int) -> Held | None:
        """What is under a lease; None when it has ended."""
        lease = self._leases.get(lease_id)
        return lease.held if lease is not None else None

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
        self._on_ended(self._leases.pop(lease_id).held)


class KeyLeases:
    """Leases on keys, for a store that does not index them. Not thread-safe; time is given by the caller."""

    def __init__(self) -> None:
        self._leases: Leases[tuple[bytes, ...]] = Leases(on_ended=self._free)
        self._holders: Counter[bytes] = Counter()  # how many leases each key has
        self.renew = self._leases.renew
        self.release = self._leases.release
        self.expire = self._leases.expire

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def key_count(self) -> int:
        """Keys under at least one lease, those included whose leases ended since the last ``expire``."""
        return len(self._holders)

    def grant(self, keys: Sequence[bytes], *, expires_at_s: float) -> int:
        """A new lease id; NO_LEASE for no keys, or when LEASES_MAX are out."""
        if not keys or self._leases.is_full:
            return NO_LEASE
        self._holders.update(keys)
        return self._leases.grant(tuple(keys), expires_at_s=expires_at_s)

    def keys(self, lease_id: int) -> tuple[bytes, ...]:
        """What is under a lease; nothing when it has ended."""
        return self._leases.held(lease_id) or ()

    def _free(self, keys: tuple[bytes, ...]) -> None:
        self._holders.subtract(keys)
        for key in keys:
            if not self._holders[key]:
                del self._holders[key]
