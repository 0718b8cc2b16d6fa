"""The last hour of a daemon: what its counters were every few seconds, and what lies between."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hicache.admin.status import SAMPLES_MAX, Sample
from hicache.daemon.counts import Counts, Times

LATELY_S = 3.0


@dataclass(frozen=True, slots=True)
class Levels:
    """What is not a sum: how it stands at one moment."""

    used_bytes: int = 0
    sessions: int = 0
    ceiling: float | None = None


class History:
    """Sums at the ends of the last SAMPLES_MAX intervals, and a sample of each interval. Knows no clock."""

    def __init__(self) -> None:
        self._moments: deque[tuple[float, Counts]] = deque(maxlen=SAMPLES_MAX + 1)
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)

    def add(self, *, now_s: float, at_s: float, counts: Counts, levels: Levels) -> Sample | None:
        """The sums at ``now_s`` of a clock that only goes on, ``at_s`` since the epoch. None the first time."""
        before = self._moments[-1] if self._moments else None
        self._moments.append((now_s, counts))
        if before is None:
            return None
        sample = _sample(max(now_s - before[0], 1e-3), at_s, counts.since(before[1]), levels)
        self.samples.append(sample)
        return sample

    def lately(self, now_s: float, counts: Counts) -> tuple[float, Counts]:
        """The last seconds: LATELY_S and up to one interval more, or what there has been of it."""
        for begun_s, begin in reversed(self._moments):
            if now_s - begun_s >= LATELY_S:
                return now_s - begun_s, counts.since(begin)
        return self.window(now_s, counts)

    def window(self, now_s: float, counts: Counts) -> tuple[float, Counts]:
        """The last hour, or what there has been of it: its seconds and its sums."""
        begun_s, begin = self._moments[0] if self._moments else (now_s, counts)
        return now_s - begun_s, counts.since(begin)


def _sample(seconds: float, at_s: float, counts: Counts, levels: Levels) -> Sample:
    quantiles = {
        f"{kind}_p{percent}_s": counts.times.get(kind, Times()).quantile_s(percent / 100)
        for kind in ("lookup", "get", "put")
        for percent in (50, 99)
    }
    return Sample(
        at_s=at_s,
        read_bytes_per_s=counts.read_bytes / seconds,
        written_bytes_per_s=counts.written_bytes / seconds,
        hit_rate=counts.hit_rate,
        ceiling=levels.ceiling,
        used_bytes=levels.used_bytes,
        sessions=levels.sessions,
        errors=counts.errors.total(),
        **quantiles,
    )
