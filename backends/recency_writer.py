"""Writes times of use to the medium, in a thread of its own: nobody who uses an object waits for that."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from hicache.backends.base import Backend
from hicache.backends.catalog import Catalog
from hicache.errors import BackendError
from hicache.notices import Notices
from hicache.workers import QueueFull, Workers

TOUCH_INTERVAL_S = 60.0  # between two times that they are written
TOUCH_KEYS_MAX = 1024  # in one call of the backend, which others may wait for
TOUCH_CLOSE_S = 5.0  # what a close waits for times of use that are being written


class RecencyWriter:
    """Takes what was used since from the catalog, every TOUCH_INTERVAL_S. Thread-safe."""

    def __init__(self, backend: Backend, catalog: Catalog, *, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._catalog = catalog
        self._clock = clock
        self._written_at_s = clock()
        self._notices = Notices(logging.getLogger(__name__))
        self.worker = Workers("hicache-touch", threads=1, queue_max=1)

    def write_when_due(self) -> None:
        """Wake the thread that does; when it is at work already, what is pending waits for the next time."""
        if self._clock() - self._written_at_s < TOUCH_INTERVAL_S:
            return
        with contextlib.suppress(QueueFull):  # or closed
            self.worker.submit(self._write_quietly)

    def write(self) -> None:
        """Write what has come up since the last time. Raises BackendError."""
        self._written_at_s = self._clock()
        start: int | None = 0
        while start is not None:
            with self._catalog.lock:
                touched, start = self._catalog.residents.take_touched(start, count_max=TOUCH_KEYS_MAX)
            if touched:
                self._backend.touch(touched)

    def close(self) -> None:
        """Write the rest. Where the medium is stuck in a write for TOUCH_CLOSE_S, the rest is given up."""
        if self.worker.close(timeout_s=TOUCH_CLOSE_S):
            self.write()

    def _write_quietly(self) -> None:
        try:
            self.write()
        except BackendError as error:
            self._notices.warning("touch", "times of use could not be written: %s", error)
