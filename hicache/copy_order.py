"""When copies run, beside what the model computes: at once on a CPU, ordered by events of streams on CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

Mark = Any  # what mark() gave; only the CopyOrder that made it looks inside
Wait = Callable[[], None]


class LayerCopy(NamedTuple):
    """What brings some layers, by their ids."""

    layers: tuple[int, ...]
    copy: Callable[[], None]


class CopyOrder(Protocol):
    """Orders copies against compute in both directions. ``copy`` enqueues, or does, the copies and may raise."""

    name: str

    def compute_here(self) -> None:
        """From now on compute is what the calling thread asks of its current stream, whoever asks for copies."""
        ...

    def mark(self) -> Mark:
        """The moment after everything that the calling thread has asked compute to do so far."""
        ...

    def run_in_compute(self, copy: Callable[[], None], *, after_loads: bool) -> None:
        """Run ``copy`` as a part of compute: after what it was asked to do, and before whatever it is asked next.

        ``after_loads``: and after what has been loaded by layer, which is needed for what that has written.
        """
        ...

    def run_after(self, mark: Mark, copy: Callable[[], None], *, loads: bool = False) -> None:
        """Run ``copy`` after ``mark``, from any thread; returns when the bytes are where they belong.

        ``loads``: it goes up, and does not queue behind what goes down.
        """
        ...

    def run_before_compute(self, copy: Callable[[], None]) -> Wait | None:
        """Run ``copy`` after what compute was asked to do, and before whatever it is asked next by this thread.

        Returns what blocks until the bytes have arrived, which raises when they have not; None when they have already.
        """
        ...

    def run_by_layer(self, copies: Sequence[LayerCopy]) -> Wait | None:
        """Run ``copies`` in their order, as ``run_before_compute``, but that compute goes on: see ``wait_layer``.

        Until they have arrived they are waited for by what is marked from now on, and by nothing else.
        """
        ...

    def wait_layer(self, layer: int) -> None:
        """What the calling thread asks of its current stream from now on comes after all that has been loaded of
        ``layer``.
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

    def run_in_compute(self, copy: Callable[[], None], *, after_loads: bool) -> None:
        """See CopyOrder."""
        copy()

    def run_after(self, mark: Mark, copy: Callable[[], None], *, loads: bool = False) -> None:
        """See CopyOrder."""
        copy()

    def run_before_compute(self, copy: Callable[[], None]) -> Wait | None:
        """See CopyOrder."""
        copy()
        return None

    def run_by_layer(self, copies: Sequence[LayerCopy]) -> Wait | None:
        """See CopyOrder."""
        for each in copies:
            each.copy()
        return None

    def wait_layer(self, layer: int) -> None:
        """See CopyOrder."""


class CudaOrder:
    """Copies on streams of their own, one for each direction, so that loads do not queue behind backups.

    compute   ... writes page | mark ->       ... last reader of the target | -> waits for the load | reads page
    backup                       -> reads page
    load                                                                    -> writes page |

    By layer, compute waits for each layer of a load; backups and copies of states wait for all of it:

    compute                | mark ->    wait_layer(0) | layer 0   wait_layer(1) | layer 1   | mark ->
    load                     -> writes layer 0 |  writes layer 1 |  writes layer 2 |
    backup                                                                         -> -> reads page
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:  # Any: a module, or its double in tests
        self.name = str(device)
        self._device = device
        self._cuda = cuda
        self._backup_stream = cuda.Stream(device)
        self._load_stream = cuda.Stream(device)
        self._compute_stream: Any = None  # None: that of whichever thread asks
        self._lock = threading.Lock()
        self._of_layer: dict[int, Any] = {}  # the event after the last load of each layer
        self._last_load: Any = None  # the event after the last load by layer

    def compute_here(self) -> None:
        """See CopyOrder."""
        self._compute_stream = self._cuda.current_stream(self._device)

    def mark(self) -> Mark:
        """See CopyOrder."""
        with self._lock:
            return [self._computed(), *filter(None, [self._last_load])]

    def run_in_compute(self, copy: Callable[[], None], *, after_loads: bool) -> None:
        """See CopyOrder."""
        compute = self._compute()
        with self._lock:
            loaded = self._last_load
        if after_loads and loaded is not None:
            compute.wait_event(loaded)
        with self._cuda.stream(compute):
            copy()

    def run_after(self, mark: Mark, copy: Callable[[], None], *, loads: bool = False) -> None:
        """See CopyOrder."""
        stream = self._load_stream if loads else self._backup_stream
        self._enqueue(stream, mark, [LayerCopy((), copy)])[-1].synchronize()

    def run_before_compute(self, copy: Callable[[], None]) -> Wait | None:
        """See CopyOrder."""
        arrived = self._enqueue(self._load_stream, [self._computed()], [LayerCopy((), copy)])[-1]
        self._compute().wait_event(arrived)
        return self._waiting_for(arrived)

    def run_by_layer(self, copies: Sequence[LayerCopy]) -> Wait | None:
        """See CopyOrder."""
        if not copies:
            return None
        events = self._enqueue(self._load_stream, [self._computed()], copies)
        with self._lock:
            for each, event in zip(copies, events, strict=True):
                self._of_layer.update(dict.fromkeys(each.layers, event))
            self._last_load = events[-1]
        return self._waiting_for(events[-1])

    def wait_layer(self, layer: int) -> None:
        """See CopyOrder."""
        with self._lock:
            event = self._of_layer.get(layer)
        if event is not None:
            self._cuda.current_stream(self._device).wait_event(event)

    def _compute(self) -> Any:  # a stream of torch.cuda
        return self._compute_stream or self._cuda.current_stream(self._device)

    def _computed(self) -> Any:  # an event of torch.cuda
        """The event after everything that compute has been asked to do so far."""
        event = self._cuda.Event()
        event.record(self._compute())
        return event

    def _enqueue(self, stream: Any, after: Sequence[Any], copies: Sequence[LayerCopy]) -> list[Any]:
        """Returns the event after each copy. When one raises, what was enqueued has ended: nothing is in flight."""
        for event in after:
            stream.wait_event(event)
        events = []
        try:
            with self._cuda.stream(stream):
                for each in copies:
                    each.copy()
                    events.append(self._cuda.Event(blocking=True))  # whoever waits for it sleeps
                    events[-1].record(stream)
        except BaseException:  # also one that interrupts the engine's thread
            stream.synchronize()
            raise
        return events

    def _waiting_for(self, event: Any) -> Wait:  # torch.cuda.Event
        def wait() -> None:
            event.synchronize()

        return wait


def copy_order_for(device: torch.device) -> CopyOrder:
    """The order that copies to and from ``device`` need."""
    return CudaOrder(device) if device.type == "cuda" else CpuOrder()
