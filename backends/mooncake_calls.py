"""Threads for calls that may hang: whoever makes one gets its own thread back in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from hicache.errors import BackendError

T = TypeVar("T")


class BoundedCalls:
    """A fixed number of daemon threads, which a process can end without. Thread-safe.

    When all of them hang, further calls wait for one up to their own timeout, and are never made.
    """

    def __init__(self, name: str, *, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue: SimpleQueue[_Call[object] | None] = SimpleQueue()
        self._lock = threading.Condition()
        self._free = threads
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> int:
        """Calls that have not come back."""
        with self._lock:
            return len(self._threads) - self._free

    def run(self, work: Callable[[], T], *, timeout_s: float, late: Callable[[T | None], None]) -> T | None:
        """What ``work`` returns. None: not in time, and then ``late`` is called once, in whichever thread, when nothing
        touches any more what ``work`` touches; with its result, or None where it failed or was never made.

        ``work`` returns no None. Raises what it raises, and BackendError after ``close``.
        """
        deadline_s = self._clock() + timeout_s
        if not self._take_thread(timeout_s):
            late(None)
            return None
        call = _Call(work, late)
        self._queue.put(call)  # type: ignore[arg-type]  # threads only run calls: their result type is erased
        return call.result(timeout_s=max(0.0, deadline_s - self._clock()))

    def _take_thread(self, timeout_s: float) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: self._free > 0 or self._is_closed, timeout=max(0.0, timeout_s))
            if self._is_closed:
                raise BackendError("the backend is closed")
            if self._free == 0:
                return False
            self._free -= 1
            return True

    def close(self, *, timeout_s: float) -> bool:
        """Refuse new calls and wait for the running ones; True when there are none left. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._threads:
                    self._queue.put(None)
            self._lock.notify_all()
            return self._lock.wait_for(lambda: self._free == len(self._threads), timeout=max(0.0, timeout_s))

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call.run()
            finally:
                del call  # what it holds must not live until the next one
                with self._lock:
                    self._free += 1
                    self._lock.notify_all()


class _Call(Generic[T]):
    """One call: its caller waits for it, or has left it to ``late``."""

    def __init__(self, work: Callable[[], T], late: Callable[[T | None], None]) -> None:
        self._work = work
        self._late = late
        self._changed = threading.Condition()
        self._is_done = self._is_abandoned = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._is_done = True
            self._changed.notify_all()
            is_abandoned = self._is_abandoned
        if is_abandoned:
            self._late(self._value)

    def result(self, *, timeout_s: float) -> T | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, timeout=timeout_s):
                self._is_abandoned = True
                return None
        if self._error is not None:
            raise self._error
        return self._value
