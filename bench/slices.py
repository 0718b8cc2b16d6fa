"""`python -m bench.slices`: what head slices cost the copies between L1 and L2, beside unsliced copies and memcpy.

See docs/decisions/0021-a-replica-in-one-spec.md."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

import click
import torch
from rich.console import Console
from rich.table import Table

from bench.limits import MemoryCopy
from bench.machine import machine_facts, write_json
from hicache.copies import PoolCopies
from hicache.pools import L1Pool, L2Pool
from hicache.spec import CacheSpec, Group, HeadSplit, PagedGroup, StateField, StateGroup

Layout: TypeAlias = Literal["one tensor", "by layer"]

HEADS = 8
PAGES = PagedGroup("pages", tuple(range(16)), heads=HEADS, head_dim=128, dtype="bfloat16")
STATE = StateGroup(  # a gated delta rule of 8 key and 16 value heads
    "states",
    tuple(range(8)),
    (
        StateField("conv", (3, 32 * 128), "bfloat16", split=HeadSplit(1, ((8, 128), (8, 128), (16, 128)))),
        StateField("temporal", (16, 128, 128), "float32", split=HeadSplit(0)),
    ),
)
SLICES = (1, 2, 4, 8)
_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Row:
    """GB/s of one thread, medians. ``of_unsliced``: beside the same bytes in one slice, in the same repetitions."""

    kind: str
    l1_layout: Layout
    slices: int
    backup: float
    load: float
    backup_of_unsliced: float
    load_of_unsliced: float
    backup_of_memcpy: float
    load_of_memcpy: float


class Copied:
    """The pools of one rank that holds everything, cut into so many slices; all slots move at once."""

    def __init__(self, group: Group, slices: int, *, l1_layout: Layout, slots: int) -> None:
        self.slices = slices
        self.size_bytes = slots * group.object_bytes(64)
        spec = CacheSpec("bench", "1", (group,), tp_lcm=slices)
        l1 = L1Pool(spec, pages=slots, state_slots=slots)
        if l1_layout == "by layer":
            paged, states = l1.paged.items(), l1.state.items()
            by_layer = {index: list(tensor) for index, tensor in paged}
            fields = {index: {name: list(tensor) for name, tensor in of.items()} for index, of in states}
            l1 = L1Pool.adopt(spec, {**by_layer, **fields})
        self._l2 = L2Pool(spec, (slots,))
        self._copies = PoolCopies(l1, self._l2)
        self._sources, self._targets = list(range(slots)), list(reversed(range(slots)))

    def backup(self) -> float:
        """GB/s from L1 to L2."""
        return self._rate(self._copies.backup)

    def load(self) -> float:
        """GB/s from L2 to L1."""
        return self._rate(self._copies.load)

    def close(self) -> None:
        """Give L2 back."""
        self._l2.close()

    def _rate(self, copy: Callable[[int, list[int], list[int]], None]) -> float:
        start_s = time.perf_counter()
        copy(0, self._sources, self._targets)
        return self.size_bytes / (time.perf_counter() - start_s) / _GIGA


def measure(group: Group, *, l1_layout: Layout, slots: int, repetitions: int) -> list[Row]:
    """One row for each number of slices; all take turns, each beside the memcpy of the same repetition."""
    copied = [Copied(group, slices, l1_layout=l1_layout, slots=slots) for slices in SLICES]
    memcpy = MemoryCopy(threads=1, working_set_bytes=copied[0].size_bytes)
    backups: list[list[float]] = []
    loads: list[list[float]] = []
    limits: list[float] = []
    for repetition in range(repetitions + 1):
        measured = [each.backup() for each in copied], [each.load() for each in copied]
        if repetition:  # the first one touches the memory
            limits.append(memcpy.measure(copied[0].size_bytes))
            backups.append(measured[0])
            loads.append(measured[1])
    for each in copied:
        each.close()
    return [
        Row(
            group.name,
            l1_layout,
            each.slices,
            backup=_median([row[place] for row in backups]),
            load=_median([row[place] for row in loads]),
            backup_of_unsliced=_median([row[place] / row[0] for row in backups]),
            load_of_unsliced=_median([row[place] / row[0] for row in loads]),
            backup_of_memcpy=_median([row[place] / limit for row, limit in zip(backups, limits, strict=True)]),
            load_of_memcpy=_median([row[place] / limit for row, limit in zip(loads, limits, strict=True)]),
        )
        for place, each in enumerate(copied)
    ]


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 2)


@click.command()
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="Fewer repetitions; ends within 45 s.")
def main(json_path: str | None, quick: bool) -> None:
    """Copy pages and states between L1 and L2 in host memory, whole and in slices of heads."""
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    layouts: tuple[Layout, ...] = ("one tensor", "by layer")
    rows = [
        row
        for group, slots in ((PAGES, 24), (STATE, 12))
        for l1_layout in layouts
        for row in measure(group, l1_layout=l1_layout, slots=slots, repetitions=5 if quick else 15)
    ]
    table = Table(title=f"{HEADS} heads in slices: GB/s (10^9 bytes) of one thread, median")
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*map(str, asdict(row).values()))
    Console(stderr=json_path == "-").print(table)
    write_json({"rows": [asdict(row) for row in rows], "machine": machine_facts(load_before)}, json_path)


if __name__ == "__main__":
    main()
