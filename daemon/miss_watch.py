"""Says in hicached's log what clients did not get, and why: each reason once per interval, with counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from hicache.daemon.call_tally import Tally
from hicache.misses import OUTCOMES, Miss, MissKey, MissLog

INTERVAL_S = 5.0  # between two looks
FINE_RESULTS = ("ok", "cancelled")  # a client that goes is no fault

log = structlog.get_logger("hicache.daemon.misses")


class MissWatch:
    """A task that looks at the counters every INTERVAL_S."""

    def __init__(self, read: Callable[[], Tally], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._keys = MissLog(clock=clock)
        self._calls = MissLog(clock=clock)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. The task ends with ``stop``."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Say what is left, and end."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.look()

    def look(self) -> None:
        """Say what is new."""
        tally = self._read()
        keys: dict[MissKey, int] = {
            (method, outcome, "keys"): count
            for (method, outcome), count in tally.keys_finished.items()
            if outcome in OUTCOMES
        }
        for miss in self._keys.news(keys):
            _say(miss, miss.meaning.text, is_fault=miss.meaning.is_fault)
        calls: dict[MissKey, int] = {
            (method, result, "calls"): count
            for (method, result), count in tally.finished.items()
            if result not in FINE_RESULTS
        }
        for miss in self._calls.news(calls):
            _say(miss, "calls that failed as a whole: see Refusals in docs/hicached.md", is_fault=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.look()


def _say(miss: Miss, meaning: str, *, is_fault: bool) -> None:
    say = log.warning if is_fault else log.info
    say("miss", kind=miss.kind, reason=miss.reason, count=miss.count, unit=miss.unit, meaning=meaning)
