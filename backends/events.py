"""What comes and goes in a store, told to those who watch a tenant. Telling never waits for a watcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from hicache.tenancy import TENANT_BYTES

QUEUED_EVENTS_MAX = 16_384  # of one watcher; one that is slower loses all of them at once, and is told how many


class Removal(IntEnum):
    """Why an object is gone. Numbers are part of the protocol."""

    EVICTED = 1  # to make room
    EXPIRED = 2  # not used for its tenant's time to live
    DELETED = 3  # by its owner
    CORRUPT = 4  # its bytes were wrong, or missing on the medium


class Event(NamedTuple):
    """An object was stored (``removal`` is None), or removed."""

    key: bytes  # physical
    removal: Removal | None


class Subscription:
    """The events of one tenant since it was made, for one watcher. Thread-safe."""

    def __init__(self, tenant: bytes, *, wake: Callable[[], None]) -> None:
        """``wake`` is called when there is something to take again, from any thread; it must not block."""
        self.tenant = tenant
        self._wake = wake
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._lost = 0
        self._is_woken = False

    def tell(self, event: Event) -> int:
        """Queue an event. Returns how many were lost for it: 0, or all that were queued when it was one too many."""
        with self._lock:
            lost = len(self._events) if len(self._events) >= QUEUED_EVENTS_MAX else 0
            if lost:
                self._events = []
                self._lost += lost
            self._events.append(event)
            was_woken, self._is_woken = self._is_woken, True
        if not was_woken:
            self._wake()
        return lost

    def take(self) -> tuple[int, list[Event]]:
        """How many events were lost since the last call, and those that came after them, in order."""
        with self._lock:
            lost, self._lost = self._lost, 0
            events, self._events = self._events, []
            self._is_woken = False
            return lost, events


class Events:
    """Who watches what. Under the lock of the store."""

    def __init__(self) -> None:
        self._by_tenant: dict[bytes, list[Subscription]] = {}
        self.told_count = 0
        self.lost_count = 0

    @property
    def watcher_count(self) -> int:
        """Subscriptions of all tenants."""
        return sum(map(len, self._by_tenant.values()))

    def subscribe(self, subscription: Subscription) -> None:
        """From now on it is told what happens to objects of its tenant."""
        self._by_tenant.setdefault(subscription.tenant, []).append(subscription)

    def unsubscribe(self, subscription: Subscription) -> None:
        """Tell it no more. Idempotent."""
        watchers = self._by_tenant.get(subscription.tenant, [])
        if subscription in watchers:
            watchers.remove(subscription)
            if not watchers:
                del self._by_tenant[subscription.tenant]

    def tell(self, key: bytes, removal: Removal | None) -> None:
        """Tell those who watch the tenant of ``key``, and nobody else."""
        if not self._by_tenant:
            return
        for subscription in self._by_tenant.get(key[:TENANT_BYTES], ()):
            self.told_count += 1
            self.lost_count += subscription.tell(Event(key, removal))
