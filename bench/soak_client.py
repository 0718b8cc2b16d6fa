"""One client of the soak: a process that stores, finds, reads back, compares, leaves in the middle and comes back."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import Random

from bench.store_client import SPEC, BenchMemory
from hicache.client import ClientSettings, DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome

SIZES_BYTES = (4096, 16_384, 65_536, 262_144)
BATCH_MAX = 4
MEMORY_BYTES = BATCH_MAX * SIZES_BYTES[-1]
REMEMBERED_MAX = 256  # objects that a client reads back
CALL_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 20.0
REPORT_S = 0.5
LEASE_S = 2.0
QUICK = ClientSettings(lease_s=LEASE_S, backoff_s=0.02, backoff_s_max=0.2, refused_retry_s=0.2)
PATTERN = memoryview(Random(7).randbytes((1 << 20) + SIZES_BYTES[-1]))
WAYS = ("memory", "stream", "bounce")  # of the objects


@dataclass(frozen=True, slots=True)
class SoakRole:
    """Who a client is, and how fast it goes."""

    number: int
    life: int
    address: str
    token: str
    way: str
    pause_s: float  # between calls

    def key(self, count: int) -> bytes:
        """The key of its ``count``-th object."""
        return hashlib.sha256(f"{self.number} {self.life} {count}".encode()).digest()


@dataclass(slots=True)
class SoakReport:
    """What happened since the last one."""

    outcomes: Counter[str] = field(default_factory=Counter)  # "get OK"
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of calls, by operation
    wrong: list[str] = field(default_factory=list)
    compared_bytes: int = 0
    sessions: int = 0
    aborts: int = 0


def run_client(role: SoakRole, parent: Connection) -> None:
    """Runs until the parent says anything, or is gone."""
    logging.getLogger("hicache").setLevel(logging.CRITICAL)  # of what is done to these clients, they would tell all day
    client = SoakClient(role)
    told_s = time.monotonic()
    try:
        while not parent.poll():
            client.step()
            if time.monotonic() - told_s >= REPORT_S:
                told_s = time.monotonic()
                parent.send(client.take_report())
            time.sleep(role.pause_s * client.random.uniform(0.5, 1.5))
        client.close()
        parent.send(client.take_report())
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone, and so is the daemon


class SoakClient:
    """Its objects are its own; those of earlier lives are left to eviction."""

    def __init__(self, role: SoakRole) -> None:
        self.random = Random(f"{role.number} {role.life}")
        self._role = role
        self._memory = BenchMemory(MEMORY_BYTES, is_shared=role.way != "bounce", is_sealed=role.way != "stream")
        self._stored: deque[tuple[bytes, int, int]] = deque(maxlen=REMEMBERED_MAX)  # key, offset in PATTERN, size
        self._count = 0
        self._report = SoakReport()
        self._l3 = self._open()

    def step(self) -> None:
        """One thing that engines do."""
        steps = (self._put, self._get, self._look_up, self._delete, self._come_again, self._leave_in_the_middle)
        [step] = self.random.choices(steps, (40, 40, 12, 4, 2, 2))
        step()

    def take_report(self) -> SoakReport:
        """What was not told yet."""
        report, self._report = self._report, SoakReport()
        return report

    def close(self) -> None:
        """Leaves as it should."""
        self._l3.close()
        self._memory.close()

    def _open(self) -> DaemonL3:
        role = self._role
        l3 = DaemonL3(role.address, spec=SPEC, memory=self._memory, token=role.token, settings=QUICK)
        self._report.sessions += l3.wait_ready(timeout_s=CONNECT_TIMEOUT_S)
        return l3

    def _come_again(self) -> None:
        self._l3.close()
        self._l3 = self._open()

    def _leave_in_the_middle(self) -> None:
        """Closes while objects move: ``close`` waits for bytes that may still be touched, and for nothing else."""
        items = self._new_items()
        move = self.random.choice((self._l3.put, self._l3.get))
        move(items, timeout_s=CALL_TIMEOUT_S, done=lambda _: None)
        self._report.aborts += 1
        self._come_again()

    def _put(self) -> None:
        items = self._new_items()
        outcomes = self._moved("put", self._l3.put, items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome in (Outcome.OK, Outcome.EXISTS):
                self._stored.append((item.key, _offset_of(item.key), item.size_bytes))

    def _new_items(self) -> list[L3Item]:
        items, start = [], 0
        for _ in range(self.random.randint(1, BATCH_MAX)):
            self._count += 1
            key, size_bytes = self._role.key(self._count), self.random.choice(SIZES_BYTES)
            offset = _offset_of(key)
            self._memory.buffer[start : start + size_bytes] = PATTERN[offset : offset + size_bytes]
            items.append(L3Item(key, start, size_bytes))
            start += size_bytes
        return items

    def _get(self) -> None:
        if not self._stored:
            return
        chosen = self.random.sample(self._stored, min(len(self._stored), self.random.randint(1, BATCH_MAX)))
        found = self._look_up([key for key, _, _ in chosen])
        wanted = [it for it, outcome in zip(chosen, found, strict=True) if outcome is Outcome.OK]
        items = [L3Item(key, number * SIZES_BYTES[-1], size) for number, (key, _, size) in enumerate(wanted)]
        for item in items:
            self._memory.buffer[item.offset : item.offset + item.size_bytes] = bytes(item.size_bytes)
        outcomes = self._moved("get", self._l3.get, items) if items else []
        for item, (key, offset, size_bytes), outcome in zip(items, wanted, outcomes, strict=True):
            if outcome is Outcome.OK:
                self._report.compared_bytes += size_bytes
                if self._memory.buffer[item.offset : item.offset + size_bytes] != PATTERN[offset : offset + size_bytes]:
                    self._report.wrong.append(f"client {self._role.number}: wrong bytes of {key.hex()[:16]}")

    def _look_up(self, keys: Sequence[bytes] = ()) -> list[Outcome]:
        """With a lease that a get may end, or nobody."""
        keys = keys or [key for key, _, _ in self.random.sample(self._stored, min(len(self._stored), BATCH_MAX))]
        return self._timed("lookup", lambda: self._l3.lookup(keys, timeout_s=CALL_TIMEOUT_S)) if keys else []

    def _delete(self) -> None:
        if self._stored:
            key, _, _ = self._stored.popleft()
            self._timed("delete", lambda: self._l3.delete([key], timeout_s=CALL_TIMEOUT_S))

    def _moved(self, name: str, move: Callable[..., None], items: Sequence[L3Item]) -> list[Outcome]:
        over, outcomes = threading.Event(), []

        def done(result: list[Outcome]) -> None:
            outcomes.extend(result)
            over.set()

        def wait() -> list[Outcome]:
            move(items, timeout_s=CALL_TIMEOUT_S, done=done)
            if not over.wait(3 * CALL_TIMEOUT_S):
                self._report.wrong.append(f"client {self._role.number}: a {name} never ended")
                return [Outcome.UNAVAILABLE] * len(items)
            return outcomes

        return self._timed(name, wait)

    def _timed(self, name: str, call: Callable[[], list[Outcome]]) -> list[Outcome]:
        start_s = time.perf_counter()
        outcomes = call()
        self._report.seconds.setdefault(name, []).append(time.perf_counter() - start_s)
        self._report.outcomes.update(f"{name} {outcome.name}" for outcome in outcomes)
        return outcomes


def _offset_of(key: bytes) -> int:
    return int.from_bytes(key[:4], "little") % (1 << 20)
