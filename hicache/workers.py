"""Threads for blocking storage calls: one that is stuck holds up neither the others nor the end of the process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """Too much work is waiting for a thread, or there is no thread; nothing was queued."""


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[T]):
    """Queued or running work. ``future`` is done only when no thread touches what the work touches."""

    work: Callable[[], T]
    future: Future[T]

    def run(self) -> None:
        """Runs the work in this thread, unless it was withdrawn."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work())
        except BaseException as error:
            self.future.set_exception(error)


class Workers:
    """A fixed number of threads, started with the first job, over one bounded first-in first-out queue.

    Differs from ThreadPoolExecutor where a daemon needs it: a withdrawn job leaves the queue at once, the queue has a
    bound, how long each thread has been busy can be asked, and threads that never come back are not joined at exit. Of
    the idle threads the one that has worked last goes on: a core is warm for it.
    """

    def __init__(self, name: str, *, threads: int, queue_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue: deque[Job[object]] = deque()
        self._queue_max = queue_max
        self._clock = clock
        self._running_since: dict[int, float] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._idle: list[threading.Lock] = []  # of idle threads, what each of them waits for; the latest last
        self.thread_count = threads
        self._name = name
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Queues ``work``. Raises QueueFull at the bound, when closed, and while the system has no thread to start."""
        job = Job(work, Future[T]())
        with self._lock:
            if self._closed or len(self._queue) >= self._queue_max:
                raise QueueFull
            self._start_missing()
            if not self._threads:
                raise QueueFull
            self._queue.append(job)  # type: ignore[arg-type]  # the queue only runs jobs: their result type is erased
            if self._idle:
                self._idle.pop().release()
        return job

    def _start_missing(self) -> None:
        """As many as the system has; the next job tries again."""
        with suppress(RuntimeError):  # a limit on threads, or on memory
            for index in range(len(self._threads), self.thread_count):
                thread = threading.Thread(target=self._work, name=f"{self._name}-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def withdraw(self, job: Job[T]) -> bool:
        """Takes a job back that no thread has started. False: it is running or done."""
        with self._lock:
            if job in self._queue:
                self._queue.remove(job)  # type: ignore[arg-type]  # as above
        return job.future.cancel()

    @property
    def queued_count(self) -> int:
        """Jobs that wait for a thread."""
        return len(self._queue)

    def busy_for_s(self) -> list[float]:
        """For each thread that runs a job, for how long it has."""
        with self._lock:
            now = self._clock()
            return [now - since for since in self._running_since.values()]

    def close(self, *, timeout_s: float) -> bool:
        """Cancels what is queued and waits for what runs. True when every thread has ended. Idempotent."""
        with self._lock:
            self._closed = True
            queued = list(self._queue)
            self._queue.clear()
            for wake in self._idle:
                wake.release()
            self._idle.clear()
        for job in queued:
            job.future.cancel()
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        wake = threading.Lock()
        wake.acquire()
        while (job := self._next_job(wake)) is not None:
            job.run()
            del job  # its results may hold memory of a client
            with self._lock:
                del self._running_since[threading.get_ident()]

    def _next_job(self, wake: threading.Lock) -> Job[object] | None:
        while True:
            with self._lock:
                if self._queue:
                    self._running_since[threading.get_ident()] = self._clock()
                    return self._queue.popleft()
                if self._closed:
                    return None
                self._idle.append(wake)
            wake.acquire()
