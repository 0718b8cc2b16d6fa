"""Turns of large batches in the event loop: however many there are, all else waits for one slice of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import TypeVar

from hicache.daemon.sessions import Session

T = TypeVar("T")

# About a millisecond of reading keys. A batch within it is small: it is read at once.
SLICE_KEYS = 1024

Steps = Generator[None, None, T]  # reads one slice, yields, reads the next; returns what it has read


class Turns:
    """Who may read a slice. Of each session one large batch is read at a time, so sessions come round in turn."""

    def __init__(self) -> None:
        self._slice = asyncio.Lock()

    @asynccontextmanager
    async def one_of(self, session: Session, key_count: int, *, deadline: float) -> AsyncIterator[None]:
        """The block runs when no other large batch of the session is in its own. Raises TimeoutError."""
        if key_count <= SLICE_KEYS:
            yield
            return
        async with asyncio.timeout_at(deadline):
            await session.large_batch.acquire()
        try:
            yield
        finally:
            session.large_batch.release()

    async def take(self, steps: Steps[T]) -> T:
        """Runs all steps, and everything else in between."""
        try:
            next(steps)
            while True:
                async with self._slice:
                    await asyncio.sleep(0)
                    next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
