"""A few threads that work on one kind of job, so that one kind never holds up another."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

Task = Callable[[], object]

_LOG = logging.getLogger(__name__)


class Lane:
    """Tasks run in the order they were given, on ``thread_count`` threads.

    The queue has no bound of its own: the owner bounds the tasks it has open. A task that raises is a
    defect, which is logged and costs the thread nothing. Threads are daemonic: an engine that ends without ``stop`` is
    not held up.
    """

    def __init__(self, name: str, *, thread_count: int) -> None:
        self.name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"hicache-{name}-{index}", daemon=True)
            for index in range(thread_count)
        ]
        self._lock = threading.Lock()
        self._is_stopped = False
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> bool:
        """Queue a task; never blocks. Returns False after ``stop``: it will not run."""
        with self._lock:
            if self._is_stopped:
                return False
            self._tasks.put(task)
            return True

    def stop(self) -> None:
        """Let the threads end after what is queued now. Does not wait. Idempotent."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            for _ in self._threads:
                self._tasks.put(None)

    def join(self, *, timeout_s: float) -> bool:
        """Wait for the threads to end, except for the calling one. Returns whether all have."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                _LOG.exception("a task of the %s lane failed", self.name)
            del task  # what it refers to must not live until the next one comes
