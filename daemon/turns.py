"""Turns of large lookups: of each session one goes on at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hicache.daemon.sessions import Session

# About a millisecond of looking up keys. A batch within it is small.
LARGE_BATCH_KEYS = 1024


class Turns:
    """Whose large batch is next. Of each session there is one at a time, so sessions come round in turn."""

    @asynccontextmanager
    async def one_of(self, session: Session, key_count: int, *, deadline: float) -> AsyncIterator[None]:
        """The block runs when no other large batch of the session is in its own. Raises TimeoutError."""
        if key_count <= LARGE_BATCH_KEYS:
            yield
            return
        async with asyncio.timeout_at(deadline):
            await session.large_batch.acquire()
        try:
            yield
        finally:
            session.large_batch.release()
