"""Limits on how fast a tenant may call and move bytes: who is above one is refused at once."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable

from hicache.daemon.refusals import Refusal
from hicache.wire.protocol import RefusalCode

BURST_S = 1.0  # what may come at once after silence, as time at the full rate


class TokenBucket:
    """``rate_per_s`` tokens a second, and at most those of BURST_S, or one, at a time. A rate of 0 sets no limit.

    What costs more than the bucket holds is let through when it is full, and paid off afterwards: the rate holds over
    time for any size.
    """

    def __init__(self, rate_per_s: float, *, clock: Callable[[], float]) -> None:
        self.rate_per_s = rate_per_s
        self._depth = max(1.0, rate_per_s * BURST_S)
        self._level = self._depth
        self._clock = clock
        self._filled_at_s = clock()

    def wait_s(self, cost: float) -> float:
        """How long until ``cost`` may be taken; 0 now."""
        if not self.rate_per_s:
            return 0.0
        now_s = self._clock()
        grown = self.rate_per_s * max(0.0, now_s - self._filled_at_s)
        self._level = min(self._depth, self._level + grown)
        self._filled_at_s = now_s
        return max(0.0, min(cost, self._depth) - self._level) / self.rate_per_s

    def take(self, cost: float) -> None:
        """Take tokens; a negative cost gives them back."""
        self._level = min(self._depth, self._level - cost)


class TenantRates:
    """The rates of one tenant, over all of its sessions. Thread-safe."""

    def __init__(
        self, *, calls_per_s_max: float = 0.0, bytes_per_s_max: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self.set_limits(calls_per_s_max=calls_per_s_max, bytes_per_s_max=bytes_per_s_max)
        self.refusals: Counter[str] = Counter()  # by limit: calls or bytes

    def set_limits(self, *, calls_per_s_max: float, bytes_per_s_max: float) -> None:
        """From now on these hold, for who was silent until now."""
        with self._lock:
            self._calls = TokenBucket(calls_per_s_max, clock=self._clock)
            self._bytes = TokenBucket(bytes_per_s_max, clock=self._clock)

    def admit_call(self) -> None:
        """Count a call. Raises Refusal(RATE_LIMITED), which costs the tenant nothing."""
        self._admit("calls", self._calls, 1.0, f"calls_per_s_max is {self._calls.rate_per_s:.12g}")

    def admit_bytes(self, size_bytes: int) -> None:
        """Count the payload of a batch before it moves. Raises Refusal(RATE_LIMITED)."""
        self._admit("bytes", self._bytes, size_bytes, f"bytes_per_s_max is {self._bytes.rate_per_s:.12g}")

    def give_back_bytes(self, size_bytes: int) -> None:
        """So many of the counted bytes did not move after all."""
        with self._lock:
            self._bytes.take(-size_bytes)

    def _admit(self, limit: str, bucket: TokenBucket, cost: float, text: str) -> None:
        with self._lock:
            wait_s = bucket.wait_s(cost)
            if wait_s == 0.0:
                bucket.take(cost)
                return
            self.refusals[limit] += 1
        raise Refusal(RefusalCode.RATE_LIMITED, f"retry in {math.ceil(wait_s * 1000)} ms; {text} for this tenant")
