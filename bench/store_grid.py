"""What bench.store measures: every cell of the full grid, and the few that --quick has time for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
PATHS = ("memory", "unix", "tcp")
OBJECT_BYTES = (64 * KIB, MIB, 8 * MIB, 28 * MIB)
BATCHES = (32, 1)
CLIENT_COUNTS = (1, 4)
# A Mooncake store over loopback, as it is, and with the RAM tier of hicached in front of it.
MOONCAKE_RAM = "mooncake_ram"
MOONCAKE = ("mooncake", MOONCAKE_RAM)
UNCHECKED = "memory_unchecked"  # registered memory through a daemon that verifies nothing


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination; it is measured with both get and put."""

    path: str
    backend: str
    object_bytes: int
    batch: int
    clients: int

    def __str__(self) -> str:
        return f"{self.path} {self.backend} {size_text(self.object_bytes)} x{self.batch}, {self.clients} clients"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of the grid, and how long each measurement takes."""

    cells: tuple[Cell, ...]
    repetitions: int
    burst_s: float
    limit_bytes: int
    budget_s: float  # no cell is begun after that
    peers_budget_s: float  # nor a peer so long after the last cell
    has_time_for_slow_peers: bool = True

    @property
    def clients_max(self) -> int:
        """Client processes that are needed."""
        return max(cell.clients for cell in self.cells)


def full_plan(backends: tuple[str, ...]) -> Plan:
    """Everything: 4 clients with batches of 32 x 28 MiB want 12 GB of memory and 8 GB of disk.

    Mooncake, whose own network is the limit, by one client over registered memory only.
    """
    grid = itertools.product(_local(backends), OBJECT_BYTES, PATHS, BATCHES, CLIENT_COUNTS)
    cells = [Cell(path, backend, size, batch, clients) for backend, size, path, batch, clients in grid]
    cells += [Cell(UNCHECKED, backend, size, 32, 1) for backend in _local(backends) for size in OBJECT_BYTES]
    shared = itertools.product(_shared(backends), OBJECT_BYTES, BATCHES)
    cells += [Cell("memory", backend, size, batch, 1) for backend, size, batch in shared]
    return Plan(tuple(cells), repetitions=5, burst_s=0.5, limit_bytes=1 << 30, budget_s=3600.0, peers_budget_s=1800.0)


def quick_plan(backends: tuple[str, ...], *, with_peers: bool) -> Plan:
    """The rows that have targets, then some of the others while there is time. Ends within 45 s, peers or not."""
    return Plan(
        tuple(_quick_cells(backends)),
        repetitions=3,
        burst_s=0.12,
        limit_bytes=384 * MIB,
        budget_s=18.0 if with_peers else 33.0,
        peers_budget_s=13.0,
        has_time_for_slow_peers=False,
    )


def _quick_cells(backends: tuple[str, ...]) -> Iterator[Cell]:
    local = _local(backends)
    for backend in local:
        yield Cell("memory", backend, MIB, 32, 1)
        yield Cell("unix", backend, MIB, 32, 1)
        yield Cell("tcp", backend, MIB, 32, 1)
        yield Cell("memory", backend, 8 * MIB, 32, 1)
    for backend in _shared(backends):
        yield Cell("memory", backend, MIB, 32, 1)
        yield Cell("memory", backend, 8 * MIB, 32, 1)
    for backend in local:
        for size in (MIB, 8 * MIB):
            yield Cell(UNCHECKED, backend, size, 32, 1)
    for backend in local:
        yield Cell("memory", backend, MIB, 32, 4)
        yield Cell("memory", backend, MIB, 1, 1)
        yield Cell("memory", backend, 64 * KIB, 32, 1)


def _local(backends: tuple[str, ...]) -> list[str]:
    return [backend for backend in backends if backend not in MOONCAKE]


def _shared(backends: tuple[str, ...]) -> list[str]:
    return [backend for backend in backends if backend in MOONCAKE]


def size_text(size_bytes: int) -> str:
    """``28 MiB``."""
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"
