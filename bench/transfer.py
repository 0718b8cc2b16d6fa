"""`python -m bench.transfer`: how fast pages go between L1 and L2 by back end, beside one large copy.

In host memory by layout of L2 (docs/decisions/0031-copies-on-a-cpu.md); with `--device cuda`: bench/transfer_cuda.py.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NamedTuple

import click
import torch
from rich.console import Console

from bench.geometries import GQA_8B, MLA, PAGE_TOKENS
from bench.limits import MemoryCopy
from bench.machine import machine_facts, write_json
from bench.transfer_cuda import MISSING, CudaFigures, cuda_figures
from bench.transfer_row import Layout, Row, table_of
from hicache.kernels.legs import Layers, PagedPool
from hicache.moves import DIRECT, REFERENCE, Mover
from hicache.pools.dtypes import torch_dtype
from hicache.pools.l1 import page_shape
from hicache.spec import PagedGroup
from hicache.staging import Staging

SLOTS = 16  # of every pool: 128 MiB of the larger model, four times a cache
MODELS = {group.name: group for group in (GQA_8B, MLA)}
# From [pages, layers, planes, page_tokens, heads, head_dim] to the order in memory.
_ORDERS: dict[Layout, tuple[int, ...]] = {
    "layer_first": (1, 0, 2, 3, 4, 5),
    "page_first": (0, 2, 3, 1, 4, 5),  # token by token, each with all of its layers
    "page_first_direct": (0, 1, 2, 3, 4, 5),
}
_WIDTH = 130
_GIGA = 1e9


class Cell(NamedTuple):
    """One thing to measure: a call that copies the pages in these slots."""

    row: dict[str, str | int]
    copy: Callable[[list[int], list[int]], None]


class SecondTier:
    """Pages in host memory in one layout, seen as [pages, layers, planes, page_tokens, heads, head_dim]."""

    def __init__(self, group: PagedGroup, layout: Layout) -> None:
        shape = (SLOTS, len(group.layers), *page_shape(group, PAGE_TOKENS))
        order = _ORDERS[layout]
        memory = torch.ones([shape[axis] for axis in order], dtype=torch_dtype(group.dtype))
        self.pages = memory.permute([order.index(axis) for axis in range(len(order))])
        self.extents = len(group.layers) if layout == "layer_first" else 1
        self._by_page = memory.transpose(0, 1) if layout == "layer_first" else memory
        self.target = torch.ones(memory.numel(), dtype=memory.dtype)

    def to_l3(self, sources: list[int], targets: list[int]) -> None:
        """Each page in its own order, as a store that keeps it in one piece."""
        pieces = self.target.view(SLOTS, *self._by_page.shape[1:])
        for source, target in zip(sources, targets, strict=True):
            pieces[target].view(torch.int16).numpy()[...] = self._by_page[source].view(torch.int16).numpy()


def cells(name: str, *, pages: int) -> Iterator[Cell]:
    """What is measured of a model: both kinds of L1, with each layout and back end, in both directions."""
    group = MODELS[name]
    shape = (len(group.layers), SLOTS, *page_shape(group, PAGE_TOKENS))
    one_tensor = torch.ones(shape, dtype=torch_dtype(group.dtype))
    pools: dict[str, PagedPool] = {
        "one tensor": one_tensor,
        "by layer": Layers([layer.clone() for layer in one_tensor]),
    }
    for layout in _ORDERS:
        l2 = SecondTier(group, layout)
        row: dict[str, str | int] = {
            "model": name,
            "layout": layout,
            "device": "cpu",
            "page_bytes": group.object_bytes(PAGE_TOKENS),
            "pages": pages,
            "layers": len(group.layers),
            "extents": l2.extents,
        }
        for l1, pool in pools.items():
            for moves in (REFERENCE, DIRECT):
                mover = moves.of_pages(pool, l2.pages, Staging(torch.device("cpu")))
                for direction, copy in (("backup", _backup(mover, l2)), ("load", _load(mover, l2))):
                    yield Cell({**row, "l1": l1, "backend": moves.name, "direction": direction}, copy)
        yield Cell({**row, "l1": "", "backend": "extents", "direction": "to_l3"}, l2.to_l3)


def _backup(mover: Mover, l2: SecondTier) -> Callable[[list[int], list[int]], None]:
    return lambda sources, targets: mover.gather(l2.pages, sources=sources, targets=targets)


def _load(mover: Mover, l2: SecondTier) -> Callable[[list[int], list[int]], None]:
    return lambda sources, targets: mover.scatter(l2.pages, sources=sources, targets=targets)


def measure(name: str, *, pages: int, repetitions: int) -> list[Row]:
    """All cells of a model take turns, each beside the memcpy of as many bytes right before it."""
    measured = list(cells(name, pages=pages))
    size_bytes = MODELS[name].object_bytes(PAGE_TOKENS) * pages
    memcpy = MemoryCopy(threads=1)
    slots = _slots(random.Random(7), pages)
    times_s: list[list[float]] = [[] for _ in measured]
    limits: list[list[float]] = [[] for _ in measured]
    for repetition in range(repetitions + 1):
        for place, cell in enumerate(measured):
            limit = memcpy.measure(size_bytes)
            sources, targets = next(slots)
            start_s = time.perf_counter()
            cell.copy(sources, targets)
            elapsed_s = time.perf_counter() - start_s
            if repetition:  # the first one finds its code
                times_s[place].append(elapsed_s)
                limits[place].append(limit)
    return [_row(cell, times, limit, size_bytes) for cell, times, limit in zip(measured, times_s, limits, strict=True)]


def _slots(order: random.Random, pages: int) -> Iterator[tuple[list[int], list[int]]]:
    """Slots in no order, and others for each call: what the caches hold is of no use."""
    while True:
        sources, targets = order.sample(range(SLOTS), SLOTS), order.sample(range(SLOTS), SLOTS)
        for start in range(0, SLOTS - pages + 1, pages):
            yield sources[start : start + pages], targets[start : start + pages]


def _row(cell: Cell, times_s: list[float], limits: list[float], size_bytes: int) -> Row:
    rates = [size_bytes / elapsed_s / _GIGA for elapsed_s in times_s]
    return Row(
        **cell.row,  # type: ignore[arg-type]  # what cells() has put there
        gbps=round(statistics.median(rates), 2),
        limit_gbps=round(statistics.median(limits), 2),
        of_limit=round(statistics.median(rate / limit for rate, limit in zip(rates, limits, strict=True)), 2),
        per_call_us=round(statistics.median(times_s) * 1e6, 1),
    )


@click.command()
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="Fewer repetitions; ends within 45 s.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where L1 is.")
def main(json_path: str | None, quick: bool, device: str) -> None:
    """Copy pages of 64 tokens between L1 and L2, and states where L1 is on CUDA."""
    load_before = os.getloadavg()[0]
    console = Console(stderr=json_path == "-", width=_WIDTH)
    document: dict[str, object]
    if device == "cpu":
        rows = host_rows(quick=quick)
        console.print(table_of("GB/s (10^9 bytes) of one thread, beside memcpy, medians", rows))
        document = {"rows": [asdict(row) for row in rows]}
    elif torch.cuda.is_available():
        figures = cuda_figures(quick=quick)
        figures.show(console)
        document = {"gpu": torch.cuda.get_device_name(), **figures.document()}
    else:
        console.print(MISSING)
        document = {**CudaFigures().document(), "missing": MISSING}
    write_json({**document, "machine": machine_facts(load_before)}, json_path)


def host_rows(*, quick: bool) -> list[Row]:
    """All of it in host memory, in one thread."""
    torch.set_num_threads(1)
    repetitions = 7 if quick else 25
    return [
        row for name in MODELS for pages in (1, SLOTS) for row in measure(name, pages=pages, repetitions=repetitions)
    ]


if __name__ == "__main__":
    main()
