"""What the counters of a daemon come to in the few figures of its status: sums since the start, and differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Sample
from prometheus_client.registry import Collector

from hicache.backends.store_stats import StoreStats
from hicache.daemon.metrics import LASTING_METHODS, Metrics

METHODS_BY_KIND = {"lookup": ("Lookup",), "get": ("Get", "GetStream"), "put": ("Put", "PutStream")}
_KIND_BY_METHOD = {method: kind for kind, methods in METHODS_BY_KIND.items() for method in methods}
_GOOD_OUTCOMES = ("ok", "exists", "absent")

Reason = tuple[str, str]  # what was counted, and why


@dataclass(frozen=True, slots=True)
class Times:
    """How many calls took how long: ``counts[i]`` of them more than ``bounds_s[i - 1]`` and at most ``bounds_s[i]``."""

    bounds_s: tuple[float, ...] = ()  # the last one is infinite
    counts: tuple[int, ...] = ()

    @property
    def calls(self) -> int:
        """All of them."""
        return sum(self.counts)

    def since(self, earlier: Times) -> Times:
        """What came after ``earlier``, which may be empty."""
        if not earlier.counts:
            return self
        return Times(self.bounds_s, tuple(a - b for a, b in zip(self.counts, earlier.counts, strict=True)))

    def quantile_s(self, share: float) -> float | None:
        """The time within which ``share`` of the calls were done, within its bucket in proportion; None of no calls."""
        rank = share * self.calls
        below, lower_s = 0, 0.0
        for bound_s, count in zip(self.bounds_s, self.counts, strict=True):
            if count and below + count >= rank:
                return lower_s if bound_s == float("inf") else lower_s + (bound_s - lower_s) * (rank - below) / count
            below, lower_s = below + count, bound_s
        return None


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums since the start, or of a time between two moments."""

    asked: int = 0  # objects looked up
    found: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    evicted_bytes: int = 0
    times: Mapping[str, Times] = field(default_factory=dict)  # by kind
    errors: Counter[Reason] = field(default_factory=Counter)

    def since(self, earlier: Counts) -> Counts:
        """What came after ``earlier``."""
        return Counts(
            self.asked - earlier.asked,
            self.found - earlier.found,
            self.read_bytes - earlier.read_bytes,
            self.written_bytes - earlier.written_bytes,
            self.evicted_bytes - earlier.evicted_bytes,
            {kind: times.since(earlier.times.get(kind, Times())) for kind, times in self.times.items()},
            self.errors - earlier.errors,
        )

    @property
    def hit_rate(self) -> float | None:
        """Found of those asked for; None where nothing was."""
        return self.found / self.asked if self.asked else None


def read_counts(metrics: Metrics, stats: StoreStats | None) -> Counts:
    """The sums by now. ``stats`` is what the store counts; None while there is none."""
    lookups = {labels["outcome"]: value for labels, value in _values(metrics.items) if labels["method"] == "Lookup"}
    moved = Counter[str]()
    for labels, value in _values(metrics.transferred):
        moved[_KIND_BY_METHOD[labels["method"]]] += value
    return Counts(
        asked=sum(lookups.values()),
        found=lookups.get("ok", 0),
        read_bytes=moved["get"],
        written_bytes=moved["put"],
        evicted_bytes=stats.evicted_bytes if stats is not None else 0,
        times=_read_times(metrics),
        errors=_read_errors(metrics),
    )


def _read_times(metrics: Metrics) -> dict[str, Times]:
    below: dict[str, Counter[float]] = {kind: Counter() for kind in METHODS_BY_KIND}  # calls at or below each bound
    for sample in _samples(metrics.call_seconds):
        kind = _KIND_BY_METHOD.get(sample.labels.get("method", ""))
        if kind is not None and "le" in sample.labels:
            below[kind][float(sample.labels["le"])] += int(sample.value)
    times = {}
    for kind, totals in below.items():
        bounds_s = tuple(sorted(totals))
        at_most = [totals[bound_s] for bound_s in bounds_s]
        times[kind] = Times(bounds_s, tuple(b - a for a, b in zip([0, *at_most], at_most, strict=False)))
    return times


def _read_errors(metrics: Metrics) -> Counter[Reason]:
    errors = Counter[Reason]()
    for labels, value in _values(metrics.items):
        if labels["outcome"] not in _GOOD_OUTCOMES:
            errors[f"{_kind(labels['method'])} objects", labels["outcome"]] += value
    for labels, value in _values(metrics.calls):
        is_parting = labels["method"] in LASTING_METHODS and labels["result"] == "cancelled"
        if labels["result"] != "ok" and labels["method"] != "Session" and not is_parting:
            errors[f"{_kind(labels['method'])} calls", labels["result"].lower()] += value
    for labels, value in _values(metrics.session_refusals):
        errors["sessions", labels["code"].lower()] += value
    for of, reason, counter in (
        ("memory of clients", "refused", metrics.region_refusals),
        ("storage calls", "failed", metrics.storage_errors),
        ("http requests", "foreign_host", metrics.host_refusals),
    ):
        for _, value in _values(counter):
            errors[of, reason] += value
    return +errors


def _kind(method: str) -> str:
    return _KIND_BY_METHOD.get(method, method.lower())


def _values(counter: Collector) -> Iterator[tuple[Mapping[str, str], int]]:
    """Labels and value of each counter of a family."""
    for sample in _samples(counter):
        if sample.name.endswith("_total"):
            yield sample.labels, int(sample.value)


def _samples(family: Collector) -> Iterable[Sample]:
    for metric in family.collect():
        yield from metric.samples
