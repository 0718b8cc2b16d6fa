"""The metrics of an engine's cache for prometheus_client: ``REGISTRY.register(EngineCollector(cache))``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hicache.exposition import counter, gauge, histogram
from hicache.front import CacheFront, EngineReading, MeasuredDirectory
from hicache.samples import METRICS, Samples, l3_samples_of, samples_of

PREFIX = "hicache_engine_"


class EngineCollector(Collector):
    """Reads a ``HiCache`` or ``SlotCache`` at each scrape, all of it at one moment under its lock, so that every scrape
    adds up: see docs/metrics.md. Of several ranks, ``l3_`` is that of the rank in this process."""

    def __init__(self, cache: CacheFront[MeasuredDirectory]) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """See docs/metrics.md."""
        reading = self._cache.read()
        samples = samples_of(reading.stats)
        status = getattr(self._cache.l3, "status", None)  # an L3 in this process has none
        if status is not None:
            samples |= l3_samples_of(status(), rank=0)
        yield from _of_samples(samples)
        yield from _of_jobs(reading)
        yield from _of_slots(reading)
        expirations_s: dict[str, float] = getattr(self._cache.l3, "certificate_expirations_s", dict)()
        yield gauge(
            PREFIX + "tls_certificate_expiration_timestamp_seconds",
            "When the first certificate ends that the engine shows to hicached (client), or checks it with (ca).",
            ("certificate",),
            expirations_s,
        )
        window = reading.window
        yield gauge(
            PREFIX + "window_pages",
            "Prompt pages of the last hour: asked, found of them, and new (estimate): a cache that forgets nothing"
            " would have missed those, too.",
            ("kind",),
            {("asked",): window.asked, ("found",): window.found, ("new",): window.new},
        )


def _of_samples(samples: Samples) -> Iterator[Metric]:
    for metric in METRICS:
        if not metric.is_of_connector:
            values = {sample[1:]: value for sample, value in samples.items() if sample[0] == metric.name}
            yield (gauge if metric.is_gauge else counter)(
                PREFIX + metric.name, metric.help + ".", metric.labels, values
            )


def _of_jobs(reading: EngineReading) -> Iterator[Metric]:
    labels = ("leg", "class")
    yield counter(
        PREFIX + "begun_objects", "Objects that were to go over a leg of the store.", labels, reading.jobs.begun
    )
    yield gauge(PREFIX + "open_objects", "Objects of them that are on their way.", labels, reading.jobs.open)
    yield histogram(
        PREFIX + "object_seconds", "Time of the others, in a queue and under way.", labels, reading.jobs.seconds
    )


def _of_slots(reading: EngineReading) -> Iterator[Metric]:
    labels = ("tier", "group")
    yield gauge(PREFIX + "slots", "Pages and snapshots that a tier has room for.", labels, reading.slots)
    yield gauge(PREFIX + "used_slots", "Those that are taken.", labels, reading.used_slots)
