"""`python -m bench.ram_tier`: what memory of hicached in front of a backend gains for hot objects, and what mapping it
into the engine would gain on top. See docs/decisions/0019-ram-tier.md."""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, cast

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.limits import MemoryCopy, daemon_copy_threads, rate_of
from bench.machine import machine_facts, write_json
from bench.mooncake_servers import MooncakeServers
from hicache.backends.base import Backend, GetItem, PutItem
from hicache.backends.mooncake_client import load_wheel
from hicache.backends.open import open_backend
from hicache.backends.ram_tier import RamTier
from hicache.backends.shared_store import SharedBackend
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome

Bytes: TypeAlias = NDArray[np.uint8]

HOT_BYTES = 128 << 20  # of each thread, far above the caches
CHUNK_BYTES = 8 << 20  # what the daemon reads in one call
OBJECT_BYTES = (1 << 20, 8 << 20)
RAM_BYTES = 1 << 30
ASKED_CALLS = 201


class Readers:
    """Threads that read hot objects into touched memory of their own, as the daemon does into L2."""

    def __init__(self, object_bytes: int, *, threads: int) -> None:
        self._object_bytes = object_bytes
        self.threads = threads
        self._count = HOT_BYTES // object_bytes
        self._memory = [np.ones(HOT_BYTES, dtype=np.uint8).data for _ in range(threads)]
        self._turn = [0] * threads

    def fill(self, backend: Backend) -> None:
        """Store the objects, where they are not there, and read each twice: then they are hot."""
        content = memoryview(os.urandom(self._object_bytes))
        for thread in range(self.threads):
            for number in range(self._count):
                item = PutItem(self._key(thread, number), content)
                if not backend.put([item])[0].is_ok:
                    raise BackendError("an object was not stored")
        for _ in range(2):
            rate_of(lambda thread: self.read(backend, thread, HOT_BYTES), threads=self.threads)

    def read(self, backend: Backend, thread: int, total_bytes: int) -> int:
        """Get so many bytes in chunks; returns how many."""
        per_chunk = max(1, CHUNK_BYTES // self._object_bytes)
        chunks = max(1, total_bytes // (per_chunk * self._object_bytes))
        for _ in range(chunks):
            numbers = [(self._turn[thread] + place) % self._count for place in range(per_chunk)]
            self._turn[thread] += per_chunk
            items = [GetItem(self._key(thread, number), self._place(thread, number)) for number in numbers]
            if any(outcome is not Outcome.OK for outcome in backend.get_into(items)):
                raise BackendError("an object was not read")
        return chunks * per_chunk * self._object_bytes

    def ask_ms(self, store: SharedBackend, *, calls: int) -> float:
        """What it takes to ask the store for the objects of one chunk, as the tier does before each answer; median."""
        keys = [self._key(0, number) for number in range(max(1, CHUNK_BYTES // self._object_bytes))]
        times_s: list[float] = []
        for _ in range(calls):
            start_s = time.perf_counter()
            found = store.find(keys)
            times_s.append(time.perf_counter() - start_s)
            if any(outcome is not Outcome.OK for outcome in found):
                raise BackendError("an object was not found")
        return statistics.median(times_s) * 1e3

    def _key(self, thread: int, number: int) -> bytes:
        return thread.to_bytes(4, "little") + number.to_bytes(32, "little") + self._object_bytes.to_bytes(4, "little")

    def _place(self, thread: int, number: int) -> memoryview:
        return self._memory[thread][number * self._object_bytes : (number + 1) * self._object_bytes]


class Mapped:
    """A memfd of the daemon, mapped read-only by an engine that copies from it to where it computes."""

    def __init__(self, *, threads: int) -> None:
        self._descriptor = os.memfd_create("ram-tier", os.MFD_CLOEXEC)
        os.posix_fallocate(self._descriptor, 0, HOT_BYTES * threads)
        self._l1 = [np.ones(HOT_BYTES, dtype=np.uint8) for _ in range(threads)]
        self._l2 = [np.ones(HOT_BYTES, dtype=np.uint8) for _ in range(threads)]
        self._map()

    def _map(self) -> None:
        self._mapping = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
        self._bytes = np.frombuffer(self._mapping, dtype=np.uint8)

    def remap(self) -> None:
        """As a new engine, or pages that it has not read before."""
        self._map()

    def read(self, thread: int, total_bytes: int) -> int:
        """Mapped pages -> L1, each byte once."""
        return self._copy(self._bytes[thread * HOT_BYTES :], self._l1[thread], total_bytes)

    def read_l2(self, thread: int, total_bytes: int) -> int:
        """L2 -> L1, what follows a get into L2."""
        return self._copy(self._l2[thread], self._l1[thread], total_bytes)

    @staticmethod
    def _copy(source: Bytes, target: Bytes, total_bytes: int) -> int:
        size_bytes = min(total_bytes, HOT_BYTES)
        for start in range(0, size_bytes, CHUNK_BYTES):
            np.copyto(target[start : start + CHUNK_BYTES], source[start : start + CHUNK_BYTES])
        return size_bytes

    def close(self) -> None:
        """Give the memory back when nothing is mapped any more."""
        os.close(self._descriptor)


@contextlib.contextmanager
def stores(folder: Path, skipped: list[str]) -> Iterator[dict[str, Backend]]:
    """Each backend that can be had here, and the same behind a RAM tier; the others are named."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, Backend] = {}
        for scheme in ("lmdb", "file"):
            for name in (scheme, f"{scheme} + RAM"):
                backend = open_backend(f"{scheme}://{folder}/{name.replace(' ', '')}", capacity_bytes=1 << 30)
                opened[name] = RamTier(backend, capacity_bytes=RAM_BYTES) if "+" in name else backend
        try:
            load_wheel()
            servers = MooncakeServers(folder, segment_bytes=2 * len(OBJECT_BYTES) * RAM_BYTES)
            stack.callback(servers.close)
            url = f"mooncake://{servers.address}?metrics={servers.metrics}"
            opened["mooncake"] = open_backend(url, capacity_bytes=0)
            opened["mooncake + RAM"] = open_backend(f"{url}&ram_bytes={RAM_BYTES}", capacity_bytes=0)
        except (ConfigError, BackendError, OSError) as error:
            skipped.append(f"mooncake: {error}")
        try:
            yield opened
        finally:
            for backend in opened.values():
                backend.close()


def measure(
    opened: dict[str, Backend], *, repetitions: int, burst_bytes: int
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Rows, each beside the memcpy of the same repetition; all ways take turns. Then what asking Mooncake takes."""
    threads = daemon_copy_threads(4)
    copies = MemoryCopy(threads=threads)
    rows = []
    asked: list[dict[str, object]] = []
    for object_bytes in OBJECT_BYTES:
        readers = Readers(object_bytes, threads=threads)
        mapped = Mapped(threads=threads)
        for backend in opened.values():
            readers.fill(backend)
        ways = ways_of(opened, readers, mapped, burst_bytes)
        speeds: dict[str, list[float]] = {name: [] for name in ("memcpy", *ways)}
        for _ in range(repetitions):
            speeds["memcpy"].append(copies.measure(burst_bytes * threads))
            mapped.remap()
            for name, way in ways.items():
                speeds[name].append(rate_of(way, threads=threads))
        rows += [_row(name, object_bytes, values, speeds["memcpy"]) for name, values in speeds.items()]
        store = opened.get("mooncake")
        if store is not None:
            ask_ms = readers.ask_ms(cast(SharedBackend, store), calls=ASKED_CALLS)
            asked.append({"object_bytes": object_bytes, "ask_ms": round(ask_ms, 3)})
        mapped.close()
    return rows, asked


def ways_of(
    opened: dict[str, Backend], readers: Readers, mapped: Mapped, burst_bytes: int
) -> dict[str, Callable[[int], int]]:
    """What each thread does, by the name of its row."""
    ways: dict[str, Callable[[int], int]] = {
        name: partial(readers.read, backend, total_bytes=burst_bytes) for name, backend in opened.items()
    }
    ways["L2 -> L1, after a get"] = partial(mapped.read_l2, total_bytes=burst_bytes)
    ways["mapped -> L1, first time"] = partial(mapped.read, total_bytes=burst_bytes)
    ways["mapped -> L1, again"] = partial(mapped.read, total_bytes=burst_bytes)
    return ways


def _row(name: str, object_bytes: int, speeds: Sequence[float], memcpy: Sequence[float]) -> dict[str, object]:
    ratios = [speed / most for speed, most in zip(speeds, memcpy, strict=True)]
    return {
        "way": name,
        "object_bytes": object_bytes,
        "gbps": round(statistics.median(speeds), 2),
        "least": round(min(speeds), 2),
        "most": round(max(speeds), 2),
        "of_memcpy": round(statistics.median(ratios), 2),
    }


@click.command()
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="Fewer repetitions; ends within 45 s.")
@click.option("--folder", metavar="DIR", help="Where stores are made; a temporary folder otherwise.")
def main(json_path: str | None, quick: bool, folder: str | None) -> None:
    """Read hot objects from each backend, from a RAM tier in front of it, and from mapped memory."""
    console = Console(stderr=json_path == "-")
    skipped: list[str] = []
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="hicache-ram-", dir=folder) as work, stores(Path(work), skipped) as opened:
        rows, asked = measure(opened, repetitions=3 if quick else 9, burst_bytes=HOT_BYTES)
    table = Table(title="hot objects, GB/s (10^9 bytes) of all threads: median, least, most, share of memcpy")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    for row in asked:
        console.print("one thread asks Mooncake for {object_bytes}-byte objects of a get: {ask_ms} ms".format_map(row))
    for line in skipped:
        console.print(f"skipped: {line}", markup=False)
    write_json({"rows": rows, "asked": asked, "skipped": skipped, "machine": machine_facts(load_before)}, json_path)


if __name__ == "__main__":
    main()
