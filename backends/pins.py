"""Objects that a tenant wants kept for a time, within its limits."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.tenancy import TENANT_BYTES


@dataclass(slots=True)
class PinUse:
    """What the pins of one tenant protect."""

    stored_bytes: int = 0
    objects: int = 0


@dataclass(slots=True)
class _Pin:
    size_bytes: int  # as stored
    expires_at_s: float


class Pins:
    """Which keys are pinned, and until when. Not thread-safe; time is given by the caller."""

    def __init__(self, *, limit_of: Callable[[bytes], PinUse], on_freed: Callable[[Sequence[bytes]], None]) -> None:
        """``limit_of(tenant)`` is the most that its pins protect. ``on_freed`` is told what is pinned no more."""
        self._limit_of = limit_of
        self._on_freed = on_freed
        self._pins: dict[bytes, _Pin] = {}
        self._uses: dict[bytes, PinUse] = {}
        self._expiries: list[tuple[float, bytes]] = []  # a heap; one live entry a pin, stale ones are passed over

    def __contains__(self, key: object) -> bool:
        return key in self._pins

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def stored_bytes(self) -> int:
        """What all pins protect."""
        return sum(use.stored_bytes for use in self._uses.values())

    def use_of(self, tenant: bytes) -> PinUse:
        """What the pins of one tenant protect."""
        return self._uses.get(tenant, PinUse())

    def pin(self, key: bytes, *, size_bytes: int, expires_at_s: float) -> bool:
        """Pin an object that stores ``size_bytes``; False at the limits of its tenant. A pin is moved only to later."""
        pin = self._pins.get(key)
        if pin is not None:
            pin.expires_at_s = max(pin.expires_at_s, expires_at_s)  # its heap entry is put back when it comes up
            return True
        tenant = key[:TENANT_BYTES]
        use, limit = self.use_of(tenant), self._limit_of(tenant)
        if use.objects >= limit.objects or use.stored_bytes + size_bytes > limit.stored_bytes:
            return False
        use.objects += 1
        use.stored_bytes += size_bytes
        self._uses[tenant] = use
        self._pins[key] = _Pin(size_bytes, expires_at_s)
        heapq.heappush(self._expiries, (expires_at_s, key))
        if len(self._expiries) > 2 * len(self._pins) + 64:  # entries of pins that were ended by hand
            self._expiries = [(pin.expires_at_s, key) for key, pin in self._pins.items()]
            heapq.heapify(self._expiries)
        return True

    def unpin(self, key: bytes) -> bool:
        """End a pin; False when there is none."""
        pin = self._pins.pop(key, None)
        if pin is None:
            return False
        tenant = key[:TENANT_BYTES]
        use = self._uses[tenant]
        use.objects -= 1
        use.stored_bytes -= pin.size_bytes
        if not use.objects:
            del self._uses[tenant]
        self._on_freed([key])
        return True

    def expire(self, *, now_s: float) -> None:
        """End the pins whose time has come. One that ends at ``now_s`` has ended."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, key = heapq.heappop(self._expiries)
            pin = self._pins.get(key)
            if pin is None:
                continue
            if pin.expires_at_s <= now_s:
                self.unpin(key)
            else:
                heapq.heappush(self._expiries, (pin.expires_at_s, key))
