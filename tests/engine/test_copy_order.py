"""The order of copies and compute on CUDA, written down by a double of torch.cuda: there is no device here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hicache.copy_order import CpuOrder, CudaOrder, copy_order_for
from hicache.jobs import CopyItem, CopyJob, CopyKind
from hicache.outcome import Outcome
from tests.engine.conftest import Rank
from tests.engine.fakes import WAIT_S


class CudaDouble:
    """Writes down what would be enqueued where. Streams are compute, and in order of their making: backup, load."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sync_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self._names = iter(("compute", "backup", "load"))
        self._events = iter(range(1000))
        self.compute = _Stream(self, next(self._names))
        self._current = threading.local()

    def Stream(self, device: torch.device) -> _Stream:
        return _Stream(self, next(self._names))

    def Event(self, *, blocking: bool = False) -> _Event:
        return _Event(self, next(self._events))

    def current_stream(self, device: torch.device) -> _Stream:
        return getattr(self._current, "stream", self.compute)

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self._current.stream = stream
        try:
            yield
        finally:
            del self._current.stream

    def launch(self, what: str) -> None:
        self.log.append(f"{self.current_stream(torch.device('cuda')).name}: {what}")


class _Stream:
    def __init__(self, cuda: CudaDouble, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: _Event) -> None:
        self.cuda.log.append(f"{self.name}: wait {event.number}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"host: wait for {self.name}")


class _Event:
    def __init__(self, cuda: CudaDouble, number: int) -> None:
        self.cuda, self.number = cuda, number

    def record(self, stream: _Stream) -> None:
        self.cuda.log.append(f"{stream.name}: record {self.number}")

    def synchronize(self) -> None:
        assert self.cuda.gate.wait(WAIT_S)
        self.cuda.log.append(f"host: wait {self.number}")
        if self.cuda.sync_error is not None:
            raise self.cuda.sync_error


@pytest.fixture
def cuda() -> CudaDouble:
    return CudaDouble()


@pytest.fixture
def order(cuda: CudaDouble) -> CudaOrder:
    return CudaOrder(torch.device("cuda", 0), cuda)


def test_br_002_a_backup_reads_after_what_compute_was_asked_before_it_was_submitted(
    cuda: CudaDouble, order: CudaOrder
) -> None:
    cuda.launch("write page")
    mark = order.mark()
    cuda.launch("later work")
    order.run_after(mark, lambda: cuda.launch("read page"))
    assert cuda.log == [
        "compute: write page",
        "compute: record 0",
        "compute: later work",
        "backup: wait 0",
        "backup: read page",
        "backup: record 1",
        "host: wait 1",
    ]


def test_a_load_writes_after_the_last_reader_and_before_the_next(cuda: CudaDouble, order: CudaOrder) -> None:
    cuda.launch("read old page")
    wait = order.run_before_compute(lambda: cuda.launch("write page"))
    cuda.launch("read page")
    assert wait is not None
    wait()
    assert cuda.log == [
        "compute: read old page",
        "compute: record 0",
        "load: wait 0",
        "load: write page",
        "load: record 1",
        "compute: wait 1",
        "compute: read page",
        "host: wait 1",
    ]


def test_copies_of_another_thread_keep_their_place_in_the_stream_that_computes(
    cuda: CudaDouble, order: CudaOrder
) -> None:
    model = _Stream(cuda, "model")
    with cuda.stream(model):
        order.compute_here()
        cuda.launch("write state")

    def between_steps() -> None:
        order.run_in_compute(lambda: cuda.launch("copy state"), after_loads=True)
        order.run_after(order.mark(), lambda: cuda.launch("read copy"))
        order.run_before_compute(lambda: cuda.launch("write page"))

    thread = threading.Thread(target=between_steps)
    thread.start()
    thread.join(WAIT_S)
    assert cuda.log == [
        "model: write state",
        "model: copy state",
        "model: record 0",
        "backup: wait 0",
        "backup: read copy",
        "backup: record 1",
        "host: wait 1",
        "model: record 2",
        "load: wait 2",
        "load: write page",
        "load: record 3",
        "model: wait 3",
    ]


def test_a_copy_that_raises_leaves_nothing_in_flight(cuda: CudaDouble, order: CudaOrder) -> None:
    def copy() -> None:
        cuda.launch("first page")
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError):
        order.run_before_compute(copy)
    assert cuda.log[-1] == "host: wait for load"


def load_job(job_id: int) -> CopyJob:
    return CopyJob(job_id, CopyKind.LOAD, (CopyItem(0, 1, 2),))


def test_a_load_completes_only_when_its_bytes_have_arrived(rank: Rank, cuda: CudaDouble, order: CudaOrder) -> None:
    """Submit returns before: the L2 slot must not be reused while the device still reads it."""
    cuda.gate.clear()
    executor = rank.executor(order=order)
    executor.submit(load_job(1))
    assert cuda.log[-1] == "compute: wait 1"
    assert not rank.completions.has(1)
    cuda.gate.set()
    assert rank.completions.outcomes(1) == (Outcome.OK,)
    assert rank.completions.threads == ["hicache-load-0"]


@pytest.mark.parametrize("kind", [CopyKind.LOAD, CopyKind.BACKUP])
def test_br_001_a_copy_whose_event_fails_is_an_outcome(
    rank: Rank, cuda: CudaDouble, order: CudaOrder, kind: CopyKind
) -> None:
    cuda.sync_error = RuntimeError("CUDA error: an illegal memory access was encountered")
    executor = rank.executor(order=order)
    executor.submit(CopyJob(1, kind, (CopyItem(0, 1, 2),)))
    assert rank.completions.outcomes(1) == (Outcome.IO_ERROR,)
    assert executor.faults() == {f"copy.{kind}": 1}


def test_a_mark_that_cannot_be_made_is_an_outcome(rank: Rank, order: CudaOrder, cuda: CudaDouble) -> None:
    executor = rank.executor(order=order)
    cuda.Event = None  # type: ignore[assignment, method-assign]  # as if the context were lost
    for job_id, kind in enumerate((CopyKind.BACKUP, CopyKind.LOAD)):
        executor.submit(CopyJob(job_id, kind, (CopyItem(0, 1, 2),)))
        assert rank.completions.outcomes(job_id) == (Outcome.IO_ERROR,)


def test_closing_waits_for_loads_in_flight(rank: Rank, order: CudaOrder, cuda: CudaDouble) -> None:
    cuda.gate.clear()
    executor = rank.executor(order=order)
    executor.submit(load_job(1))
    closer = threading.Thread(target=executor.close, kwargs={"timeout_s": WAIT_S})
    closer.start()
    assert not rank.completions.has(1)
    cuda.gate.set()
    closer.join(WAIT_S)
    assert rank.completions.outcomes(1) == (Outcome.OK,)


def test_copies_on_a_cpu_need_no_order() -> None:
    order = copy_order_for(torch.device("cpu"))
    assert isinstance(order, CpuOrder)
    ran: list[str] = []
    order.run_after(order.mark(), lambda: ran.append("backup"))
    assert order.run_before_compute(lambda: ran.append("load")) is None
    assert ran == ["backup", "load"]
