"""Threads that help a call of a backend with a large batch: while one object is moved, so is another."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from hicache.workers import Job, QueueFull, Workers

HELPERS_MAX = 3  # a few threads move as much as the memory can
SHARED_BYTES_MIN = 8 << 20  # half a millisecond of work: far more than it takes to wake a thread
CLOSE_WAIT_S = 1.0

Item = TypeVar("Item")
Result = TypeVar("Result")


class Helpers:
    """Does the same work on many items in the thread that asks and, where cores are idle, in others. Thread-safe.

    Helpers join a call while fewer threads go through items than there are cores. No call waits for a helper that has
    not begun; one that is stuck holds up the call that it helps, as the medium would have, and no other.
    """

    def __init__(self, name: str) -> None:
        self._helpers_max = min(len(os.sched_getaffinity(0)) - 1, HELPERS_MAX)
        self._workers = Workers(name, threads=self._helpers_max, queue_max=self._helpers_max)
        self._lock = threading.Lock()
        self._moving = 0  # threads that go through items

    def map(self, work: Callable[[Item], Result], items: Sequence[Item], *, size_bytes: int) -> list[Result]:
        """``work`` of each item, in no particular order; ``size_bytes`` is what all of it moves.

        What ``work`` raises is raised here, when no thread touches any item any more; others may not be done then.
        """
        if size_bytes < SHARED_BYTES_MIN or len(items) < 2:
            return [work(item) for item in items]
        batch = _Batch(work, items)
        jobs = self._call_helpers(batch, len(items) - 1)
        self._go_through(batch)
        for job in jobs:
            if not self._workers.withdraw(job):
                job.future.result()
        if batch.errors:
            raise batch.errors.pop()
        return [batch.results[position] for position in range(len(items))]

    def _call_helpers(self, batch: _Batch[Item, Result], count_max: int) -> list[Job[None]]:
        jobs: list[Job[None]] = []
        with suppress(QueueFull):
            for _ in range(min(self._helpers_max - self._moving, count_max)):
                jobs.append(self._workers.submit(lambda: self._go_through(batch)))
        return jobs

    def _go_through(self, batch: _Batch[Item, Result]) -> None:
        with self._lock:
            self._moving += 1
        try:
            batch.go_through()
        finally:
            with self._lock:
                self._moving -= 1

    def close(self) -> None:
        """End the threads, except those that are stuck. Who is in ``map``, or comes later, goes on alone."""
        self._workers.close(timeout_s=CLOSE_WAIT_S)


class _Batch(Generic[Item, Result]):
    """Each item goes to one of the threads that go through it, until one of them fails."""

    def __init__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> None:
        self._work = work
        self.left = deque(enumerate(items))
        self.results: dict[int, Result] = {}
        self.errors: list[BaseException] = []  # the first one: a second would keep this, and memory of a client, alive

    def go_through(self) -> None:
        """Raises nothing, so that each thread can be waited for."""
        while self.left:
            try:
                position, item = self.left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                self.results[position] = self._work(item)
            except BaseException as error:
                self.left.clear()
                if not self.errors:
                    self.errors.append(error)
