"""Long work on the store for the admin API, a step at a time in threads of its own, behind those who serve."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec
from aiohttp import web

from hicache.daemon.admin_api import AdminError
from hicache.daemon.authority import Caller
from hicache.errors import HiCacheError
from hicache.workers import Workers

STREAMS_MAX = 4  # at a time
STREAMS_OF_TENANTS_MAX = 2  # of these, one for each: operators find room whatever tenants do
SILENCE_S = 30.0  # of a client that takes nothing
NICENESS = 10  # of their threads
LINE_INTERVAL_S = 0.5

T = TypeVar("T")


class Background:
    """Runs the steps of iterators that block. Event loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: list[Caller] = []
        self._closing = asyncio.Event()

    def close(self) -> None:
        """What runs ends after its step, and nothing begins."""
        self._closing.set()

    @contextlib.asynccontextmanager
    async def steps(self, name: str, iterator: Iterator[T], *, caller: Caller) -> AsyncIterator[AsyncIterator[T]]:
        """What ``iterator`` yields, each step made in a thread; it is closed at the end of the block.

        Raises AdminError where too many run already, and at a step when the daemon stops.
        """
        self._check_room(name, caller)
        self._running.append(caller)
        workers = Workers("hicached-admin", threads=1, queue_max=2)
        try:
            yield self._each(name, workers, iterator)
        finally:
            self._running.remove(caller)
            if (end := getattr(iterator, "close", None)) is not None:
                workers.submit(end)  # behind a step that still runs
            workers.close(timeout_s=0)

    def _check_room(self, name: str, caller: Caller) -> None:
        if len(self._running) >= STREAMS_MAX or self._closing.is_set():
            text = f"{len(self._running)} of {STREAMS_MAX} long jobs run already; try again later"
            raise AdminError(503, f"{name}: {text}")
        tenants = [running.tenant for running in self._running if running.tenant]
        if caller.tenant and (caller.tenant in tenants or len(tenants) >= STREAMS_OF_TENANTS_MAX):
            text = f"a tenant has one long job at a time, and all tenants {STREAMS_OF_TENANTS_MAX}; try again later"
            raise AdminError(503, f"{name}: {text}")

    async def _each(self, name: str, workers: Workers, iterator: Iterator[T]) -> AsyncIterator[T]:
        workers.submit(_be_nice)
        while True:
            if self._closing.is_set():
                raise AdminError(503, f"{name} ended early: hicached is stopping")
            found = await asyncio.wrap_future(workers.submit(lambda: next(iterator, _END)).future)
            if found is _END:
                return
            yield found  # type: ignore[misc]  # _END is no T

    async def stream(
        self,
        request: web.Request,
        name: str,
        iterator: Iterator[T],
        *,
        caller: Caller,
        line: Callable[[T, bool], object],
        delay_s: Callable[[T, float], float] = lambda _, elapsed_s: 0.0,
    ) -> web.StreamResponse:
        """Answers with ``line(value, is_done)`` as JSON lines: the first, the last, and now and then one between them.

        After each step it waits as long as ``delay_s(value, seconds since the begin)`` says, which sets the pace. What
        fails in the middle becomes a last line with ``error``, behind one that says how far it came.
        """
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        async with self.steps(name, iterator, caller=caller) as steps:
            await response.prepare(request)
            started_s = told_s = self._clock()
            latest: T | None = None

            async def tell() -> None:
                """Also finds out that nobody reads any more: then the write raises ConnectionError, which ends all."""
                nonlocal told_s
                if latest is not None and self._clock() - told_s >= LINE_INTERVAL_S:
                    told_s = self._clock()
                    await write(response, _json_line(line(latest, False)))

            try:
                async for latest in steps:
                    await tell()
                    await self._pause(delay_s(latest, self._clock() - started_s), tell)
                assert latest is not None
                await write(response, _json_line(line(latest, True)))
            except (HiCacheError, AdminError) as error:
                if latest is not None:
                    await write(response, _json_line(line(latest, False)))
                await write(response, _json_line({"error": str(error)}))
        await response.write_eof()
        return response

    async def _pause(self, delay_s: float, tell: Callable[[], Awaitable[None]]) -> None:
        """A stop does not wait for it, and ``tell`` is asked all the while."""
        until_s = self._clock() + delay_s
        while (left_s := until_s - self._clock()) > 0 and not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LINE_INTERVAL_S)):
                    await self._closing.wait()
            await tell()


async def write(response: web.StreamResponse, part: bytes) -> None:
    """Sends a part. Raises ConnectionError where nobody takes it for SILENCE_S: a job does not wait for that."""
    try:
        async with asyncio.timeout(SILENCE_S):
            await response.write(part)
    except TimeoutError as error:
        raise ConnectionAbortedError(f"nobody took anything for {SILENCE_S:g} s") from error


_END = object()


def _json_line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _be_nice() -> None:
    """Threads of the store go first where cores are short."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
