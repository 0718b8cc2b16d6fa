"""The metrics of hicached. Labels come from fixed lists, and tenants' names from the tenants file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hicache.backends.base import Number
from hicache.ceiling import Ceiling
from hicache.daemon.call_tally import CallTally
from hicache.daemon.loop_delay import LoopDelay
from hicache.daemon.tenant_labels import TenantLabels


class Metrics:
    """All metrics of one daemon, in a registry of their own. Thread-safe."""

    def __init__(self, *, version: str, backend: str, tenants_max: int) -> None:
        """``tenants_max`` of the tenants have labels of their own."""
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="hicache", registry=self.registry)
        info = self._gauge("hicache_daemon_info", "Version and backend; always 1.", ("version", "backend"))
        info.labels(version=version, backend=backend).set(1)
        self.ready = self._gauge("hicache_ready", "1 when recovered and serving.")
        self.session_refusals = self._counter("hicache_session_refusals", "Hellos refused, by refusal code.", ("code",))
        self.region_refusals = self._counter("hicache_region_refusals", "Memory of clients that was refused.")
        self.host_refusals = self._counter("hicache_http_host_refusals", "HTTP requests with a foreign Host header.")
        self.tally = CallTally()
        self.registry.register(self.tally)
        self.loop_delay = LoopDelay()
        self.registry.register(self.loop_delay)
        self.ceiling = Ceiling()
        self.tenant_labels = TenantLabels(tenants_max)
        self.storage_errors = self._counter("hicache_storage_errors", "Storage calls that failed as a whole.")

    def _counter(self, name: str, description: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, description, labels, registry=self.registry)

    def _gauge(self, name: str, description: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(name, description, labels, registry=self.registry)

    def render(self) -> bytes:
        """The Prometheus text format: one at a time, in a thread, since that of thousands of tenants takes a while."""
        return generate_latest(self.registry)


Values = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Reading:
    """Numbers that are read, not counted, at each scrape: one, or one for each of a few values of ``labels``."""

    name: str
    description: str
    read: Callable[[], float | Values]
    labels: tuple[str, ...] = ()
    is_counter: bool = False


class Readings(Collector):
    """Exports numbers that live elsewhere: sessions, budgets, queues, the store."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = tuple(readings)

    def collect(self) -> Iterator[Metric]:
        """One family for each reading."""
        for reading in self._readings:
            kind = CounterMetricFamily if reading.is_counter else GaugeMetricFamily
            family = kind(reading.name, reading.description, labels=reading.labels)
            numbers = reading.read()
            for values, number in numbers.items() if isinstance(numbers, Mapping) else [((), numbers)]:
                family.add_metric(values, number)
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
