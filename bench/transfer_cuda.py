"""Copies between the memory of a GPU and pinned L2 by each back end, beside one large asynchronous copy in the run.

`python -m bench.transfer --device cuda` shows them, with what bench/transfer_overlap.py has measured beside compute.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console

from bench.geometries import GQA_8B, GQA_70B, K3_MLA, K3_STATE
from bench.transfer_overlap import OverlapRow, overlap_rows, overlap_table
from bench.transfer_row import Direction, Row, table_of
from hicache.copies import Copies, PoolCopies
from hicache.errors import HiCacheError
from hicache.moves import COPIES_SETTINGS
from hicache.pools import L1Pool, L2Pool
from hicache.spec import CacheSpec, Group, PagedGroup

PAGES = (1, 16, 256, 2048)
STATES = (1, 4, 16)
MODELS: tuple[Group, ...] = (GQA_8B, GQA_70B, K3_MLA, K3_STATE)
BACKENDS = tuple(setting for setting in COPIES_SETTINGS if setting != "auto")
LIMIT_BYTES = 1 << 30  # large enough that the start of the copy does not show
REPETITIONS, QUICK_REPETITIONS = 7, 3
BUDGET_S, QUICK_BUDGET_S = 110.0, 30.0  # after which no further cell is begun
# Refused by the driver, too large for the device, no Triton, or an L1 that the back end cannot serve.
FAILURES = (HiCacheError, RuntimeError, ValueError, ImportError)
MISSING = (
    "no CUDA device here: missing are the GB/s of loads and backups of "
    f"{', '.join(group.name for group in MODELS)} by {', '.join(BACKENDS)} beside one large copy, the share of a "
    "layer-wise load that a forward hides, and by how much copies slow a matmul"
)


@dataclass
class CudaFigures:
    """Everything that was measured, and the names of what was not."""

    rows: list[Row] = field(default_factory=list)
    overlap: list[OverlapRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """For people."""
        console.print(table_of(f"GB/s on {torch.cuda.get_device_name()}, beside one copy of 1 GiB, medians", self.rows))
        console.print(overlap_table(self.overlap))
        for name in self.left_out:
            console.print(f"left out: {name}")

    def document(self) -> dict[str, object]:
        """For JSON."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "overlap": [asdict(row) for row in self.overlap],
            "left_out": self.left_out,
        }


def cuda_figures(*, quick: bool) -> CudaFigures:
    """Within about two minutes: the overlap first, then as many cells as the time allows."""
    end_s = time.perf_counter() + (QUICK_BUDGET_S if quick else BUDGET_S)
    repetitions = QUICK_REPETITIONS if quick else REPETITIONS
    figures = CudaFigures()
    for backend in BACKENDS:
        try:
            figures.overlap += overlap_rows("cuda", pages=64, backends=[backend], repetitions=repetitions)
        except FAILURES as error:
            figures.left_out.append(f"beside compute, {backend}: {error}")
    for group in MODELS:
        counts = PAGES if isinstance(group, PagedGroup) else STATES
        for count in counts[:3] if quick else counts:
            if time.perf_counter() > end_s:
                figures.left_out.append(f"{group.name}, {count}: the time was over")
                continue
            try:
                measured = measure(group, count, device="cuda", repetitions=repetitions)
            except FAILURES as error:  # too large for this machine
                figures.left_out.append(f"{group.name}, {count}: {error}")
            else:
                figures.rows += measured.rows
                figures.left_out += measured.left_out
            torch.cuda.empty_cache()
    return figures


def measure(group: Group, count: int, *, device: str, repetitions: int, limit_bytes: int = LIMIT_BYTES) -> CudaFigures:
    """Pages or states of a tensor for each layer, in slots in no order; back ends take turns with the limit.

    One that fails is left out, and the others are measured.
    """
    figures = CudaFigures()
    spec = CacheSpec(group.name, "1", (group,))
    l1, l2 = adopted_pool(spec, count, device=device), L2Pool(spec, (count,), device=device)
    try:
        slots = random.Random(7).sample(range(count), count)
        calls: Calls = {}
        for backend in BACKENDS:
            try:
                calls |= _tried(_calls(PoolCopies(l1, l2, setting=backend), backend, slots), device=device)
            except FAILURES as error:
                figures.left_out.append(f"{group.name}, {count}, {backend}: {error}")
        size_bytes = count * group.object_bytes(spec.page_tokens)
        times = _turns({**_limits(device, limit_bytes), **calls}, device=device, repetitions=repetitions)
        figures.rows += [
            _row(group, count, device, direction, backend, size_bytes, limit_bytes, times)
            for direction, backend in calls
        ]
        del calls
    finally:
        l2.close()
    return figures


def adopted_pool(spec: CacheSpec, count: int, *, device: str) -> L1Pool:
    """L1 as engines have it: a tensor for each layer of the only group, with ones in it."""
    like = L1Pool(spec, pages=1, state_slots=1, device="cpu")
    group = spec.groups[0]
    shapes: dict[str, torch.Tensor] = {"": like.paged[0]} if isinstance(group, PagedGroup) else like.state[0]

    def layers(of: torch.Tensor) -> list[torch.Tensor]:
        shape = (count, *of.shape[2:])
        return [torch.zeros(shape, dtype=of.dtype, device=device) for _ in range(len(of))]

    tensors = {name: layers(of) for name, of in shapes.items()}
    return L1Pool.adopt(spec, {0: tensors[""] if isinstance(group, PagedGroup) else tensors})


Call = Callable[[], object]
Calls = dict[tuple[Direction, str], Call]


def _calls(copies: Copies, backend: str, slots: Sequence[int]) -> Calls:
    return {
        ("backup", backend): lambda: copies.backup(0, slots, slots[::-1]),
        ("load", backend): lambda: copies.load(0, slots, slots[::-1]),
    }


def _tried(calls: Calls, *, device: str) -> Calls:
    """The same calls, after each has been made once, which compiles what they need."""
    for call in calls.values():
        call()
        settle(device)
    return calls


def _limits(device: str, size_bytes: int) -> Calls:
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    there = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    return {
        ("backup", "limit"): lambda: host.copy_(there, non_blocking=True),
        ("load", "limit"): lambda: there.copy_(host, non_blocking=True),
    }


def _turns(calls: Calls, *, device: str, repetitions: int) -> dict[tuple[Direction, str], list[float]]:
    """Seconds of each call until its bytes are there, by repetition. The first turn does not count."""
    seconds: dict[tuple[Direction, str], list[float]] = {name: [] for name in calls}
    for repetition in range(1 + repetitions):
        for name, call in calls.items():
            settle(device)
            start_s = time.perf_counter()
            call()
            settle(device)
            if repetition:
                seconds[name].append(time.perf_counter() - start_s)
    return seconds


def settle(device: str) -> None:
    """Everything that was enqueued has been done."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def _row(
    group: Group,
    count: int,
    device: str,
    direction: Direction,
    backend: str,
    size_bytes: int,
    limit_bytes: int,
    times: dict[tuple[Direction, str], list[float]],
) -> Row:
    limits = [limit_bytes / each / 1e9 for each in times[direction, "limit"]]
    rates = [size_bytes / each / 1e9 for each in times[direction, backend]]
    return Row(
        model=group.name,
        direction=direction,
        layout="page_first_direct",
        l1="by layer",
        backend=backend,
        device=device,
        page_bytes=size_bytes // count,
        pages=count,
        layers=len(group.layers),
        extents=1,
        gbps=round(statistics.median(rates), 2),
        limit_gbps=round(statistics.median(limits), 2),
        of_limit=round(statistics.median(rate / limit for rate, limit in zip(rates, limits, strict=True)), 3),
        per_call_us=round(statistics.median(times[direction, backend]) * 1e6, 1),
    )
