"""Small things that several test modules of the clients need."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from hicache.breaker import BreakerLimits
from hicache.client import ClientSettings
from hicache.l3 import L3, L3Item
from hicache.outcome import Outcome
from hicache.spec import CacheSpec, PagedGroup

SPEC = CacheSpec("tiny", "1", (PagedGroup("full", (0,), heads=1, head_dim=8, dtype="float32"),))
QUICK = ClientSettings(
    ping_timeout_s=0.5,
    connect_timeout_s=1.0,
    heartbeat_s=0.3,
    backoff_s=0.01,
    backoff_s_max=0.1,
    refused_retry_s=0.2,
    close_timeout_s=2.0,
    breaker=BreakerLimits(consecutive_failures_max=3, open_s=0.05, open_s_max=0.2),
)


class Answer:
    """A ``done`` that remembers what it was told, and when."""

    def __init__(self, on_done: Callable[[], None] = lambda: None) -> None:
        self.calls: list[list[Outcome]] = []
        self._on_done = on_done
        self._done = threading.Event()

    def __call__(self, outcomes: list[Outcome]) -> None:
        self._on_done()
        self.calls.append(outcomes)
        self._done.set()

    @property
    def is_there(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float = 10.0) -> list[Outcome]:
        assert self._done.wait(timeout_s), "done was not called"
        assert len(self.calls) == 1, "done was called more than once"
        return self.calls[0]


def key(number: int) -> bytes:
    """An object key, as long as a real one."""
    return number.to_bytes(32, "little") + b"\0\0\0\0"


def payload(number: int, size_bytes: int) -> bytes:
    """Bytes that belong to ``key(number)`` and to no other."""
    block = b"".join((number * 1_000_003 + position).to_bytes(8, "little") for position in range(32))
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def get(l3: L3, items: Sequence[L3Item], *, timeout_s: float = 10.0) -> list[Outcome]:
    """A get that waits for its ``done``."""
    answer = Answer()
    l3.get(items, timeout_s=timeout_s, done=answer)
    return answer.wait()


def put(l3: L3, items: Sequence[L3Item], *, timeout_s: float = 10.0) -> list[Outcome]:
    """A put that waits for its ``done``."""
    answer = Answer()
    l3.put(items, timeout_s=timeout_s, done=answer)
    return answer.wait()


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 10.0, what: str = "it") -> None:
    """Returns as soon as ``condition`` holds; fails when it does not by the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {timeout_s} s"
        threading.Event().wait(0.005)


def open_descriptors() -> Counter[str]:
    """How many file descriptors of each kind this process has open."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found[os.readlink(f"/proc/self/fd/{name}").partition("[")[0]] += 1
    return found


def client_threads() -> list[str]:
    """Names of the threads that L3 clients run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-l3")]
