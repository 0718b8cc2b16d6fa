"""Keeps the history, has every subscriber see each change, and serves status, history and events."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from aiohttp import web

from hicache.admin.status import SAMPLE_S, Status
from hicache.admin.status import History as HistoryMessage
from hicache.admin.verbs import EVENTS, HISTORY, STATUS
from hicache.daemon.admin_api import AdminApi, AdminError, Call
from hicache.daemon.events import SUBSCRIBERS_MAX, EventHub, encode_event
from hicache.daemon.status import StatusReporter
from hicache.daemon.tasks import end
from hicache.notices import Notices

TICK_S = 1.0  # between two events of a subscriber: silence for longer means that the daemon is in trouble


class StatusFeed:
    """Event loop only. ``start`` it once; ``stop`` ends every stream."""

    def __init__(self, reporter: StatusReporter) -> None:
        self.reporter = reporter
        self.hub = EventHub()
        self._notices = Notices(logging.getLogger(__name__))
        self._task: asyncio.Task[None] | None = None

    def start(self, admin: AdminApi) -> None:
        """Begins the history, and serves the verbs."""
        admin.serve(STATUS, self._status)
        admin.serve(HISTORY, self._history)
        admin.serve_stream(EVENTS, self._events)
        self._task = asyncio.create_task(self._run(), name="hicached-status")

    async def stop(self) -> None:
        """A last status for everybody who listens, and the end of the stream. Idempotent."""
        if self._task is None:
            return
        await end(self._task)
        self._task = None
        await self._publish_status()
        self.hub.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        sample_at_s = tick_at_s = loop.time()
        while True:
            try:
                if loop.time() >= sample_at_s:
                    sample_at_s = max(sample_at_s + SAMPLE_S, loop.time())
                    sample = await self.reporter.sample()
                    if sample is not None:
                        self.hub.publish("sample", msgspec.json.encode(sample))
                await self._publish_status()
            except Exception as error:  # a mistake here must not end the history for good
                self._notices.error("status", "the status cannot be told: %r", error)
            tick_at_s = max(tick_at_s + TICK_S, loop.time())
            await asyncio.sleep(tick_at_s - loop.time())

    async def _publish_status(self) -> None:
        if len(self.hub):
            self.hub.publish("status", msgspec.json.encode(await self.reporter.status()))

    async def _status(self, _: Call[None]) -> Status:
        return await self.reporter.status()

    async def _history(self, _: Call[None]) -> HistoryMessage:
        return self.reporter.history()

    async def _events(self, _: Call[None], request: web.Request) -> web.StreamResponse:
        first = encode_event("status", msgspec.json.encode(await self.reporter.status()))
        if self.hub.is_full:
            raise AdminError(
                503, f"events have {SUBSCRIBERS_MAX} subscribers, which is the most; close one, or ask /v1/status"
            )
        return await self.hub.serve(request, first)
