"""Tells the service manager's watchdog that requests are served; a daemon that cannot is killed and restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from hicache.daemon.service_manager import ServiceManager
from hicache.daemon.tasks import end

FEEDS_PER_PERIOD = 6  # so a loop that was held up for three quarters of a period is still in time
# A medium may be slow for a while, and a restart does not make it faster: /healthz says so at once, the watchdog later.
STORAGE_PATIENCE_S = 60.0

log = structlog.get_logger("hicache.daemon")


class Watchdog:
    """Feeds from the event loop that serves requests: while that is stuck, nothing is fed. Event loop only."""

    def __init__(
        self,
        manager: ServiceManager,
        is_alive: Callable[[], bool],
        *,
        storage_patience_s: float = STORAGE_PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_alive`` says whether the storage answers. One that does not for longer ends the feeding."""
        self._manager = manager
        self._is_alive = is_alive
        self._storage_patience_s = storage_patience_s
        self._clock = clock
        self._answered_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to feed, where a watchdog wants that."""
        if self._manager.watchdog_s:
            self._answered_s = self._clock()
            self._task = asyncio.create_task(self._feed(), name="hicached-watchdog")

    async def stop(self) -> None:
        """Ends it. The manager's watchdog does not run while the service stops."""
        await end(self._task)

    async def _feed(self) -> None:
        is_starving = False
        while True:
            if self._is_alive():
                self._answered_s = self._clock()
            was_starving, is_starving = is_starving, self._clock() - self._answered_s > self._storage_patience_s
            if not is_starving:
                self._manager.alive()
            elif not was_starving:
                log.error("the storage does not answer: the watchdog is not fed", for_s=self._storage_patience_s)
            await asyncio.sleep(self._interval_s)

    @property
    def _interval_s(self) -> float:
        return self._manager.watchdog_s / FEEDS_PER_PERIOD
