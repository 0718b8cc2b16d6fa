"""What the storage last said of itself: asked again and again, so that no probe waits for a thread to have its turn."""

from __future__ import annotations

import asyncio

from hicache.daemon.storage import NO_ANSWER, Storage
from hicache.daemon.tasks import end

ASK_EVERY_S = 0.25


class Health:
    """Event loop only. Before ``start``, all is well."""

    def __init__(self) -> None:
        self._storage: Storage | None = None
        self._said = ""
        self._task: asyncio.Task[None] | None = None

    def start(self, storage: Storage) -> None:
        """There is a storage, which is asked from here on."""
        self._storage = storage
        self._task = asyncio.create_task(self._ask(storage), name="hicached-health")

    async def stop(self) -> None:
        """Ends it. Idempotent."""
        await end(self._task)

    @property
    def problem(self) -> str:
        """See ``Storage.problem``; what it said is at most ASK_EVERY_S old, and the time that the answer took.

        NO_ANSWER after two questions in a row without an answer.
        """
        return NO_ANSWER if self._storage is not None and self._storage.is_stuck else self._said

    @property
    def is_alive(self) -> bool:
        """Whether the storage answers."""
        return self.problem != NO_ANSWER

    async def _ask(self, storage: Storage) -> None:
        is_late = False
        while True:
            was_late, said = is_late, await storage.problem()
            is_late = said == NO_ANSWER
            if was_late or not is_late:  # once may be for want of a core
                self._said = said
            await asyncio.sleep(ASK_EVERY_S)
