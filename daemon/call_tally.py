"""What the calls of clients come to: every call and every key from the question to its end, under one lock."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hicache.exposition import counter, gauge, histogram
from hicache.histogram import Histogram
from hicache.outcome import Outcome

METHODS = (
    "Session",
    "Lookup",
    "Get",
    "Put",
    "GetStream",
    "PutStream",
    "Delete",
    "Lease",
    "Pin",
    "Watch",
    "Stats",
    "Report",
)
LASTING_METHODS = ("Session", "Watch")  # as long as the client wants: their time says nothing


@dataclass(slots=True)
class CallResult:
    """How a call ended: ``ok``, a refusal code, ``deadline``, ``cancelled`` or ``error``."""

    name: str = "ok"


@dataclass(slots=True)
class Items:
    """The keys of one call. ``outcomes`` may be a list that is filled in until the call is over."""

    outcomes: Sequence[Outcome]
    sizes_bytes: Sequence[int] = ()  # of the payloads, where there are any

    @property
    def moved_bytes(self) -> int:
        """The payload of those that are OK."""
        sizes = zip(self.outcomes, self.sizes_bytes, strict=False)
        return sum(size_bytes for outcome, size_bytes in sizes if outcome is Outcome.OK)


@dataclass(frozen=True, slots=True)
class Tally:
    """All of one moment. For every method ``started == sum(finished) + active``, and the same of ``keys``."""

    started: Mapping[str, int]  # calls, by method
    finished: Mapping[tuple[str, str], int]  # by method and result
    active: Mapping[str, int]
    seconds: Mapping[str, Histogram]  # of finished calls, without LASTING_METHODS
    keys_started: Mapping[str, int]
    keys_finished: Mapping[tuple[str, str], int]  # by method and outcome
    keys_active: Mapping[str, int]
    moved_bytes: Mapping[str, int]  # payload of the keys that are OK
    object_seconds: Mapping[tuple[str, str], Histogram]  # by operation of the store and class of object


@dataclass(slots=True)
class _Counts:
    started: Counter[str] = field(default_factory=Counter)
    finished: Counter[tuple[str, str]] = field(default_factory=Counter)
    active: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(METHODS, 0)))


class CallTally(Collector):
    """Thread-safe. One reading of it is one moment, so that its sums hold at every scrape."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls, self._keys = _Counts(), _Counts()
        self._seconds: dict[str, Histogram] = {}
        self._moved_bytes: Counter[str] = Counter()
        self._object_seconds: dict[tuple[str, str], Histogram] = {}

    @contextmanager
    def call(self, method: str) -> Iterator[CallResult]:
        """Counts and times one call; the block sets the result's name when it is not ok."""
        result = CallResult()
        started_s = time.perf_counter()
        with self._lock:
            self._calls.started[method] += 1
            self._calls.active[method] += 1
        try:
            yield result
        finally:
            elapsed_s = time.perf_counter() - started_s
            with self._lock:
                self._calls.active[method] -= 1
                self._calls.finished[method, result.name] += 1
                if method not in LASTING_METHODS:
                    self._seconds.setdefault(method, Histogram()).observe(elapsed_s)

    @contextmanager
    def keys(self, method: str, count: int) -> Iterator[Items]:
        """Counts the keys of one call. CANCELLED, unless the block says what became of them."""
        items = Items([Outcome.CANCELLED] * count)
        with self._lock:
            self._keys.started[method] += count
            self._keys.active[method] += count
        try:
            yield items
        finally:
            outcomes = Counter(items.outcomes)
            assert outcomes.total() == count, "every key has an outcome"
            moved_bytes = items.moved_bytes
            with self._lock:
                self._keys.active[method] -= count
                for outcome, number in outcomes.items():
                    self._keys.finished[method, outcome.name.lower()] += number
                self._moved_bytes[method] += moved_bytes

    def moved(self, operation: str, classes: Mapping[str, int], seconds: float) -> None:
        """The store has moved so many objects of these classes in one call, which took so long."""
        with self._lock:
            for name, count in classes.items():
                self._object_seconds.setdefault((operation, name), Histogram()).observe(seconds, count=count)

    def read(self) -> Tally:
        """Everything at one moment."""
        with self._lock:
            return Tally(
                started=dict(self._calls.started),
                finished=dict(self._calls.finished),
                active=dict(self._calls.active),
                seconds={method: histogram.copy() for method, histogram in self._seconds.items()},
                keys_started=dict(self._keys.started),
                keys_finished=dict(self._keys.finished),
                keys_active=dict(self._keys.active),
                moved_bytes=dict(self._moved_bytes),
                object_seconds={name: histogram.copy() for name, histogram in self._object_seconds.items()},
            )

    def collect(self) -> Iterator[Metric]:
        """See docs/metrics.md."""
        tally = self.read()
        yield counter("hicache_calls_started", "Calls begun.", ("method",), tally.started)
        yield counter("hicache_calls", "Finished calls by method and result.", ("method", "result"), tally.finished)
        yield gauge("hicache_calls_active", "Calls that run now.", ("method",), tally.active)
        yield histogram("hicache_call_seconds", "Time of finished calls.", ("method",), tally.seconds)
        yield counter("hicache_items_started", "Keys asked about.", ("method",), tally.keys_started)
        yield counter(
            "hicache_items", "Keys handled, by method and outcome.", ("method", "outcome"), tally.keys_finished
        )
        yield gauge("hicache_items_active", "Keys of calls that run now.", ("method",), tally.keys_active)
        yield counter(
            "hicache_transferred_bytes", "Payload of items whose outcome is OK.", ("method",), tally.moved_bytes
        )
        yield histogram(
            "hicache_store_object_seconds",
            "Time of the storage call that an object was moved in.",
            ("operation", "class"),
            tally.object_seconds,
        )
