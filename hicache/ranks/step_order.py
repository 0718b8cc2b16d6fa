"""The order of a rank's copies against its compute: one row of numbers, in which jobs and steps take turns."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from hicache.errors import RankLost, UsageError
from hicache.jobs import Job

_LOG = logging.getLogger(__name__)


class StepOrder:
    """The leader numbers its jobs and the engine's steps together: 1, 2, 3, ... Each number is done in its turn.

        job 1 | job 2 | step 3: compute | job 4 | step 5: compute | ...

    A number that no job has is that of a step: the job after it waits until the step has been taken here. Jobs arrive
    in order; the step brings its number along with the engine's own message. So nothing is asked of the leader to
    begin a step, and what was computed before a job was emitted has been computed here, too, when it runs.
    """

    def __init__(self, run: Callable[[Job], None]) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Job | None]] = deque()
        self._done = 0  # every number up to it
        self._is_busy = False  # somebody is at number _done + 1
        self._step: int | None = None
        self._over: str | None = None

    def add(self, number: int, job: Job | None) -> None:
        """A job has come; None for one whose work has no place in the order."""
        with self._changed:
            self._waiting.append((number, job))
            self._changed.notify_all()

    def begin(self, step: int, *, timeout_s: float) -> None:
        """Run, in this thread, every job before ``step``, and then keep all others waiting until ``end``.

        Raises UsageError for a step that is not the next one, and RankLost when the jobs before it do not come.
        """
        until_s = time.monotonic() + timeout_s
        with self._changed:
            if self._step is not None:
                raise UsageError(f"step {step}: step {self._step} has not ended; a rank takes one step at a time")
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._can_go_on(step), until_s - time.monotonic()):
                    raise RankLost(f"step {step}: number {self._done + 1} has not come within {timeout_s:g} s")
                self._check_next(step)
                self._is_busy = True
                if self._done == step - 1:
                    self._step = step
                    return
                number, job = self._waiting.popleft()
            self._run_one(number, job)

    def end(self) -> None:
        """The step has been computed: what waits for it may run."""
        with self._changed:
            assert self._step is not None, "begin comes before end"
            self._done, self._step, self._is_busy = self._step, None, False
            self._changed.notify_all()

    def work(self) -> str:
        """Run jobs between steps, until ``close``. Returns its reason."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over is not None or (not self._is_busy and self._is_next_here()))
                if self._over is not None:
                    return self._over
                number, job = self._waiting.popleft()
                self._is_busy = True
            self._run_one(number, job)

    def close(self, reason: str) -> None:
        """Run nothing more, and end every wait: the first ``reason`` is what steps are told. Idempotent."""
        with self._changed:
            self._over = self._over or reason
            self._waiting.clear()
            self._changed.notify_all()

    def _run_one(self, number: int, job: Job | None) -> None:
        try:
            if job is not None:
                self._run(job)
        except Exception:  # a defect: the job is answered all the same, or its rank lost when that is late
            _LOG.exception("job %d failed", number)
        finally:
            with self._changed:
                self._done, self._is_busy = number, False
                self._changed.notify_all()

    def _is_next_here(self) -> bool:
        return bool(self._waiting) and self._waiting[0][0] == self._done + 1

    def _can_go_on(self, step: int) -> bool:
        """Call with the lock held."""
        if self._over is not None:
            return True
        return not self._is_busy and (self._done >= step - 1 or bool(self._waiting))

    def _check_next(self, step: int) -> None:
        """Call with the lock held."""
        if self._over is not None:
            raise RankLost(self._over)
        if self._done >= step:
            raise UsageError(f"step {step}: {self._done} is done already; every step is taken once, in order")
        if self._done < step - 1 and not self._is_next_here():
            raise UsageError(f"step {step}: step {self._done + 1} was never taken here; every rank takes every step")
