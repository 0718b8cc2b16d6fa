"""The pump: tells the directory what has been done, hands out what it wants done, and waits, all under one lock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hicache.executor import Executor
from hicache.job_times import JobTimes
from hicache.jobs import Completion, Job
from hicache.ranks.leader import RankLinks


class Decides(Protocol):
    """A directory: emits jobs, and is told what became of them."""

    @property
    def has_jobs(self) -> bool: ...

    def take_jobs(self) -> list[Job]: ...

    def tell_time(self, now_s: float) -> None: ...

    def complete(self, completion: Completion, *, rank: int = 0) -> None: ...

    def lose_rank(self, rank: int, reason: str) -> None: ...

    def is_open(self, job_id: int) -> bool: ...


class Pump:
    """``changed`` is the lock of the directory, and notified when anything of it may have changed.

    What other threads report waits in an inbox until a thread has the lock: ``complete`` and ``lose`` may be called
    from any thread, and from within ``pump``, when a job is done at once.
    """

    def __init__(
        self,
        directory: Decides,
        executor: Executor | None,
        links: RankLinks,
        *,
        times: JobTimes,
        clock: Callable[[], float],
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._directory = directory
        self._executor = executor
        self._links = links
        self._clock = clock
        self.times = times  # with the lock held
        self._inbox: deque[Callable[[], None]] = deque()
        self._jobs: deque[Job] = deque()
        self._is_pumping = False
        self.is_closed = False  # waits end

    def complete(self, rank: int, completion: Completion) -> None:
        """One rank has done a job."""
        now_s = self._clock()
        self._inbox.append(lambda: self._done(rank, completion, now_s))
        with self.changed:
            self.pump()

    def _done(self, rank: int, completion: Completion, now_s: float) -> None:
        self._directory.tell_time(now_s)
        self._directory.complete(completion, rank=rank)
        if not self._directory.is_open(completion.job_id):
            self.times.end(completion.job_id, now_s)

    def lose(self, rank: int, reason: str) -> None:
        """A rank is gone for good."""
        self._inbox.append(lambda: self._lost(rank, reason))
        with self.changed:
            self.pump()

    def _lost(self, rank: int, reason: str) -> None:
        self._directory.lose_rank(rank, reason)
        self.times.end_all(self._directory.is_open, self._clock())

    # -- with the lock held ------------------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Tell the directory what is done and hand out what it wants next, until there is neither.

        Returns whether the directory was told anything.
        """
        if self._is_pumping:  # a job that was done at once: the loop below takes its completion
            return False
        self._is_pumping = True
        has_told = False
        try:
            while True:
                while self._inbox:
                    self._inbox.popleft()()
                    has_told = True
                self._jobs.extend(self._directory.take_jobs())
                if not self._jobs and not self._inbox:
                    break
                while self._jobs:  # one that is interrupted leaves the others for the next call
                    job = self._jobs.popleft()
                    self.times.begin(job, self._clock())
                    self._links.submit(job)  # first: the other ranks work on it meanwhile
                    if self._executor is not None:
                        self._executor.submit(job)
        finally:
            self._is_pumping = False
        self.changed.notify_all()
        return has_told

    def wait_while(self, is_under_way: Callable[[], bool], *, deadline_s: float) -> bool:
        """Let others go on until it is over. False when it still is under way at the deadline, or at the end."""
        while is_under_way():
            left_s = deadline_s - self._clock()
            if left_s <= 0 or self.is_closed:
                return False
            self.changed.wait(left_s)
        return True

    def attempt(self, is_done: Callable[[bool], bool], *, timeout_s: float) -> bool:
        """Try again whenever something has changed, until it works or the time is over: whether it has worked.

        ``is_done`` is told whether to be patient (see ``Directory.extend``): always but for the last time.
        """
        deadline_s = self._clock() + timeout_s
        while True:
            left_s = deadline_s - self._clock()
            done = is_done(left_s > 0)
            # Without jobs, waking others would only make them try, and wake us.
            has_changed = self._directory.has_jobs and self.pump()
            if done or left_s <= 0 or self.is_closed:
                return done
            if not has_changed:  # else a job was done, or refused, at once: nobody is going to wake us for that
                self.changed.wait(left_s)
