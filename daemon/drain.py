"""From full service to none: nothing new is begun, and what runs or is leased is served until a deadline."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from hicache.daemon.service_manager import ServiceManager
from hicache.daemon.sessions import Sessions
from hicache.daemon.stopping import STOP_S_MAX

DRAIN_S_MAX = 3600.0
POLL_S = 0.01
TELL_S = 1.0  # how often the service manager hears how it goes

log = structlog.get_logger("hicache.daemon")


@dataclass(frozen=True, slots=True)
class Held:
    """What keeps a daemon from being drained."""

    sessions: int  # these do not: they end with it
    calls: int
    leases: int

    @property
    def is_nothing(self) -> bool:
        """Whether nobody would miss the daemon."""
        return not self.calls and not self.leases

    def __str__(self) -> str:
        return f"{self.calls} calls, {self.leases} leases, {self.sessions} sessions"


class Drain:
    """Begun by SIGTERM, or by a verb; then the daemon stops. Event loop only."""

    def __init__(
        self,
        manager: ServiceManager,
        *,
        on_begin: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.begun = asyncio.Event()
        self._manager = manager
        self._on_begin = on_begin
        self._clock = clock
        self._until_s = math.inf
        self._is_given_up = False
        self._sessions: Sessions | None = None
        self._busy_calls: Callable[[], int] = lambda: 0

    def watch(self, sessions: Sessions, *, busy_calls: Callable[[], int]) -> None:
        """There are clients from now on; ``busy_calls`` says how many of their calls run."""
        self._sessions, self._busy_calls = sessions, busy_calls

    def begin(self, *, within_s: float) -> None:
        """Refuses what is new from now on, and lets ``wait`` wait for so long. Asked again, the earlier end holds."""
        self._until_s = min(self._until_s, self._clock() + within_s)
        if self.begun.is_set():
            return
        self.begun.set()
        self._on_begin()
        self._manager.stopping(f"draining: {self.held}", within_s=within_s + STOP_S_MAX)
        if self._sessions is not None:
            self._sessions.drain()
            log.info("draining", within_s=within_s, held=str(self.held))

    async def wait(self) -> None:
        """Returns when nothing is held any more, or at the deadline."""
        tell_at_s = self._clock() + TELL_S
        while not (held := self.held).is_nothing and (now_s := self._clock()) < self._until_s:
            if now_s >= tell_at_s:
                tell_at_s = now_s + TELL_S
                self._manager.busy(f"draining: {held}", within_s=self._until_s - now_s + STOP_S_MAX)
            await asyncio.sleep(POLL_S)
        if not self.held.is_nothing and not self._is_given_up:
            self._is_given_up = True
            log.warning("not drained in time; what is left ends here", held=str(self.held))

    @property
    def held(self) -> Held:
        """How it stands."""
        sessions = list(self._sessions or ())
        now_s = self._clock()
        return Held(len(sessions), self._busy_calls(), sum(session.lease_count(now_s) for session in sessions))
