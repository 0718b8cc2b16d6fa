"""When copies run, beside what the model computes: at once on a CPU, ordered by events of streams on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Mark = Any  # what mark() gave; only the CopyOrder that made it looks inside
Wait = Callable[[], None]


class CopyOrder(Protocol):
    """Orders copies against compute in both directions. ``copy`` enqueues, or does, the copies and may raise."""

    name: str

    def compute_here(self) -> None:
        """From now on compute is what the calling thread asks of its current stream, whoever asks for copies."""
        ...

    def mark(self) -> Mark:
        """The moment after everything that the calling thread has asked compute to do so far."""
        ...

    def run_in_compute(self, copy: Callable[[], None]) -> None:
        """Run ``copy`` as a part of compute: after what it was asked to do, and before whatever it is asked next."""
        ...

    def run_after(self, mark: Mark, copy: Callable[[], None]) -> None:
        """Run ``copy`` after ``mark``, from any thread; returns when the bytes are where they belong."""
        ...

    def run_before_compute(self, copy: Callable[[], None]) -> Wait | None:
        """Run ``copy`` after what compute was asked to do, and before whatever it is asked next by this thread.

        Returns what blocks until the bytes have arrived, which raises when they have not; None when they have already.
        """
        ...


class CpuOrder:
    """Compute on a CPU is done when it returns, and so are copies."""

    name = "cpu"

    def compute_here(self) -> None:
        """See CopyOrder."""

    def mark(self) -> Mark:
        """See CopyOrder."""
        return None

    def run_in_compute(self, copy: Callable[[], None]) -> None:
        """See CopyOrder."""
        copy()

    def run_after(self, mark: Mark, copy: Callable[[], None]) -> None:
        """See CopyOrder."""
        copy()

    def run_before_compute(self, copy: Callable[[], None]) -> Wait | None:
        """See CopyOrder."""
        copy()
        return None


class CudaOrder:
    """Copies on streams of their own, one for each direction, so that loads do not queue behind backups.

    compute   ... writes page | mark ->       ... last reader of the target | -> waits for the load | reads page
    backup                       -> reads page
    load                                                                    -> writes page |
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:  # Any: a module, or its double in tests
        self.name = str(device)
        self._device = device
        self._cuda = cuda
        self._backup_stream = cuda.Stream(device)
        self._load_stream = cuda.Stream(device)
        self._compute_stream: Any = None  # None: that of whichever thread asks

    def compute_here(self) -> None:
        """See CopyOrder."""
        self._compute_stream = self._cuda.current_stream(self._device)

    def mark(self) -> Mark:
        """See CopyOrder."""
        event = self._cuda.Event()
        event.record(self._compute())
        return event

    def run_in_compute(self, copy: Callable[[], None]) -> None:
        """See CopyOrder."""
        with self._cuda.stream(self._compute()):
            copy()

    def run_after(self, mark: Mark, copy: Callable[[], None]) -> None:
        """See CopyOrder."""
        self._enqueue(self._backup_stream, mark, copy).synchronize()

    def run_before_compute(self, copy: Callable[[], None]) -> Wait | None:
        """See CopyOrder."""
        arrived = self._enqueue(self._load_stream, self.mark(), copy)
        self._compute().wait_event(arrived)
        return self._waiting_for(arrived)

    def _compute(self) -> Any:  # a stream of torch.cuda
        return self._compute_stream or self._cuda.current_stream(self._device)

    def _enqueue(self, stream: Any, mark: Mark, copy: Callable[[], None]) -> Any:  # streams and events of torch.cuda
        """Returns the event after ``copy``. When it raises, what it had enqueued has ended: nothing is in flight."""
        stream.wait_event(mark)
        event = self._cuda.Event()
        try:
            with self._cuda.stream(stream):
                copy()
        except Exception:
            stream.synchronize()
            raise
        event.record(stream)
        return event

    def _waiting_for(self, event: Any) -> Wait:  # torch.cuda.Event
        def wait() -> None:
            event.synchronize()

        return wait


def copy_order_for(device: torch.device) -> CopyOrder:
    """The order that copies to and from ``device`` need."""
    return CudaOrder(device) if device.type == "cuda" else CpuOrder()
