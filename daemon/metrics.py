"""The metrics of hicached. Labels come from fixed lists, and tenants' names from the tenants file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hicache.backends.base import Number
from hicache.outcome import Outcome

METHODS = ("Session", "Lookup", "Get", "Put", "GetStream", "PutStream", "Delete", "Lease", "Pin", "Watch", "Stats")
LASTING_METHODS = ("Session", "Watch")  # as long as the client wants: their time says nothing

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class CallResult:
    """How a call ended: ``ok``, a refusal code, ``deadline``, ``cancelled`` or ``error``."""

    name: str = "ok"


class Metrics:
    """All metrics of one daemon, in a registry of their own. Thread-safe."""

    def __init__(self, *, version: str, backend: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="hicache", registry=self.registry)
        info = self._gauge("hicache_daemon_info", "Version and backend; always 1.", ("version", "backend"))
        info.labels(version=version, backend=backend).set(1)
        self.ready = self._gauge("hicache_ready", "1 when recovered and serving.")
        self.session_refusals = self._counter("hicache_session_refusals", "Hellos refused, by refusal code.", ("code",))
        self.region_refusals = self._counter("hicache_region_refusals", "Memory of clients that was refused.")
        self.host_refusals = self._counter("hicache_http_host_refusals", "HTTP requests with a foreign Host header.")
        self.calls = self._counter(
            "hicache_calls",
            "Finished calls by method and result: ok, a refusal code, deadline, cancelled, error.",
            ("method", "result"),
        )
        self.calls_active = self._gauge("hicache_calls_active", "Calls that run now, by method.", ("method",))
        self.call_seconds = Histogram(
            "hicache_call_seconds", "Time of finished calls.", ("method",), buckets=_SECONDS, registry=self.registry
        )
        self.items = self._counter("hicache_items", "Keys handled, by method and outcome.", ("method", "outcome"))
        self.transferred = self._counter(
            "hicache_transferred_bytes", "Payload moved, by method, of items whose outcome is OK.", ("method",)
        )
        self.storage_errors = self._counter("hicache_storage_errors", "Storage calls that failed as a whole.")
        for method in METHODS:
            self.calls_active.labels(method=method).set(0)

    def _counter(self, name: str, description: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, description, labels, registry=self.registry)

    def _gauge(self, name: str, description: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(name, description, labels, registry=self.registry)

    @contextmanager
    def call(self, method: str) -> Iterator[CallResult]:
        """Counts and times one call; the block sets the result's name when it is not ok."""
        result = CallResult()
        active = self.calls_active.labels(method=method)
        started = time.perf_counter()
        active.inc()
        try:
            yield result
        finally:
            active.dec()
            self.calls.labels(method=method, result=result.name).inc()
            if method not in LASTING_METHODS:
                self.call_seconds.labels(method=method).observe(time.perf_counter() - started)

    def count_items(self, method: str, outcomes: Iterable[Outcome]) -> None:
        """Counts the outcomes of one batch."""
        numbers = bytes(outcomes)
        for number in set(numbers):
            name = Outcome(number).name.lower()
            self.items.labels(method=method, outcome=name).inc(numbers.count(number))

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


@dataclass(frozen=True, slots=True)
class Reading:
    """One number that is read, not counted, at each scrape."""

    name: str
    description: str
    read: Callable[[], float]
    is_counter: bool = False


@dataclass(frozen=True, slots=True)
class LabelledReading:
    """One number for each of a few values of a label."""

    name: str
    description: str
    label: str
    read: Callable[[], Mapping[str, float]]
    is_counter: bool = False


class Readings(Collector):
    """Exports numbers that live elsewhere: sessions, budgets, queues, the store."""

    def __init__(self, readings: Iterable[Reading | LabelledReading]) -> None:
        self._readings = tuple(readings)

    def collect(self) -> Iterator[Metric]:
        """One family for each reading."""
        for reading in self._readings:
            kind = CounterMetricFamily if reading.is_counter else GaugeMetricFamily
            if isinstance(reading, Reading):
                yield kind(reading.name, reading.description, value=reading.read())
                continue
            family = kind(reading.name, reading.description, labels=(reading.label,))
            for value, number in reading.read().items():
                family.add_metric((value,), number)
            yield family


class BackendNumbers(Collector):
    """Exports what a backend tells about itself beside what every backend has."""

    def __init__(self, numbers: Callable[[], Iterable[Number]]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        """One sample for each number."""
        for number in self._numbers():
            family = CounterMetricFamily if number.is_counter else GaugeMetricFamily
            yield family(number.name, number.description, value=number.value)
