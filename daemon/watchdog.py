"""Tells the service manager's watchdog that requests are served; a daemon that cannot is killed and restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from hicache.daemon.service_manager import ServiceManager

FEEDS_PER_PERIOD = 3
# A medium may be slow for a while, and a restart does not make it faster: /healthz says so at once, the watchdog later.
STORAGE_PATIENCE_S = 60.0

log = structlog.get_logger("hicache.daemon")


class Watchdog:
    """Feeds from the event loop that serves requests: while that is stuck, nothing is fed. Event loop only."""

    def __init__(
        self,
        manager: ServiceManager,
        is_alive: Callable[[], Awaitable[bool]],
        *,
        storage_patience_s: float = STORAGE_PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_alive`` asks the storage, in little time. One that does not answer for longer ends the feeding."""
        self._manager = manager
        self._is_alive = is_alive
        self._storage_patience_s = storage_patience_s
        self._clock = clock
        self._feeding: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to feed, where a watchdog wants that."""
        if self._manager.watchdog_s:
            self._feeding = asyncio.create_task(self._feed())

    async def stop(self) -> None:
        """Ends it. The manager's watchdog does not run while the service stops."""
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)

    async def _feed(self) -> None:
        answered_s, is_starving = self._clock(), False
        while True:
            if await self._is_alive():
                answered_s, is_starving = self._clock(), False
            if self._clock() - answered_s <= self._storage_patience_s:
                self._manager.alive()
            elif not is_starving:
                is_starving = True
                log.error("the storage does not answer: the watchdog is not fed", for_s=self._storage_patience_s)
            await asyncio.sleep(self._manager.watchdog_s / FEEDS_PER_PERIOD)
