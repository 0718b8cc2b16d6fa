"""Tasks of the event loop that run until they are ended."""

from __future__ import annotations

import asyncio


async def end(task: asyncio.Task[None] | None) -> None:
    """Cancel it and wait until it is over; nothing for None, or for one that is over."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
