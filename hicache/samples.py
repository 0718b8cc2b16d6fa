"""What the store has counted, as samples that an engine's own metrics can add up and show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hicache.stats import DirectoryStats

if TYPE_CHECKING:
    from hicache.client.status import L3Status

Sample: TypeAlias = tuple[str, ...]  # the name of a metric, and the values of its labels
Samples: TypeAlias = dict[Sample, float]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as it is registered; ``hicache_`` and what the engine puts before it come on top."""

    name: str
    labels: tuple[str, ...]
    help: str
    is_gauge: bool = False
    is_of_connector: bool = False  # counted there, and not by the cache


METRICS = (
    Metric("requests", (), "Requests that were looked up"),
    Metric("requested_tokens", (), "Prompt tokens of the requests that were loaded"),
    Metric("tokens", ("source",), "Prompt tokens by where their KV came from: l1, l2, l3 or computed"),
    Metric("tokens_without_state", (), "Tokens whose attention was there and whose window or state was not"),
    Metric("prefetch_found_tokens", (), "Tokens that L3 had beyond L1 and L2"),
    Metric("prefetch_tokens", ("end",), "Tokens found in L3 by what became of them: used, or dropped for a reason"),
    Metric("prefetch_probes", (), "Times that L3 was asked for no request, to learn whether loading has begun to pay"),
    Metric("prefetch_declined", ("reason",), "Requests for which L3 was not asked"),
    Metric("objects", ("leg", "outcome"), "Objects that went, or did not go, over a leg of the store"),
    Metric("bytes", ("leg",), "Payload bytes that went over a leg of the store"),
    Metric("skipped", ("reason",), "Writes and state snapshots that were not made, and objects of no use"),
    Metric("lost_tokens", ("place",), "Tokens evicted before they were written down, by tier and group"),
    Metric(
        "requests_uncached",
        (),
        "Requests without the salt that is required, or with an adapter of unknown content",
        is_of_connector=True,
    ),
    Metric("loads_failed", (), "Loads that failed, whose requests were computed instead", is_of_connector=True),
    Metric(
        "checkpoints_wanted",
        (),
        "Times that the engine was asked for a state where siblings diverge",
        is_of_connector=True,
    ),
    Metric(
        "calls_refused",
        (),
        "Requests that went on without the store after a defect, which the log tells",
        is_of_connector=True,
    ),
    Metric("ranks_lost", (), "Ranks that the leader has lost", is_gauge=True),
    Metric("prefetch_in_flight_tokens", (), "Tokens on their way from L3", is_gauge=True),
    Metric("l3_objects", ("operation", "outcome"), "Objects of calls to hicached by outcome, of all ranks"),
    Metric("l3_bytes", ("operation",), "Payload bytes moved to and from hicached, of all ranks"),
    Metric("l3_refusals", ("code",), "Calls and hellos that hicached refused, of all ranks"),
    Metric("l3_ready", ("rank",), "Whether hicached is connected and the breaker closed", is_gauge=True),
)
_GAUGES = frozenset(metric.name for metric in METRICS if metric.is_gauge)


def samples_of(stats: DirectoryStats) -> Samples:
    """Everything counted since start. ``stats`` is read by the thread that owns the directory, or under its lock."""
    return dict(_of_directory(stats))


def l3_samples_of(status: L3Status, *, rank: int) -> Samples:
    """What the client of hicached of one rank has counted since it was made."""
    return dict(_of_l3(status, rank))


def add(samples: Samples, others: Mapping[Sample, float]) -> None:
    """Counters add up; a gauge is what ``others`` say."""
    for sample, value in others.items():
        samples[sample] = value if sample[0] in _GAUGES else samples.get(sample, 0) + value


class Increments:
    """What came since the last time, for metrics that are sent on and added up elsewhere."""

    def __init__(self) -> None:
        self._before: Samples = {}

    def take(self, samples: Samples) -> Samples:
        """Counters that have grown, by how much; gauges that differ. Nothing when nothing has happened."""
        grown = {
            sample: value if sample[0] in _GAUGES else value - self._before.get(sample, 0)
            for sample, value in samples.items()
            if value != self._before.get(sample, None if sample[0] in _GAUGES else 0)
        }
        self._before = dict(samples)
        return grown


def _of_directory(stats: DirectoryStats) -> Iterator[tuple[Sample, float]]:
    yield ("requests",), stats.requests
    yield ("requested_tokens",), stats.tokens_requested
    yield from _labelled("tokens", stats.tokens_by_source.items())
    yield ("tokens_without_state",), stats.tokens_attention_only
    yield ("prefetch_found_tokens",), stats.prefetch_found
    yield ("prefetch_probes",), stats.prefetch_probes
    yield ("prefetch_tokens", "used"), stats.prefetch_used
    yield from _labelled("prefetch_tokens", stats.prefetch_dropped.items())
    yield from _labelled("prefetch_declined", stats.prefetch_declined.items())
    for name, count in stats.objects.items():
        leg, _, outcome = name.partition(".")
        yield ("objects", leg, outcome), count
    yield from _labelled("bytes", stats.bytes_moved.items())
    yield from _labelled("skipped", stats.skipped.items())
    yield from _labelled("lost_tokens", stats.tokens_lost.items())
    yield ("ranks_lost",), len(stats.ranks_lost)
    yield ("prefetch_in_flight_tokens",), stats.prefetch_in_flight


def _of_l3(status: L3Status, rank: int) -> Iterator[tuple[Sample, float]]:
    for operation, counts in status.operations.items():
        for outcome, objects in counts.objects.items():
            yield ("l3_objects", operation, outcome.name.lower()), objects
        yield ("l3_bytes", operation), sum(moved for outcome, moved in counts.bytes.items() if outcome.is_ok)
    yield from _labelled("l3_refusals", status.refusals.items())
    yield ("l3_ready", str(rank)), int(not status.is_degraded)


def _labelled(name: str, counts: Iterable[tuple[str, int]]) -> Iterator[tuple[Sample, float]]:
    return (((name, label), count) for label, count in counts)
