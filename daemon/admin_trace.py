"""The verb `trace`: what clients ask for, as a stream to whoever records it."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from aiohttp import web

from hicache.admin.store_messages import TraceRequest
from hicache.admin.verbs import TRACE
from hicache.daemon.admin_api import AdminApi, AdminError, Call
from hicache.daemon.recorder import Recorders, TraceRecorder
from hicache.errors import ConfigError

RECORDERS_MAX = 3  # at a time, that of trace_file among them
QUEUED_LINES_MAX = 256
SECONDS_MAX = 86_400.0
BYTES_MAX = 1 << 40
BLOCK_TOKENS_MAX = 65_536


class _Lines:
    """Takes lines in the thread of a recorder and hands them to an event loop; those that find it full are left out."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUED_LINES_MAX)

    def write(self, line: bytes, /) -> None:
        self._pass(line)

    def close(self) -> None:
        self._pass(b"")

    def _pass(self, line: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who reads
            self._loop.call_soon_threadsafe(self._put, line)

    def _put(self, line: bytes) -> None:
        if not line and self.queue.full():
            self.queue.get_nowait()  # the end is told all the same
        with contextlib.suppress(asyncio.QueueFull):
            self.queue.put_nowait(line)


def serve_trace_verb(admin: AdminApi, recorders: Recorders) -> None:
    """From now on a trace can be asked for."""
    admin.serve_stream(TRACE, partial(_trace, recorders))


async def _trace(recorders: Recorders, call: Call[TraceRequest], request: web.Request) -> web.StreamResponse:
    wanted = call.body
    _check(wanted)
    if len(recorders) >= RECORDERS_MAX:
        raise AdminError(409, f"trace: {len(recorders)} are recorded already, {RECORDERS_MAX} are the most; end one")
    lines = _Lines(asyncio.get_running_loop())
    recorder = TraceRecorder(lines, bytes_max=wanted.bytes_max, block_tokens=wanted.block_tokens)
    recorders.add(recorder)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    try:
        await response.prepare(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wanted.seconds):
                await _pass_on(lines, response)
    finally:
        recorders.remove(recorder)
        recorder.end()
    await response.write_eof()
    return response


async def _pass_on(lines: _Lines, response: web.StreamResponse) -> None:
    while line := await lines.queue.get():
        await response.write(line)


def _check(wanted: TraceRequest) -> None:
    for name, value, most in (
        ("seconds", wanted.seconds, SECONDS_MAX),
        ("bytes_max", wanted.bytes_max, BYTES_MAX),
        ("block_tokens", wanted.block_tokens, BLOCK_TOKENS_MAX),
    ):
        if not 0 < value <= most:
            raise ConfigError(name, value, f"more than 0 and at most {most:g}")
