"""What copies and compute cost each other on a GPU: a layer-wise load beside the forward that waits for its layers, and
matmuls beside copies.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table

from bench.geometries import GQA_8B
from hicache.copy_order import CudaOrder
from hicache.executor import Executor
from hicache.jobs import Completion, CopyItem, CopyJob, CopyKind
from hicache.kernels.tile_copies import BUS_PROGRAMS_MAX
from hicache.pools import L1Pool, L2Pool
from hicache.spec import CacheSpec, PagedGroup

MATMUL_SIZE = 4096
_COPIED_SHARE = 0.7  # of the time of a copy, in which matmuls run beside it: it must not end before them
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """Medians. ``hidden``: the share of the load's time that the forward took none the longer for.

    ``slowdown_*``: how much longer the same matmuls take beside copies. ``sm_share``: of the multiprocessors, those
    that programs of a kernel can be on while they wait for the bus; none where no kernel crosses it.
    """

    model: str
    backend: str
    pages: int
    load_ms: float
    forward_ms: float
    both_ms: float
    hidden: float
    slowdown_load: float
    slowdown_backup: float
    sm_share: float


def overlap_rows(
    device: str,
    *,
    pages: int,
    backends: Sequence[str],
    repetitions: int,
    group: PagedGroup = GQA_8B,
    matmul_size: int = MATMUL_SIZE,
    cuda: Any = torch.cuda,  # a module, or its double in tests
) -> list[OverlapRow]:
    """A row for each back end."""
    compute = Matmuls(device, matmul_size, cuda)
    rows = []
    for backend in backends:
        with Transfers(group, pages, backend, device=device, cuda=cuda) as transfers:
            rows.append(_row(transfers, compute, repetitions, multiprocessors(device, cuda)))
    return rows


def multiprocessors(device: str, cuda: Any) -> int:
    """Of the device."""
    return int(cuda.get_device_properties(device).multi_processor_count)


class Matmuls:
    """Work that is bound by the multiprocessors."""

    def __init__(self, device: str, size: int, cuda: Any) -> None:
        self._left, self._right, self._out = (
            torch.ones((size, size), dtype=torch.bfloat16, device=device) for _ in range(3)
        )
        self._settle: Callable[[], None] = lambda: cuda.current_stream(torch.device(device)).synchronize()
        self.run(8)  # finds its kernel and its clock
        self.each_s = min(self.timed(16) for _ in range(3)) / 16

    def run(self, count: int) -> None:
        """Enqueue so many on the current stream."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)

    def timed(self, count: int) -> float:
        """Seconds of so many on the current stream, whatever runs on others."""
        self._settle()
        start_s = time.perf_counter()
        self.run(count)
        self._settle()
        return time.perf_counter() - start_s

    def count_for(self, seconds: float) -> int:
        """How many take as long, at least one."""
        return max(1, round(seconds / self.each_s))


class Transfers:
    """An executor over pools of one paged group, whose jobs are waited for."""

    def __init__(self, group: PagedGroup, pages: int, backend: str, *, device: str, cuda: Any) -> None:
        spec = CacheSpec(group.name, "1", (group,))
        self.group, self.pages, self.backend = group, pages, backend
        self._cuda = cuda
        self._l1 = L1Pool(spec, pages=pages, device=device)
        self._l2 = L2Pool(spec, (pages,), device=device)
        self._numbers = itertools.count(1)
        self._done: dict[int, threading.Event] = {}
        order = CudaOrder(torch.device(device), cuda)
        self.executor = Executor(
            spec, self._l1, self._l2, None, on_complete=self._complete, copies=backend, order=order
        )

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, *error: object) -> None:
        if self.executor.close():
            self._l2.close()

    def submit(self, kind: CopyKind, *, by_layer: bool = False) -> threading.Event:
        """All pages; the event is set when the job is done."""
        number = next(self._numbers)
        self._done[number] = threading.Event()
        items = tuple(CopyItem(0, page, page) for page in range(self.pages))
        self.executor.submit(CopyJob(number, kind, items, by_layer=by_layer))
        return self._done[number]

    def load(self) -> threading.Event:
        """Enqueue a load by layer; the event is set when it has arrived."""
        self.submit(CopyKind.LOAD, by_layer=True)
        return self.submit(CopyKind.ARRIVE)

    def backup(self) -> threading.Event:
        """Enqueue a backup; the event is set when it is done."""
        return self.submit(CopyKind.BACKUP)

    def settle(self, event: threading.Event) -> None:
        """Wait for a job and for compute. Raises RuntimeError when the job does not end, or any has gone wrong."""
        if not event.wait(_WAIT_S):
            raise RuntimeError(f"{self.backend}: a copy of {self.pages} pages has not ended within {_WAIT_S:g} s")
        self._cuda.synchronize()
        if faults := self.executor.faults():
            raise RuntimeError(f"{self.backend}: {faults}")

    def _complete(self, completion: Completion) -> None:
        self._done[completion.job_id].set()


def _row(transfers: Transfers, compute: Matmuls, repetitions: int, multiprocessor_count: int) -> OverlapRow:
    load_s = min(_timed_load(transfers) for _ in range(1 + repetitions))
    layers = transfers.group.layers
    per_layer = compute.count_for(load_s / len(layers))
    beside = compute.count_for(load_s * _COPIED_SHARE)
    turns = [_turn(transfers, compute, per_layer, beside) for _ in range(repetitions)]
    median = _Turn(*(statistics.median(each) for each in zip(*turns, strict=True)))
    programs = BUS_PROGRAMS_MAX if transfers.backend == "kernel" else 0
    return OverlapRow(
        model=transfers.group.name,
        backend=transfers.backend,
        pages=transfers.pages,
        load_ms=round(median.load_s * 1e3, 2),
        forward_ms=round(median.forward_s * 1e3, 2),
        both_ms=round(median.both_s * 1e3, 2),
        hidden=round(median.hidden, 3),
        slowdown_load=round(median.slowdown_load, 3),
        slowdown_backup=round(median.slowdown_backup, 3),
        sm_share=round(min(1.0, programs / multiprocessor_count), 3),
    )


class _Turn(NamedTuple):
    load_s: float
    forward_s: float
    both_s: float
    hidden: float
    slowdown_load: float
    slowdown_backup: float


def _turn(transfers: Transfers, compute: Matmuls, per_layer: int, beside: int) -> _Turn:
    layers = transfers.group.layers
    load_s = _timed_load(transfers)
    forward_s = compute.timed(per_layer * len(layers))
    both_s = _timed_both(transfers, compute, layers, per_layer)
    alone_s = compute.timed(beside)
    beside_load_s = _timed_beside(transfers, compute, beside, transfers.load)
    beside_backup_s = _timed_beside(transfers, compute, beside, transfers.backup)
    return _Turn(
        load_s,
        forward_s,
        both_s,
        (load_s + forward_s - both_s) / load_s,
        beside_load_s / alone_s - 1,
        beside_backup_s / alone_s - 1,
    )


def _timed_load(transfers: Transfers) -> float:
    start_s = time.perf_counter()
    transfers.settle(transfers.load())
    return time.perf_counter() - start_s


def _timed_both(transfers: Transfers, compute: Matmuls, layers: Sequence[int], per_layer: int) -> float:
    """A load, and the forward that waits for each of its layers."""
    start_s = time.perf_counter()
    arrived = transfers.load()
    for layer in layers:
        transfers.executor.wait_layer(layer)
        compute.run(per_layer)
    transfers.settle(arrived)
    return time.perf_counter() - start_s


def _timed_beside(transfers: Transfers, compute: Matmuls, count: int, copy: Callable[[], threading.Event]) -> float:
    """Seconds of so many matmuls while something is copied."""
    done = copy()
    elapsed_s = compute.timed(count)
    transfers.settle(done)
    return elapsed_s


def overlap_table(rows: Sequence[OverlapRow]) -> Table:
    """For people."""
    table = Table(title="a load by layer beside a forward bound by matmuls, and matmuls beside copies")
    for name in OverlapRow.__slots__:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(str(getattr(row, name)) for name in OverlapRow.__slots__))
    return table
