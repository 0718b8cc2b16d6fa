"""The circuit breaker: stops asking something that does not answer, and finds out when it does again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from hicache.errors import ConfigError


class BreakerState(StrEnum):
    """What ``acquire`` does."""

    CLOSED = "closed"  # every call is admitted
    OPEN = "open"  # none is, until the interval has passed
    HALF_OPEN = "half_open"  # one at a time is, as a probe


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long.

    It opens after ``consecutive_failures_max`` failures in a row, or when ``failure_ratio`` of the last
    ``window_calls`` calls failed. It stays open for ``open_s``, ``open_growth`` times longer after every probe that
    fails, up to ``open_s_max``. The interval is back at ``open_s`` when ``window_calls`` calls have succeeded in a row
    since the breaker closed: a peer that fails again as soon as it is trusted again is asked ever more rarely.
    """

    consecutive_failures_max: int = 5
    failure_ratio: float = 0.5
    window_calls: int = 20
    open_s: float = 0.5
    open_growth: float = 2.0
    open_s_max: float = 30.0

    def __post_init__(self) -> None:
        for setting in ("consecutive_failures_max", "window_calls"):
            if getattr(self, setting) < 1:
                raise ConfigError(f"breaker.{setting}", getattr(self, setting), "at least 1")
        if not 0 < self.failure_ratio <= 1:
            raise ConfigError("breaker.failure_ratio", self.failure_ratio, "above 0 and at most 1")
        if not 0 < self.open_s <= self.open_s_max:
            raise ConfigError("breaker.open_s", self.open_s, f"above 0 and at most open_s_max = {self.open_s_max}")
        if self.open_growth < 1:
            raise ConfigError("breaker.open_growth", self.open_growth, "at least 1")


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to make one call, to be given back once: ``succeed``, ``fail`` or ``abandon``."""

    era: int
    is_probe: bool


@dataclass(frozen=True, slots=True)
class BreakerStatus:
    """A breaker as it is now, and what it has counted since it was made."""

    state: BreakerState
    consecutive_failures: int
    retry_in_s: float  # until a probe is admitted; 0 unless open
    opened: int
    probes: int
    successes: int
    failures: int
    rejected: int  # calls that were not admitted


class CircuitBreaker:
    """Thread-safe, never blocks, does no I/O; time comes from ``clock`` (seconds, monotonic)."""

    def __init__(self, limits: BreakerLimits | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or BreakerLimits()
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._era = 0  # grows with every change of state, so that an answer to an older question changes nothing
        self._probe_in_flight = False
        self._retry_at_s = 0.0
        self._open_s = self.limits.open_s  # the next interval
        self._consecutive_failures = 0
        self._consecutive_successes = 0
        self._window: deque[bool] = deque(maxlen=self.limits.window_calls)  # True: failed
        self._opened = self._probes = self._successes = self._failures = self._rejected = 0

    def acquire(self) -> Permit | None:
        """A permit for one call, or None: do not call now. Every permit must be given back."""
        with self._lock:
            if self._state is BreakerState.OPEN and self._clock() >= self._retry_at_s:
                self._enter(BreakerState.HALF_OPEN)
            if self._state is BreakerState.CLOSED:
                return Permit(self._era, is_probe=False)
            if self._state is BreakerState.OPEN or self._probe_in_flight:
                self._rejected += 1
                return None
            self._probe_in_flight = True
            self._probes += 1
            return Permit(self._era, is_probe=True)

    def succeed(self, permit: Permit) -> None:
        """The call was answered. Closes a half-open breaker."""
        with self._lock:
            self._successes += 1
            if permit.era != self._era:
                return
            self._consecutive_failures = 0
            if permit.is_probe:
                self._enter(BreakerState.CLOSED)
                return
            self._window.append(False)
            self._consecutive_successes += 1
            if self._consecutive_successes >= self.limits.window_calls:
                self._open_s = self.limits.open_s

    def fail(self, permit: Permit) -> None:
        """The call was not answered. Opens a half-open breaker, and a closed one that has seen enough of it."""
        with self._lock:
            self._failures += 1
            if permit.era != self._era:
                return
            self._consecutive_failures += 1
            self._consecutive_successes = 0
            self._window.append(True)
            if permit.is_probe or self._has_seen_enough():
                self._open()

    def abandon(self, permit: Permit) -> None:
        """The call ended without telling anything about the peer. A probe may be made by another call."""
        with self._lock:
            if permit.era == self._era and permit.is_probe:
                self._probe_in_flight = False

    def retry_now(self) -> None:
        """There is news of the peer (it accepted a connection): the next call may probe it at once."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                self._retry_at_s = self._clock()

    @property
    def state(self) -> BreakerState:
        """OPEN until somebody asks again after the interval."""
        return self._state

    def status(self) -> BreakerStatus:
        """A consistent picture."""
        with self._lock:
            is_open = self._state is BreakerState.OPEN
            return BreakerStatus(
                state=self._state,
                consecutive_failures=self._consecutive_failures,
                retry_in_s=max(0.0, self._retry_at_s - self._clock()) if is_open else 0.0,
                opened=self._opened,
                probes=self._probes,
                successes=self._successes,
                failures=self._failures,
                rejected=self._rejected,
            )

    def _has_seen_enough(self) -> bool:
        if self._consecutive_failures >= self.limits.consecutive_failures_max:
            return True
        is_full = len(self._window) == self.limits.window_calls
        return is_full and sum(self._window) >= self.limits.failure_ratio * self.limits.window_calls

    def _open(self) -> None:
        self._enter(BreakerState.OPEN)
        self._opened += 1
        self._retry_at_s = self._clock() + self._open_s
        self._open_s = min(self._open_s * self.limits.open_growth, self.limits.open_s_max)

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self._era += 1
        self._probe_in_flight = False
        self._consecutive_successes = 0
        self._window.clear()
