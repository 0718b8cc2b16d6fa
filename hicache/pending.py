"""A job that is being worked on: settles item by item, completes exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hicache.jobs import Completion
from hicache.outcome import Outcome


class PendingJob:
    """Thread-safe. ``finish`` is called once, by whoever settles the last item, outside of all locks."""

    def __init__(
        self,
        job_id: int,
        item_count: int,
        *,
        kind: str,
        clock: Callable[[], float],
        finish: Callable[[PendingJob, Completion], None],
    ) -> None:
        self.job_id = job_id
        self.kind = kind
        self._outcomes: list[Outcome | None] = [None] * item_count
        self._unsettled = item_count
        self._clock = clock
        self._finish = finish
        self._lock = threading.Lock()
        self._started_at_s: float | None = None
        self._is_over = False

    def start(self) -> bool:
        """Begin to work on it; False when it has been given up before, and nothing may be touched for it."""
        with self._lock:
            if self._is_over:
                return False
            self._started_at_s = self._clock()
            return True

    def settle(self, items: Sequence[int], outcomes: Sequence[Outcome]) -> bool:
        """Set the outcomes of items by their index. The first outcome of an item stays.

        Returns False when none of them was open any more.
        """
        with self._lock:
            open_items = [(item, outcome) for item, outcome in zip(items, outcomes, strict=True) if self._is_open(item)]
            for item, outcome in open_items:
                self._outcomes[item] = outcome
            self._unsettled -= len(open_items)
            completion = self._completion_if_settled()
        if completion is not None:
            self._finish(self, completion)
        return bool(open_items)

    def settle_rest(self, outcome: Outcome) -> bool:
        """Give every open item ``outcome``, which completes the job. Returns False when it was complete already."""
        with self._lock:
            if self._is_over:
                return False
            self._outcomes = [outcome if settled is None else settled for settled in self._outcomes]
            self._unsettled = 0
            completion = self._completion_if_settled()
        assert completion is not None
        self._finish(self, completion)
        return True

    def give_up_unstarted(self, outcome: Outcome) -> bool:
        """Complete with ``outcome`` for all items unless work on them has begun. Returns whether it did."""
        with self._lock:
            if self._is_over or self._started_at_s is not None:
                return False
            self._outcomes = [outcome] * len(self._outcomes)
            self._unsettled = 0
            completion = self._completion_if_settled()
        assert completion is not None
        self._finish(self, completion)
        return True

    def _is_open(self, item: int) -> bool:
        return not self._is_over and self._outcomes[item] is None

    def _completion_if_settled(self) -> Completion | None:
        """The completion, the first time that every item is settled. Call with the lock held."""
        if self._unsettled or self._is_over:
            return None
        self._is_over = True
        seconds = 0.0 if self._started_at_s is None else self._clock() - self._started_at_s
        outcomes = tuple(outcome for outcome in self._outcomes if outcome is not None)
        assert len(outcomes) == len(self._outcomes)
        return Completion(self.job_id, outcomes, seconds)
