"""Leases that lookups took, until everything under them has been fetched or their time is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

LEASES_MAX = 256  # of one client; one more is not remembered, and runs out by itself


@dataclass(slots=True)
class _Lease:
    wanted: set[bytes]  # not fetched yet
    ends_at_s: float


class LeaseBook:
    """Which leases are of use no more, and can be released. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def note(self, lease_id: int, keys: Iterable[bytes], *, lease_s: float) -> None:
        """A lease on ``keys`` was given just now."""
        with self._lock:
            now_s = self._clock()
            self._leases = {known: lease for known, lease in self._leases.items() if lease.ends_at_s > now_s}
            if len(self._leases) < LEASES_MAX:
                self._leases[lease_id] = _Lease(set(keys), now_s + lease_s)

    def settle(self, keys: Iterable[bytes]) -> list[int]:
        """``keys`` have been fetched, or will not be: forgets and returns the leases of which nothing is left."""
        settled = frozenset(keys)
        with self._lock:
            for lease in self._leases.values():
                lease.wanted -= settled
            over = [lease_id for lease_id, lease in self._leases.items() if not lease.wanted]
            for lease_id in over:
                del self._leases[lease_id]
        return over

    def renew(self, keys: Iterable[bytes], *, ending_within_s: float, lease_s: float) -> list[int]:
        """Leases on ``keys`` that end so soon, and are to end ``lease_s`` from now instead."""
        needed = frozenset(keys)
        due: list[int] = []
        with self._lock:
            now_s = self._clock()
            for lease_id, lease in self._leases.items():
                if now_s < lease.ends_at_s <= now_s + ending_within_s and not needed.isdisjoint(lease.wanted):
                    lease.ends_at_s = now_s + lease_s
                    due.append(lease_id)
        return due
