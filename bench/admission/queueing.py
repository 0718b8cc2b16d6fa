"""Requests in time: discrete events over groups of GPUs that prefill and decode, and tiers whose bandwidth is shared.

::

    arrive ── load [held, usable) ── prefill [usable, prompt) ── first token ── decode ── end

A tier moves bytes in the order in which it is asked, reads and writes alike; its latency occupies nothing. A group of
GPUs prefills one request at a time, first come first served, and decodes all others when it does not prefill.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np

from hicache.costs.model import ModelCosts
from hicache.errors import ConfigError

Overlap: TypeAlias = Literal["serial", "ahead", "layerwise", "split"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. ``at_s`` counts in the open loop; in the closed one ``think_s`` after the end of the one before."""

    at_s: float
    prompt_tokens: int
    output_tokens: int = 1
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reads:
    """What is known of its prompt when it comes: ``held_tokens`` in GPU memory, then of each tier so many tokens.

    ``writes`` go down once it has been computed: by tier, in bytes.
    """

    held_tokens: int = 0
    loads: tuple[tuple[str, int], ...] = ()
    writes: tuple[tuple[str, int], ...] = ()

    @property
    def usable_tokens(self) -> int:
        """What need not be computed."""
        return self.held_tokens + sum(tokens for _, tokens in self.loads)


Decide: TypeAlias = Callable[[int, float], Reads]  # (number of the arrival, now): asked in the order of time


@dataclass(frozen=True, slots=True, kw_only=True)
class Queueing:
    """How requests come and how loads go together with compute. Raises ConfigError.

    overlap    serial: the GPU waits for the load, then computes (what published measurements fit)
               ahead: the load comes first, and the GPU serves others meanwhile
               layerwise: the load of one layer beside the compute of another, ``layers`` of them
               split: the front is computed while the back is loaded, up to where both meet (Cake)
    sessions   None: open loop at the times of the arrivals, ``speedup`` times as fast; else so many clients, each with
               one request at a time
    """

    overlap: Overlap = "serial"
    gpu_groups: int = 1
    sessions: int | None = None
    speedup: float = 1.0
    decode_token_s: float = 0.0
    layers: int = 32

    def __post_init__(self) -> None:
        if self.overlap not in get_args(Overlap):
            raise ConfigError("overlap", self.overlap, f"one of {', '.join(get_args(Overlap))}")
        for name in ("gpu_groups", "speedup", "layers"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "more than 0")
        if self.sessions is not None and self.sessions < 1:
            raise ConfigError("sessions", self.sessions, "at least 1, or none for the open loop")
        if self.decode_token_s < 0:
            raise ConfigError("decode_token_s", self.decode_token_s, "at least 0")


@dataclass(frozen=True, slots=True)
class QueueResult:
    """Times of all requests, in the order of the arrivals, and how busy everything was."""

    ttft_s: Sequence[float]
    total_s: Sequence[float]
    span_s: float  # from the first arrival to the last end
    prompt_tokens: int
    gpu_busy_s: float
    tier_busy_s: dict[str, float]

    def to_dict(self) -> dict[str, object]:
        """As JSON: percentiles in place of the times."""
        percentiles = dict(zip(("p50", "p90", "p99"), np.percentile(self.ttft_s, [50, 90, 99]).tolist(), strict=True))
        return {
            "requests": len(self.ttft_s),
            "ttft_s": {"mean": float(np.mean(self.ttft_s)), **percentiles, "max": float(np.max(self.ttft_s))},
            "total_s": {"mean": float(np.mean(self.total_s))},
            "tokens_per_s": self.prompt_tokens / self.span_s,
            "requests_per_s": len(self.ttft_s) / self.span_s,
            "gpu_busy_s": self.gpu_busy_s,
            "tier_busy_s": dict(self.tier_busy_s),
        }


def run_queueing(arrivals: Sequence[Arrival], decide: Decide, costs: ModelCosts, how: Queueing) -> QueueResult:
    """Serve all arrivals; ``decide`` says of each what is there, when it comes. Raises ConfigError without arrivals."""
    if not arrivals:
        raise ConfigError("arrivals", 0, "at least one request")
    return _Run(arrivals, decide, costs, how).run()


class _Tier:
    """A server of bytes, first come first served."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._free_s = 0.0
        self.busy_s = 0.0

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self._free_s - now_s)

    def move(self, now_s: float, size_bytes: float) -> float:
        """When the bytes are there."""
        seconds = size_bytes / self._bytes_per_s
        self._free_s = max(now_s, self._free_s) + seconds
        self.busy_s += seconds
        return self._free_s + self._latency_s


class _Group:
    """GPUs that work as one: prefill in turns, decode in between."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0  # of all that has been taken on
        self._spans: deque[tuple[float, float]] = deque()  # that have not ended when last asked
        self._ended_s = 0.0

    def take(self, start_s: float, end_s: float) -> None:
        self.busy_s += end_s - start_s
        self.free_s = end_s
        self._spans.append((start_s, end_s))

    def idle_s(self, now_s: float) -> float:
        """How long it has not prefilled since the beginning. ``now_s`` never goes back."""
        while self._spans and self._spans[0][1] <= now_s:
            start_s, end_s = self._spans.popleft()
            self._ended_s += end_s - start_s
        under_way_s = max(0.0, now_s - self._spans[0][0]) if self._spans else 0.0
        return now_s - self._ended_s - under_way_s


@dataclass(slots=True)
class _Job:
    number: int
    arrived_s: float
    reads: Reads
    group: _Group | None = None
    decoded_at_idle_s: float = 0.0  # of its group: decode is over when it has been idle so long


@dataclass(order=True, slots=True)
class _Event:
    at_s: float
    order: int
    act: Callable[[float], None] = field(compare=False)


class _Run:
    def __init__(self, arrivals: Sequence[Arrival], decide: Decide, costs: ModelCosts, how: Queueing) -> None:
        self._arrivals, self._decide, self._costs, self._how = arrivals, decide, costs, how
        self._tiers = {name: _Tier(tier.latency_s, tier.bytes_per_s) for name, tier in costs.tiers.items()}
        self._groups = [_Group() for _ in range(how.gpu_groups)]
        self._events: list[_Event] = []
        self._order = 0
        self._ttft_s = [0.0] * len(arrivals)
        self._total_s = [0.0] * len(arrivals)
        self._next = 0  # arrival that no session has begun
        self._end_s = 0.0

    def run(self) -> QueueResult:
        first_s = 0.0
        if self._how.sessions is None:
            for number, arrival in enumerate(self._arrivals):
                self._at(arrival.at_s / self._how.speedup, self._arrive(number))
            first_s = min(arrival.at_s for arrival in self._arrivals) / self._how.speedup
        else:
            for _ in range(min(self._how.sessions, len(self._arrivals))):
                self._begin_next(0.0)
        while self._events:
            event = heapq.heappop(self._events)
            event.act(event.at_s)
        return QueueResult(
            self._ttft_s,
            self._total_s,
            self._end_s - first_s,
            sum(arrival.prompt_tokens for arrival in self._arrivals),
            sum(group.busy_s for group in self._groups),
            {name: tier.busy_s for name, tier in self._tiers.items()},
        )

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, _Event(at_s, self._order, act))
        self._order += 1

    def _begin_next(self, now_s: float) -> None:
        """A session goes on with the next request, after having thought."""
        if self._next < len(self._arrivals):
            number, self._next = self._next, self._next + 1
            self._at(now_s + self._arrivals[number].think_s, self._arrive(number))

    def _arrive(self, number: int) -> Callable[[float], None]:
        def arrive(now_s: float) -> None:
            job = _Job(number, now_s, self._decide(number, now_s))
            assert job.reads.usable_tokens <= self._arrivals[number].prompt_tokens
            ready_s = self._load(job.reads, now_s) if self._how.overlap == "ahead" else now_s
            self._at(ready_s, lambda at_s: self._prefill(job, at_s))

        return arrive

    def _load(self, reads: Reads, now_s: float) -> float:
        """All loads, one tier after another of a request. When they are there."""
        for tier, tokens in reads.loads:
            now_s = self._tiers[tier].move(now_s, tokens * self._costs.token_bytes + self._costs.state_bytes)
        return now_s

    def _prefill(self, job: _Job, ready_s: float) -> None:
        group = min(self._groups, key=lambda group: group.free_s)
        start_s = max(ready_s, group.free_s)
        end_s = self._prefilled_at_s(job, start_s)
        group.take(start_s, end_s)
        job.group = group
        self._ttft_s[job.number] = end_s - job.arrived_s
        self._at(end_s, lambda at_s: self._decode(job, at_s))

    def _prefilled_at_s(self, job: _Job, start_s: float) -> float:
        reads, prompt = job.reads, self._arrivals[job.number].prompt_tokens
        tail_s = self._costs.prefill.fixed_s + self._costs.prefill_s(reads.usable_tokens, prompt)
        if not reads.loads or self._how.overlap == "ahead":
            return start_s + tail_s
        if self._how.overlap == "split":
            return self._met_at_s(reads, start_s) + tail_s
        loaded_s = self._load(reads, start_s)
        if self._how.overlap == "serial":
            return loaded_s + tail_s
        return max(loaded_s, start_s + tail_s) + min(loaded_s - start_s, tail_s) / self._how.layers

    def _met_at_s(self, reads: Reads, start_s: float) -> float:
        """Where computing from the front meets loading from the back. Tiers are read the fastest part last."""
        low, high = reads.held_tokens, reads.usable_tokens  # computed up to there
        while high - low > 1:
            middle = (low + high) // 2
            front_s = self._costs.prefill_s(reads.held_tokens, middle)
            if front_s < self._back_s(reads, middle, start_s):
                low = middle
            else:
                high = middle
        split = min((low, high), key=lambda at: self._split_s(reads, at, start_s))
        loaded_s = self._load(Reads(split, _behind(reads, split)), start_s) if split < reads.usable_tokens else start_s
        return max(loaded_s, start_s + self._costs.prefill_s(reads.held_tokens, split))

    def _split_s(self, reads: Reads, split: int, start_s: float) -> float:
        return max(self._costs.prefill_s(reads.held_tokens, split), self._back_s(reads, split, start_s))

    def _back_s(self, reads: Reads, split: int, start_s: float) -> float:
        loads = _behind(reads, split)
        return sum(self._tiers[tier].wait_s(start_s) + self._costs.load_s(tier, tokens) for tier, tokens in loads)

    def _decode(self, job: _Job, now_s: float) -> None:
        assert job.group is not None
        for tier, size_bytes in job.reads.writes:
            self._tiers[tier].move(now_s, size_bytes)
        tokens = max(0, self._arrivals[job.number].output_tokens - 1)  # the first one came with the prefill
        job.decoded_at_idle_s = job.group.idle_s(now_s) + tokens * self._how.decode_token_s
        self._go_on(job, now_s)

    def _go_on(self, job: _Job, now_s: float) -> None:
        """It has ended, or looks again when it will have, if nothing is prefilled meanwhile."""
        assert job.group is not None
        left_s = job.decoded_at_idle_s - job.group.idle_s(now_s)
        if left_s > 1e-9:
            self._at(now_s + left_s, lambda at_s: self._go_on(job, at_s))
            return
        self._total_s[job.number] = now_s - job.arrived_s
        self._end_s = max(self._end_s, now_s)
        if self._how.sessions is not None:
            self._begin_next(now_s)


def _behind(reads: Reads, split: int) -> tuple[tuple[str, int], ...]:
    """What is left to load when everything before ``split`` is computed."""
    return tuple(_parts_behind(reads, split))


def _parts_behind(reads: Reads, split: int) -> Iterator[tuple[str, int]]:
    end = reads.held_tokens
    for tier, tokens in reads.loads:
        end += tokens
        if end > split:
            yield tier, min(tokens, end - split)
