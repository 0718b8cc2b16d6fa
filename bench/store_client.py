"""One client of bench.store: a process with memory of its own that moves batches as fast as it gets answers."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.daemon_process import TOKEN, BenchError
from bench.limits import RawConnection
from hicache.client import DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.spec import CacheSpec, PagedGroup

CALL_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 180.0
CONNECT_TIMEOUT_S = 10.0
SET_BYTES_MIN = 64 << 20  # objects that a client takes turns with, so that none is still in a cache
STAMP_BYTES = 8


def spec_of(object_bytes: int) -> CacheSpec:
    """A cache whose pages have this size, a multiple of 512."""
    group = PagedGroup("full", (0,), heads=1, head_dim=object_bytes // 512, dtype="float32")
    spec = CacheSpec("bench", "1", (group,))
    assert spec.object_bytes == (object_bytes,), f"pages have {spec.object_bytes} bytes"
    return spec


SPEC = spec_of(4096)


class BenchMemory:
    """Implements SharedMemory: a memfd, every page of it touched. Without ``is_shared`` nobody else maps it."""

    def __init__(self, size_bytes: int, *, is_shared: bool, is_sealed: bool = True) -> None:
        self.size_bytes = size_bytes
        descriptor = os.memfd_create("bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size_bytes)
        if is_sealed:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._descriptor = descriptor
        self.fd = descriptor if is_shared else None
        self._mapping = mmap.mmap(descriptor, size_bytes)
        self.buffer = memoryview(self._mapping)
        pattern = os.urandom(1 << 16)
        for start in range(0, size_bytes, len(pattern)):
            self.buffer[start : start + len(pattern)] = pattern[: size_bytes - start]

    def close(self) -> None:
        """Give it back."""
        self.buffer.release()
        self._mapping.close()
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class Setup:
    """How a client connects, and the objects it moves from then on."""

    address: str
    is_shared: bool
    object_bytes: int
    batch: int

    @property
    def bulk(self) -> str:
        """How objects must go for the measurement to be what it says."""
        if self.is_shared:
            return "memory"
        return "bounce" if self.address.startswith("unix:") else "stream"

    @property
    def object_count(self) -> int:
        """Objects that a client takes turns with: whole batches."""
        wanted = max(self.batch, -(-SET_BYTES_MIN // self.object_bytes))
        return -(-wanted // self.batch) * self.batch


@dataclass(frozen=True, slots=True)
class Burst:
    """What one client did in one go."""

    moved_bytes: int
    elapsed_s: float
    call_s: tuple[float, ...]


class StoreClient:
    """Runs in the client's process. Keys are never used twice, so every put moves its bytes."""

    def __init__(self, number: int, folder: Path) -> None:
        self._number = number
        self._folder = folder
        self._last_key = 0
        self._l3: DaemonL3 | None = None
        self._memory: BenchMemory | None = None
        self._raw: dict[str, RawConnection] = {}
        self._setup = Setup("", False, 1, 1)
        self._present: list[int] = []  # key number of the object in each place of the memory
        self._turn = 0

    def connect(self, setup: Setup) -> None:
        """Open a session for ``setup``, in place of the one before."""
        self.disconnect()
        self._setup = setup
        self._memory = BenchMemory(setup.object_bytes * setup.object_count, is_shared=setup.is_shared)
        self._l3 = DaemonL3(setup.address, spec=spec_of(setup.object_bytes), memory=self._memory, token=TOKEN)
        if not self._l3.wait_ready(timeout_s=CONNECT_TIMEOUT_S):
            raise BenchError(f"no session with {setup.address}: {self._l3.status().reason}")
        if (bulk := self._l3.status().bulk) != setup.bulk:
            raise BenchError(f"objects would go through {bulk}")
        self._present = [0] * setup.object_count
        self._turn = 0

    def disconnect(self) -> None:
        """End the session and give the memory back."""
        if self._l3 is not None:
            self._l3.close()
        if self._memory is not None:
            self._memory.close()
        self._l3 = self._memory = None

    def fill(self, total_bytes: int) -> Burst:
        """Put so many bytes of new objects."""
        calls = -(-total_bytes // (self._setup.object_bytes * self._setup.batch))
        return self._burst(self._put_batch, is_over=lambda done, _: done >= calls)

    def put(self, duration_s: float) -> Burst:
        """Put new objects for so long."""
        return self._burst(self._put_batch, is_over=lambda _, elapsed_s: elapsed_s >= duration_s)

    def get(self, duration_s: float) -> Burst:
        """Get the objects that were put last for so long."""
        return self._burst(self._get_batch, is_over=lambda _, elapsed_s: elapsed_s >= duration_s)

    def ensure(self) -> None:
        """Make the objects of the last round present, those that are there already as used now."""
        for places in self._rounds():
            if all(self._present[place] for place in places):
                self._move("put", places, allowed=(Outcome.OK, Outcome.EXISTS))
            else:
                self._put_places(places)

    def warm(self) -> None:
        """Read the objects of the last round, as those do that have read them before."""
        for places in self._rounds():
            self._move("get", places, allowed=(Outcome.OK,))

    def verify(self) -> None:
        """Read every object of the last round back and compare. Raises BenchError."""
        self.ensure()
        for places in self._rounds():
            for place in places:
                self._stamp(place)[:] = bytes(STAMP_BYTES)
            self._move("get", places, allowed=(Outcome.OK,))
            for place in places:
                if bytes(self._stamp(place)) != self._present[place].to_bytes(STAMP_BYTES, "little"):
                    raise BenchError(f"object {self._present[place]} came back with the bytes of another one")

    def raw(self, kind: str, op: str, total_bytes: int) -> Burst:
        """Move so many bytes over a raw socket of this kind."""
        if kind not in self._raw:
            self._raw[kind] = RawConnection(kind, self._folder)
        start_s = time.perf_counter()
        self._raw[kind].move(op, total_bytes)
        elapsed_s = time.perf_counter() - start_s
        return Burst(total_bytes, elapsed_s, (elapsed_s,))

    def _burst(self, move: Callable[[], None], *, is_over: Callable[[int, float], bool]) -> Burst:
        call_s: list[float] = []
        start_s = last_s = time.perf_counter()
        while not is_over(len(call_s), last_s - start_s):
            move()
            now_s = time.perf_counter()
            call_s.append(now_s - last_s)
            last_s = now_s
        return Burst(len(call_s) * self._setup.batch * self._setup.object_bytes, last_s - start_s, tuple(call_s))

    def _rounds(self) -> Iterator[range]:
        for first in range(0, self._setup.object_count, self._setup.batch):
            yield range(first, first + self._setup.batch)

    def _next_places(self) -> range:
        first = self._turn * self._setup.batch % self._setup.object_count
        self._turn += 1
        return range(first, first + self._setup.batch)

    def _put_batch(self) -> None:
        self._put_places(self._next_places())

    def _put_places(self, places: Sequence[int]) -> None:
        for place in places:
            self._last_key += 1
            self._present[place] = self._last_key
            self._stamp(place)[:] = self._last_key.to_bytes(STAMP_BYTES, "little")
        self._move("put", places, allowed=(Outcome.OK,))

    def _get_batch(self) -> None:
        self._move("get", self._next_places(), allowed=(Outcome.OK,))

    def _move(self, op: str, places: Sequence[int], *, allowed: tuple[Outcome, ...]) -> None:
        assert self._l3 is not None
        size_bytes = self._setup.object_bytes
        items = [L3Item(self._key(self._present[place]), place * size_bytes, size_bytes) for place in places]
        answers: list[list[Outcome]] = []
        call = self._l3.put if op == "put" else self._l3.get
        call(items, timeout_s=CALL_TIMEOUT_S, done=answers.append)
        wrong = {outcome.name for outcome in answers[0] if outcome not in allowed} if answers else {"no answer"}
        if wrong:
            raise BenchError(f"a {op} of {len(items)} x {size_bytes} bytes ended with {', '.join(sorted(wrong))}")

    def _stamp(self, place: int) -> memoryview:
        assert self._memory is not None
        start = place * self._setup.object_bytes
        return self._memory.buffer[start : start + STAMP_BYTES]

    def _key(self, number: int) -> bytes:
        return self._number.to_bytes(4, "little") + number.to_bytes(32, "little")


def run_client(connection: Connection, number: int, folder: Path) -> None:
    """The process: method names with arguments come in, results or errors go out, until the pipe is closed."""
    client = StoreClient(number, folder)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            client.disconnect()
            return
        try:
            connection.send(getattr(client, name)(*arguments))
        except Exception as error:
            connection.send(BenchError(f"client {number}, {name}: {error}"))


class Clients:
    """The client processes, seen from the benchmark. The first ``count`` of them take part in a call."""

    def __init__(self, count: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []  # Any: a spawned process; its class depends on the start method
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_client, args=(theirs, number, folder), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def call(self, count: int, name: str, *arguments: object) -> list[Any]:  # Any: each method has its own result
        """Run a method of the first ``count`` clients at a time. Raises BenchError."""
        taking_part = self._connections[:count]
        for connection in taking_part:
            connection.send((name, arguments))
        answers = [self._receive(connection) for connection in taking_part]
        for answer in answers:
            if isinstance(answer, BenchError):
                raise answer
        return answers

    def close(self) -> None:
        """End all of them."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    @staticmethod
    def _receive(connection: Connection) -> Any:  # Any: as above
        try:
            if connection.poll(ANSWER_TIMEOUT_S):
                return connection.recv()
        except (EOFError, OSError) as error:
            raise BenchError("a client process has died") from error
        raise BenchError(f"a client did not answer within {ANSWER_TIMEOUT_S:g} s")


def rate_gbps(bursts: Sequence[Burst]) -> float:
    """What clients that ran at the same time moved together."""
    return sum(burst.moved_bytes / burst.elapsed_s for burst in bursts if burst.elapsed_s) / 1e9
