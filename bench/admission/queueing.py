"""Requests in time: discrete events over groups of GPUs that prefill and decode, and tiers whose bandwidth is shared.

::

    arrive ── wait for a group ── load [held, usable) ── prefill [usable, prompt) ── first token ── decode ── end

A tier moves bytes in the order in which it is asked, reads and writes alike; its latency occupies nothing. Each group
has one of its own, unless the tier is shared. A group of GPUs prefills one request at a time, first come first served,
and decodes all others when it does not prefill.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from hicache.costs.machine import Tier
from hicache.costs.model import ModelCosts
from hicache.errors import ConfigError

Overlap: TypeAlias = Literal["serial", "ahead", "layerwise", "split"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. ``at_s`` counts in the open loop; in the closed one ``think_s`` after the end of the one before, and
    those of a ``session`` come one after another from one client."""

    at_s: float
    prompt_tokens: int
    output_tokens: int = 1
    think_s: float = 0.0
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Reads:
    """What is there of a prompt: ``held_tokens`` in GPU memory, then of each tier so many tokens.

    ``writes`` go down once it has been computed: by tier, in bytes.
    """

    held_tokens: int = 0
    loads: tuple[tuple[str, int], ...] = ()
    writes: tuple[tuple[str, int], ...] = ()

    @property
    def usable_tokens(self) -> int:
        """What need not be computed."""
        return self.held_tokens + sum(tokens for _, tokens in self.loads)


_NOTHING = Reads()
WaitS: TypeAlias = Callable[[str], float]  # how long a tier is busy with what it was asked for before
Decide: TypeAlias = Callable[[int, float, WaitS], Reads]  # (number of the arrival, now): asked in the order of time


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
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "a finite number above 0")
        if self.sessions is not None and self.sessions < 1:
            raise ConfigError("sessions", self.sessions, "at least 1, or none for the open loop")
        if not 0 <= self.decode_token_s < math.inf:
            raise ConfigError("decode_token_s", self.decode_token_s, "a finite time of at least 0 s")


@dataclass(frozen=True, slots=True)
class QueueResult:
    """Times of all requests, in the order of the arrivals, and how busy everything was."""

    ttft_s: Sequence[float]
    total_s: Sequence[float]
    span_s: float  # from the first arrival to the last end
    prompt_tokens: int
    gpu_busy_s: float
    tier_busy_s: dict[str, float]

    def to_dict(self, *, first_scored: int = 0) -> dict[str, Any]:
        """As JSON: percentiles in place of the times, without those of the arrivals before ``first_scored``."""
        ttft_s, total_s = self.ttft_s[first_scored:], self.total_s[first_scored:]
        percentiles = dict(zip(("p50", "p90", "p99"), np.percentile(ttft_s, [50, 90, 99]).tolist(), strict=True))
        return {
            "requests": len(ttft_s),
            "ttft_s": {"mean": float(np.mean(ttft_s)), **percentiles, "max": float(np.max(ttft_s))},
            "total_s": {"mean": float(np.mean(total_s))},
            "tokens_per_s": self.prompt_tokens / self.span_s,
            "requests_per_s": len(self.ttft_s) / self.span_s,
            "span_s": self.span_s,
            "gpu_busy_s": self.gpu_busy_s,
            "tier_busy_s": dict(self.tier_busy_s),
        }


def run_queueing(arrivals: Sequence[Arrival], decide: Decide, costs: ModelCosts, how: Queueing) -> QueueResult:
    """Serve all arrivals. ``decide`` says of each what is there: when a group takes it, or, with loads ahead, at once.

    Raises ConfigError without arrivals.
    """
    if not arrivals:
        raise ConfigError("arrivals", 0, "at least one request")
    return _Run(arrivals, decide, costs, how).run()


class _Tier:
    """A server of bytes, first come first served."""

    def __init__(self, tier: Tier) -> None:
        self._latency_s, self._bytes_per_s = tier.latency_s, tier.bytes_per_s
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

    def __init__(self, tiers: dict[str, _Tier]) -> None:
        self.tiers = tiers
        self.is_free = True
        self.busy_s = 0.0  # of all that has been taken on
        self.takes = 0
        self.decoding: list[tuple[float, int, _Job]] = []  # a heap: each is over when the group has been free so long
        self._freed_s = 0.0  # when
        self._was_free_s = 0.0  # before it was taken last

    def take(self, start_s: float, end_s: float) -> None:
        self._was_free_s = self.free_s(start_s)
        self.is_free = False
        self.takes += 1
        self.busy_s += end_s - start_s

    def release(self, now_s: float) -> None:
        self.is_free = True
        self._freed_s = now_s

    def free_s(self, now_s: float) -> float:
        """How long it has not prefilled since the beginning."""
        return self._was_free_s + (now_s - self._freed_s if self.is_free else 0.0)

    def wait_s(self, tier: str, now_s: float) -> float:
        return self.tiers[tier].wait_s(now_s)


@dataclass(slots=True)
class _Client:
    """One of the closed loop: what is left of its session."""

    numbers: deque[int] = field(default_factory=deque)


@dataclass(slots=True)
class _Job:
    number: int
    arrived_s: float
    group: _Group
    client: _Client | None
    reads: Reads = _NOTHING


@dataclass(order=True, slots=True)
class _Event:
    at_s: float
    order: int
    act: Callable[[float], None] = field(compare=False)


class _Run:
    def __init__(self, arrivals: Sequence[Arrival], decide: Decide, costs: ModelCosts, how: Queueing) -> None:
        self._arrivals, self._decide, self._costs, self._how = arrivals, decide, costs, how
        shared = {name: _Tier(tier) for name, tier in costs.tiers.items() if tier.shared}
        own = {name: tier for name, tier in costs.tiers.items() if not tier.shared}
        self._groups = [
            _Group(shared | {name: _Tier(tier) for name, tier in own.items()}) for _ in range(how.gpu_groups)
        ]
        self._waiting: deque[_Job] = deque()  # for a group
        self._sessions: deque[deque[int]] = deque()  # of the closed loop, that no client has begun
        self._events: list[_Event] = []
        self._order = 0
        self._ttft_s = [0.0] * len(arrivals)
        self._total_s = [0.0] * len(arrivals)
        self._end_s = 0.0

    def run(self) -> QueueResult:
        first_s = 0.0
        if self._how.sessions is None:
            for number, arrival in enumerate(self._arrivals):
                self._at(arrival.at_s / self._how.speedup, self._arrive(number, None))
            first_s = min(arrival.at_s for arrival in self._arrivals) / self._how.speedup
        else:
            self._sessions.extend(_sessions(self._arrivals))
            for _ in range(min(self._how.sessions, len(self._sessions))):
                self._ask_next(_Client(), 0.0)
        while self._events:
            event = heapq.heappop(self._events)
            event.act(event.at_s)
        assert not self._waiting, "every request is served"
        return QueueResult(
            self._ttft_s,
            self._total_s,
            self._end_s - first_s,
            sum(arrival.prompt_tokens for arrival in self._arrivals),
            sum(group.busy_s for group in self._groups),
            {name: self._busy_s(name) for name in self._costs.tiers},
        )

    def _busy_s(self, tier: str) -> float:
        return sum({id(group.tiers[tier]): group.tiers[tier].busy_s for group in self._groups}.values())

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, _Event(at_s, self._order, act))
        self._order += 1

    def _ask_next(self, client: _Client, now_s: float) -> None:
        """A client goes on with its session, or begins another one, after having thought."""
        if not client.numbers and self._sessions:
            client.numbers = self._sessions.popleft()
        if client.numbers:
            number = client.numbers.popleft()
            self._at(now_s + self._arrivals[number].think_s, self._arrive(number, client))

    def _arrive(self, number: int, client: _Client | None) -> Callable[[float], None]:
        def arrive(now_s: float) -> None:
            job = _Job(number, now_s, self._groups[number % len(self._groups)], client)
            if self._how.overlap != "ahead":
                self._wait(job, now_s)
                return
            self._ask(job, now_s)
            self._at(self._load(job.group, job.reads, now_s), lambda at_s: self._wait(job, at_s))

        return arrive

    def _ask(self, job: _Job, now_s: float) -> None:
        """What is there of its prompt."""
        job.reads = self._decide(job.number, now_s, lambda tier: job.group.wait_s(tier, now_s))
        assert job.reads.usable_tokens <= self._arrivals[job.number].prompt_tokens

    def _load(self, group: _Group, reads: Reads, now_s: float) -> float:
        """All loads, one tier after another of a request. When they are there."""
        for tier, tokens in reads.loads:
            now_s = group.tiers[tier].move(now_s, tokens * self._costs.token_bytes + self._costs.state_bytes)
        return now_s

    def _wait(self, job: _Job, now_s: float) -> None:
        self._waiting.append(job)
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        """Free groups take what has waited longest."""
        for group in self._groups:
            if group.is_free and self._waiting:
                job = self._waiting.popleft()
                job.group = group
                if self._how.overlap != "ahead":
                    self._ask(job, now_s)
                end_s = self._prefilled_at_s(job, now_s)
                group.take(now_s, end_s)
                self._ttft_s[job.number] = end_s - job.arrived_s
                self._at(end_s, self._end_prefill(job))

    def _end_prefill(self, job: _Job) -> Callable[[float], None]:
        def end(now_s: float) -> None:
            job.group.release(now_s)
            self._decode(job, now_s)
            self._begin(now_s)
            self._watch(job.group, now_s)

        return end

    def _prefilled_at_s(self, job: _Job, start_s: float) -> float:
        reads, prompt = job.reads, self._arrivals[job.number].prompt_tokens
        tail_s = self._costs.prefill.fixed_s + self._costs.prefill_s(reads.usable_tokens, prompt)
        if not reads.loads or self._how.overlap == "ahead":
            return start_s + tail_s
        if self._how.overlap == "split":
            return self._met_at_s(job, start_s) + tail_s
        loaded_s = self._load(job.group, reads, start_s)
        if self._how.overlap == "serial":
            return loaded_s + tail_s
        return max(loaded_s, start_s + tail_s) + min(loaded_s - start_s, tail_s) / self._how.layers

    def _met_at_s(self, job: _Job, start_s: float) -> float:
        """Where computing from the front meets loading from the back. Tiers are read the fastest part last."""
        reads = job.reads
        low, high = reads.held_tokens, reads.usable_tokens  # computed up to there
        while high - low > 1:
            middle = (low + high) // 2
            front_s = self._costs.prefill_s(reads.held_tokens, middle)
            if front_s < self._back_s(job, middle, start_s):
                low = middle
            else:
                high = middle
        split = min((low, high), key=lambda at: self._split_s(job, at, start_s))
        rest = Reads(split, _behind(reads, split))
        loaded_s = self._load(job.group, rest, start_s) if split < reads.usable_tokens else start_s
        return max(loaded_s, start_s + self._costs.prefill_s(reads.held_tokens, split))

    def _split_s(self, job: _Job, split: int, start_s: float) -> float:
        return max(self._costs.prefill_s(job.reads.held_tokens, split), self._back_s(job, split, start_s))

    def _back_s(self, job: _Job, split: int, start_s: float) -> float:
        loads = _behind(job.reads, split)
        return sum(job.group.wait_s(tier, start_s) + self._costs.load_s(tier, tokens) for tier, tokens in loads)

    def _decode(self, job: _Job, now_s: float) -> None:
        for tier, size_bytes in job.reads.writes:
            job.group.tiers[tier].move(now_s, size_bytes)
        tokens = max(0, self._arrivals[job.number].output_tokens - 1)  # the first one came with the prefill
        decode_s = tokens * self._how.decode_token_s
        if decode_s:
            heapq.heappush(job.group.decoding, (job.group.free_s(now_s) + decode_s, job.number, job))
        else:
            self._end(job, now_s)

    def _watch(self, group: _Group, now_s: float) -> None:
        """The first request of a free group ends when it has been decoded, if nothing is prefilled until then."""
        if group.is_free and group.decoding:
            left_s = max(0.0, group.decoding[0][0] - group.free_s(now_s))
            self._at(now_s + left_s, self._end_first(group, group.takes))

    def _end_first(self, group: _Group, takes: int) -> Callable[[float], None]:
        def end(now_s: float) -> None:
            if group.takes == takes:
                self._end(heapq.heappop(group.decoding)[2], now_s)
                self._watch(group, now_s)

        return end

    def _end(self, job: _Job, now_s: float) -> None:
        self._total_s[job.number] = now_s - job.arrived_s
        self._end_s = max(self._end_s, now_s)
        if job.client is not None:
            self._ask_next(job.client, now_s)


def _sessions(arrivals: Sequence[Arrival]) -> Iterator[deque[int]]:
    """The numbers of each session's arrivals, in the order in which sessions begin; one without is one of its own."""
    sessions: dict[object, deque[int]] = {}
    for number, arrival in enumerate(arrivals):
        sessions.setdefault(number if arrival.session is None else arrival.session, deque()).append(number)
    yield from sessions.values()


def _behind(reads: Reads, split: int) -> tuple[tuple[str, int], ...]:
    """What is left to load when everything before ``split`` is computed."""
    return tuple(_parts_behind(reads, split))


def _parts_behind(reads: Reads, split: int) -> Iterator[tuple[str, int]]:
    end = reads.held_tokens
    for tier, tokens in reads.loads:
        end += tokens
        if end > split:
            yield tier, min(tokens, end - split)
