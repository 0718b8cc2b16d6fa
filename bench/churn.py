"""`python -m bench.churn`: a nearly full LMDB store while objects of mixed sizes come and go."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.limits import MemoryCopy, touched_memory
from bench.machine import machine_facts, write_json
from hicache.backends.base import GetItem, PutItem
from hicache.backends.lmdb_store import LmdbBackend
from hicache.outcome import Outcome

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB,) * 4 + (256 * KIB,) * 3 + (MIB,) * 3 + (4 * MIB, 8 * MIB, 28 * MIB)  # 3.4 MiB on average
SOURCE_BYTES = 64 * MIB
FULL_SHARE = 0.9
GET_EVERY = 8  # puts; each get is compared
TENTHS = 10


@dataclass(frozen=True, slots=True)
class ChurnRow:
    """One tenth of a run."""

    operations: int
    put_bytes: int
    put_gbps: float  # payload by the time spent in puts
    of_memcpy: float  # one thread's, measured right before
    put_p50_ms: float
    put_p99_ms: float
    put_max_ms: float
    refused: int  # puts that were not stored: the map or the slab was full for them
    wrong: int  # gets that did not return what was put
    reader_slots: int
    map_used_bytes: int  # pages of the index map that were ever used


class Churn:
    """Puts objects and deletes others at random, so that the store stays FULL_SHARE full."""

    def __init__(self, backend: LmdbBackend, *, seed: int) -> None:
        self._backend = backend
        self._random = Random(seed)
        self._source = memoryview(touched_memory(SOURCE_BYTES + SIZES[-1]))
        np.frombuffer(self._source, np.uint8)[:] = np.random.default_rng(seed).integers(
            256, size=len(self._source), dtype=np.uint8
        )
        self._target = memoryview(mmap.mmap(-1, max(SIZES)))
        self._present: list[tuple[bytes, int, int]] = []  # key, offset in the source, size
        self._count = 0
        self._room_bytes = int(backend.usage().capacity_bytes * FULL_SHARE)

    def tenth(self, operations: int, memcpy_gbps: float) -> ChurnRow:
        """Run so many puts."""
        seconds, put_bytes, refused, wrong = np.empty(operations), 0, 0, 0
        for number in range(operations):
            size_bytes = self._random.choice(SIZES)
            self._make_room(size_bytes)
            key = b"%032d" % self._count
            offset = self._random.randrange(SOURCE_BYTES)
            payload = self._source[offset : offset + size_bytes]
            start_s = time.perf_counter()
            [outcome] = self._backend.put([PutItem(key, payload)])
            seconds[number] = time.perf_counter() - start_s
            self._count += 1
            if outcome is Outcome.OK:
                self._present.append((key, offset, size_bytes))
                put_bytes += size_bytes
            else:
                refused += 1
            if number % GET_EVERY == 0:
                wrong += not self._is_intact(*self._random.choice(self._present))
        p50, p99, most = (float(np.percentile(seconds, share) * 1e3) for share in (50, 99, 100))
        put_gbps = put_bytes / seconds.sum() / 1e9
        return ChurnRow(
            operations,
            put_bytes,
            put_gbps,
            put_gbps / memcpy_gbps,
            p50,
            p99,
            most,
            refused,
            wrong,
            self._backend.reader_slots(),
            self._backend.map_used_bytes(),
        )

    def _make_room(self, size_bytes: int) -> None:
        while self._backend.usage().stored_bytes + size_bytes > self._room_bytes:
            place = self._random.randrange(len(self._present))
            self._present[place], self._present[-1] = self._present[-1], self._present[place]
            key, _, _ = self._present.pop()
            assert self._backend.delete([key]) == [Outcome.OK]

    def _is_intact(self, key: bytes, offset: int, size_bytes: int) -> bool:
        target = self._target[:size_bytes]
        is_read = self._backend.get_into([GetItem(key, target)]) == [Outcome.OK]
        return is_read and target == self._source[offset : offset + size_bytes]


def churn(directory: Path, *, operations: int, capacity_bytes: int, seed: int) -> Iterator[ChurnRow]:
    """A row for each tenth of the run."""
    copies = MemoryCopy(threads=1)
    backend = LmdbBackend.open(directory, capacity_bytes=capacity_bytes)
    try:
        run = Churn(backend, seed=seed)
        for _ in range(TENTHS):
            yield run.tenth(operations // TENTHS, copies.measure(256 * MIB))
    finally:
        backend.close()


@click.command()
@click.option("--operations", type=click.IntRange(TENTHS), default=1_000_000, show_default=True, help="Puts in all.")
@click.option("--capacity-mib", type=click.IntRange(64), default=2048, show_default=True, help="Size of the store.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="20,000 puts in 512 MiB; ends within 45 s.")
@click.option("--folder", metavar="DIR", help="Where the store is made; a temporary folder otherwise.")
def main(operations: int, capacity_mib: int, seed: int, json_path: str | None, quick: bool, folder: str | None) -> None:
    """Keep a store 90 % full while objects of 64 KiB to 28 MiB come and go, and watch whether it gets slower."""
    start_s, load_before = time.monotonic(), os.getloadavg()[0]
    console = Console(stderr=json_path == "-", width=None if sys.stdout.isatty() else 140)
    if quick:
        operations, capacity_mib = 20_000, 512
    rows: list[ChurnRow] = []
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=folder) as work, console.status("churning") as status:
        for row in churn(Path(work) / "store", operations=operations, capacity_bytes=capacity_mib * MIB, seed=seed):
            rows.append(row)
            status.update(f"{len(rows)} of {TENTHS}")
    machine = machine_facts(load_before) | {"wall_s": round(time.monotonic() - start_s, 1)}
    console.print(_table(rows))
    write_json({"machine": machine, "rows": [asdict(row) for row in rows]}, json_path)
    if any(row.refused or row.wrong for row in rows):
        sys.exit(1)


def _table(rows: list[ChurnRow]) -> Table:
    table = Table(title="churn of an LMDB store, a row for each tenth of the run")
    for name in ("puts", "GB", "GB/s", "of memcpy", "p50 ms", "p99 ms", "max ms", "refused", "wrong", "slots", "map"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.operations}",
            f"{row.put_bytes / 1e9:.0f}",
            f"{row.put_gbps:.2f}",
            f"{row.of_memcpy:.2f}",
            f"{row.put_p50_ms:.2f}",
            f"{row.put_p99_ms:.2f}",
            f"{row.put_max_ms:.0f}",
            f"{row.refused}",
            f"{row.wrong}",
            f"{row.reader_slots}",
            f"{row.map_used_bytes / MIB:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
