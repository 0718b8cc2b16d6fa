"""Says in the log why something was not found, brought or written: each reason once per interval, with counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hicache.outcome import Outcome
from hicache.stats import DirectoryStats

INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Reason:
    """What a reason means. ``is_fault``: somebody should do something, if it goes on."""

    text: str
    is_fault: bool = False


REASONS: dict[str, Reason] = {
    # what L3 had and was not restored
    "no_host_capacity": Reason("L2 had no room for it"),
    "no_device_capacity": Reason("L1 had no room for it"),
    "late": Reason("it had not come when the request went on"),
    "aborted": Reason("the request was given up before"),
    "load_failed": Reason("a copy into L1 failed", is_fault=True),
    "not_usable": Reason("a window or state that belongs to it was not there"),
    "faster_computed": Reason("the read policy takes it to be computed sooner"),
    # requests for which L3 was not asked
    "no_l3": Reason("there is no L3"),
    "nothing_to_gain": Reason("L1 and L2 had all of it"),
    "below_threshold": Reason("less was missing than threshold_tokens"),
    "unmeasured": Reason("nobody knows yet how fast L3 is, which is being found out"),
    # what was not written or taken
    "backup.not_admitted": Reason("the write policy waits for another use"),
    "backup.no_host_capacity": Reason("L2 had no room for it"),
    "backup.unreachable": Reason("its parent, or its attention, is in no lower tier"),
    "store.unreachable_in_l3": Reason("L3 lacks its parents"),
    "lookup.unreachable": Reason("L3 has it behind a page, window or state that it lacks"),
    "snapshot.no_device_capacity": Reason("L1 had no room for a snapshot"),
    "load.gone": Reason("it was gone when it was to be loaded"),
    "promise.expired": Reason("nobody came back for what was kept"),
    # outcomes of single objects
    "absent": Reason("there is no such object"),
    "corrupt": Reason("its bytes did not match their checksum; it was dropped", is_fault=True),
    "size_mismatch": Reason("the stored size is another one", is_fault=True),
    "too_large": Reason("it is larger than object_bytes_max", is_fault=True),
    "no_space": Reason("there was no room, even after eviction", is_fault=True),
    "io_error": Reason("the medium, or a copy, failed", is_fault=True),
    "deadline": Reason("it was not done in time", is_fault=True),
    "unavailable": Reason("L3 cannot be reached, or its breaker is open", is_fault=True),
    "cancelled": Reason("it was given up before it started"),
    "bad_range": Reason("it does not lie in the memory that was named", is_fault=True),
    "refused": Reason("a limit of the session or tenant was met, or too much was waiting", is_fault=True),
}
OUTCOMES = frozenset(outcome.name.lower() for outcome in Outcome if not outcome.is_ok)


@dataclass(frozen=True, slots=True)
class Miss:
    """One line: ``count`` more ``unit`` have had this ``reason`` since the last line about it."""

    kind: str  # dropped, declined, skipped, or what moved: fetch, load, Get, ...
    reason: str
    count: int
    unit: str

    @property
    def meaning(self) -> Reason:
        """What the reason means."""
        return REASONS[self.reason]


MissKey = tuple[str, str, str]  # kind, reason, unit


class MissLog:
    """Not thread-safe. Bounded by the reasons that there are."""

    def __init__(self, *, clock: Callable[[], float], interval_s: float = INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._told: dict[MissKey, tuple[float, int]] = {}  # when, and the count that was told

    def news(self, counts: Mapping[MissKey, int]) -> list[Miss]:
        """What is to be said now of ``counts`` since start: of each reason at most one line per interval."""
        now_s = self._clock()
        news = []
        for key, count in counts.items():
            told_at_s, told = self._told.get(key, (now_s - self._interval_s, 0))
            if count > told and now_s - told_at_s >= self._interval_s:
                kind, reason, unit = key
                news.append(Miss(kind, reason, count - told, unit))
                self._told[key] = now_s, count
        return news


def misses_of(stats: DirectoryStats) -> dict[MissKey, int]:
    """Everything that an engine did not find, bring or write, since start."""
    return dict(_misses_of(stats))


def _misses_of(stats: DirectoryStats) -> Iterator[tuple[MissKey, int]]:
    for reason, tokens in stats.prefetch_dropped.items():
        yield ("dropped", reason, "tokens"), tokens
    for reason, requests in stats.prefetch_declined.items():
        yield ("declined", reason, "requests"), requests
    for reason, objects in stats.skipped.items():
        yield ("skipped", reason, "objects"), objects
    for name, objects in stats.objects.items():
        leg, _, outcome = name.partition(".")
        if outcome in OUTCOMES:
            yield (leg, outcome, "objects"), objects
