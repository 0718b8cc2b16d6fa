"""What the store says about itself: asked in this one place, for /metrics and for the status alike."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hicache.admin.status import TENANTS_SHOWN
from hicache.backends.base import Usage
from hicache.backends.store_stats import StoreStats, TenantStats
from hicache.daemon.storage import Storage, Store
from hicache.daemon.tenants import Tenant, Tenants, TenantSettings
from hicache.errors import BackendError
from hicache.workers import QueueFull

LOOK_TIMEOUT_S = 0.5
TENANTS_AT_ONCE = 128  # the store holds its lock for so many at a time


@dataclass(frozen=True, slots=True)
class StoreLook:
    """What the store said of itself at one moment."""

    at_s: float  # of a clock that only goes on
    usage: Usage
    stats: StoreStats
    tenants: Mapping[Tenant, TenantStats] = field(default_factory=dict)
    fullest: Sequence[tuple[Tenant, TenantStats]] = ()  # the TENANTS_SHOWN of them nearest to a limit, nearest first

    @classmethod
    def at(
        cls,
        store: Store,
        settings: Mapping[Tenant, TenantSettings] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> StoreLook:
        """Asks the store, and about every tenant that has ``settings``; blocking.

        The tenants are asked for in parts, so that nobody waits for the store's lock for all of them.
        """
        settings = settings or {}
        at_s, usage, stats, tenants = clock(), store.usage(), store.stats(), list(settings)
        of_tenants: list[TenantStats] = []
        for start in range(0, len(tenants), TENANTS_AT_ONCE):
            of_tenants += store.tenant_stats([tenant.digest for tenant in tenants[start : start + TENANTS_AT_ONCE]])
        by_tenant = dict(zip(tenants, of_tenants, strict=True))

        def fullness(item: tuple[Tenant, TenantStats]) -> tuple[float, int]:
            return _fullness(settings[item[0]], item[1], usage.capacity_bytes)

        return cls(at_s, usage, stats, by_tenant, heapq.nlargest(TENANTS_SHOWN, by_tenant.items(), key=fullness))


def _fullness(limits: TenantSettings, used: TenantStats, capacity_bytes: int) -> tuple[float, int]:
    """The larger share of its quotas, or of the capacity where it has none."""
    shares = [used.stored_bytes / (limits.quota_bytes or capacity_bytes or 1)]
    if limits.quota_objects:
        shares.append(used.objects / limits.quota_objects)
    return max(shares), used.stored_bytes


class StoreLooks:
    """The latest look: taken in a control thread, never in the event loop. Event loop only, but for ``last``."""

    def __init__(self, storage: Storage, tenants: Tenants, first: StoreLook) -> None:
        self.last = first
        self._storage = storage
        self._tenants = tenants
        self._turn = asyncio.Lock()  # of two looks at a time the earlier one might come last

    async def refresh(self) -> None:
        """Looks again. A store that does not answer soon goes on showing its last numbers."""
        look = partial(StoreLook.at, self._storage.store, self._tenants.settings)
        with contextlib.suppress(TimeoutError, QueueFull, BackendError):
            async with asyncio.timeout(LOOK_TIMEOUT_S), self._turn:
                self.last = await self._storage.ask(look, timeout_s=LOOK_TIMEOUT_S)
