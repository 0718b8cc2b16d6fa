"""What the counters of a daemon come to in the few figures of its status: sums since the start, and differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import prometheus_client

from hicache.backends.store_stats import StoreStats
from hicache.daemon.call_tally import LASTING_METHODS, Tally
from hicache.daemon.metrics import Metrics
from hicache.histogram import Histogram

METHODS_BY_KIND = {"lookup": ("Lookup",), "get": ("Get", "GetStream"), "put": ("Put", "PutStream")}
_KIND_BY_METHOD = {method: kind for kind, methods in METHODS_BY_KIND.items() for method in methods}
_GOOD_OUTCOMES = ("ok", "exists", "absent")

Reason = tuple[str, str]  # what was counted, and why


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums since the start, or of a time between two moments."""

    asked: int = 0  # objects looked up
    found: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    evicted_bytes: int = 0
    times: Mapping[str, Histogram] = field(default_factory=dict)  # by kind
    errors: Counter[Reason] = field(default_factory=Counter)

    def since(self, earlier: Counts) -> Counts:
        """What came after ``earlier``."""
        return Counts(
            self.asked - earlier.asked,
            self.found - earlier.found,
            self.read_bytes - earlier.read_bytes,
            self.written_bytes - earlier.written_bytes,
            self.evicted_bytes - earlier.evicted_bytes,
            {kind: times.since(earlier.times.get(kind)) for kind, times in self.times.items()},
            self.errors - earlier.errors,
        )

    @property
    def hit_rate(self) -> float | None:
        """Found of those asked for; None where nothing was."""
        return self.found / self.asked if self.asked else None


def read_counts(metrics: Metrics, stats: StoreStats | None) -> Counts:
    """The sums by now. ``stats`` is what the store counts; None while there is none."""
    tally = metrics.tally.read()
    outcomes = {outcome: count for (method, outcome), count in tally.keys_finished.items() if method == "Lookup"}
    times: dict[str, Histogram] = {kind: Histogram() for kind in METHODS_BY_KIND}
    moved_bytes: Counter[str] = Counter()
    for kind, methods in METHODS_BY_KIND.items():
        for method in methods:
            moved_bytes[kind] += tally.moved_bytes.get(method, 0)
            if method in tally.seconds:
                times[kind] = times[kind].plus(tally.seconds[method])
    return Counts(
        asked=sum(outcomes.values()),
        found=outcomes.get("ok", 0),
        read_bytes=moved_bytes["get"],
        written_bytes=moved_bytes["put"],
        evicted_bytes=stats.evicted_bytes if stats is not None else 0,
        times=times,
        errors=_read_errors(metrics, tally),
    )


def _read_errors(metrics: Metrics, tally: Tally) -> Counter[Reason]:
    errors: Counter[Reason] = Counter()
    for (method, outcome), count in tally.keys_finished.items():
        if outcome not in _GOOD_OUTCOMES:
            errors[f"{_kind(method)} objects", outcome] += count
    for (method, result), count in tally.finished.items():
        is_parting = method in LASTING_METHODS and result == "cancelled"
        if result != "ok" and method != "Session" and not is_parting:  # refused hellos have a counter of their own
            errors[f"{_kind(method)} calls", result.lower()] += count
    for labels, count in _values(metrics.session_refusals):
        errors["sessions", labels["code"].lower()] += count
    for of, reason, counter in (
        ("memory of clients", "refused", metrics.region_refusals),
        ("storage calls", "failed", metrics.storage_errors),
        ("http requests", "foreign_host", metrics.host_refusals),
    ):
        errors[of, reason] += sum(count for _, count in _values(counter))
    return +errors


def _kind(method: str) -> str:
    return _KIND_BY_METHOD.get(method, method.lower())


def _values(counter: prometheus_client.Counter) -> Iterator[tuple[Mapping[str, str], int]]:
    """Labels and value of each counter of a family."""
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                yield sample.labels, int(sample.value)
