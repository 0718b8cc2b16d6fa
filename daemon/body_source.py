"""The body of a request, read in a thread: what comes is waited for, for a bounded time, and never kept."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from aiohttp import StreamReader

from hicache.backends.archive import ArchiveError

SILENCE_S = 30.0  # of a client that sends nothing


class BodySource:
    """``read`` in one thread; the event loop reads the connection."""

    def __init__(self, content: StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        self._content = content
        self._loop = loop
        self._is_over = False
        self._left = memoryview(b"")
        self._waiting: Future[bytes] | None = None

    def read(self, size: int, /) -> bytes:
        """Raises ArchiveError where the client goes, or sends nothing for SILENCE_S."""
        if not self._left:
            self._left = memoryview(self._next())
        part = bytes(self._left[:size])
        self._left = self._left[len(part) :]
        return part

    def _next(self) -> bytes:
        if self._is_over:
            raise ArchiveError("the request has ended")
        self._waiting = asyncio.run_coroutine_threadsafe(self._content.readany(), self._loop)
        try:
            return self._waiting.result(SILENCE_S)
        except TimeoutError as error:
            self._waiting.cancel()
            raise ArchiveError(f"nothing came for {SILENCE_S:g} s") from error
        except Exception as error:  # of the connection, whatever it is
            raise ArchiveError(f"the connection broke off ({error!r})") from error

    def give_up(self) -> None:
        """The request has ended: whoever waits in ``read`` waits no more. Event loop only."""
        self._is_over = True
        if self._waiting is not None:
            self._waiting.cancel()
