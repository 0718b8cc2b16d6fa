"""What the store has to do when nobody calls: remove what has expired, and write down what is to outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from hicache.backends.namespaces import NamespaceNames
from hicache.daemon.storage import Storage
from hicache.notices import Notices

INTERVAL_S = 5.0
STEP_TIMEOUT_S = 60.0


class Upkeep:
    """A task that sweeps the store every INTERVAL_S, a bounded batch at a time, between the chunks of transfers."""

    def __init__(self, storage: Storage, names: NamespaceNames) -> None:
        self._storage = storage
        self._names = names
        self._notices = Notices(logging.getLogger(__name__))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. The task ends with ``stop``."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End it; a batch that runs goes on in its thread."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                while await self._storage.ask_bulk(self._storage.store.sweep, timeout_s=STEP_TIMEOUT_S):
                    pass
                await self._storage.ask_bulk(self._names.write, timeout_s=STEP_TIMEOUT_S)
            except Exception as error:  # a store that is busy or broken: there is a next time
                self._notices.warning("sweep", "the store could not be swept: %r", error)
