"""What a worker knows about its own stores: which of them were under way at a given moment."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from hicache.l3 import L3, Done, L3Item
from hicache.outcome import Outcome

OBJECTS_MIN = 4  # a store of fewer objects is over too soon to be met half-way
DURATIONS_MAX = 64
_STORED = (Outcome.OK, Outcome.EXISTS)


@dataclass(frozen=True, slots=True)
class StoreBegun:
    """A store has begun, and how long those before it took. Seconds of CLOCK_MONOTONIC, which all processes share."""

    began_at_s: float
    expected_s: float

    @property
    def halfway_s(self) -> float:
        """When it should be in its middle."""
        return self.began_at_s + self.expected_s / 2


@dataclass(slots=True)
class _Store:
    began_at_s: float
    ended_at_s: float | None = None
    failed_count: int = 0


class StoreWatch:
    """Wraps ``put`` of L3 clients. Thread-safe. After ``arm``, the next store is told through ``signal``, once."""

    def __init__(self, signal: Connection) -> None:
        self._signal = signal
        self._lock = threading.Lock()
        self._is_armed = False
        self._stores: list[_Store] = []  # begun since ``arm``
        self._durations_s: deque[float] = deque(maxlen=DURATIONS_MAX)

    def watch(self, l3: L3) -> None:
        """From now on every ``put`` of ``l3`` is seen."""
        put = l3.put

        def watched(items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
            store = self._begin(len(items))

            def end(outcomes: list[Outcome]) -> None:
                self._end(store, outcomes)
                done(outcomes)

            put(items, timeout_s=timeout_s, done=end)

        setattr(l3, "put", watched)  # noqa: B010  the executor asks its client for `put` at each call

    def arm(self) -> None:
        """Forget what was seen, and tell of the next store."""
        with self._lock:
            self._stores.clear()
            self._is_armed = True

    def cut_off_count(self, moment_s: float) -> int:
        """Objects whose store had begun before ``moment_s``, had no answer then, and failed."""
        with self._lock:
            return sum(
                store.failed_count
                for store in self._stores
                if store.began_at_s < moment_s and store.ended_at_s is not None and store.ended_at_s >= moment_s
            )

    def _begin(self, object_count: int) -> _Store:
        store = _Store(time.monotonic())
        with self._lock:
            self._stores.append(store)
            if self._is_armed and object_count >= OBJECTS_MIN:
                self._is_armed = False
                expected_s = statistics.median(self._durations_s) if self._durations_s else 0.0
                self._signal.send(StoreBegun(store.began_at_s, expected_s))
        return store

    def _end(self, store: _Store, outcomes: Sequence[Outcome]) -> None:
        with self._lock:
            store.ended_at_s = time.monotonic()
            store.failed_count = sum(outcome not in _STORED for outcome in outcomes)
            if not store.failed_count:
                self._durations_s.append(store.ended_at_s - store.began_at_s)
