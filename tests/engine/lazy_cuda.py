"""A double of torch.cuda whose streams do nothing by themselves: a test does what is enqueued, in any legal order."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hicache.copies import Copies
from tests.engine.fakes import WAIT_S


@dataclass
class _Point:
    """A place in a stream that an event was recorded at."""

    is_reached: bool = False


Work = Callable[[], None]


class LazyCuda:
    """Each thread has a current stream, ``compute`` unless it says otherwise. Thread-safe."""

    def __init__(self, rng: random.Random) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._rng = rng
        self._streams: list[LazyStream] = []
        self._current = threading.local()
        self.compute = self.Stream(None)

    def Stream(self, device: object) -> LazyStream:
        stream = LazyStream(self)
        self._streams.append(stream)
        return stream

    def Event(self, *, blocking: bool = False) -> LazyEvent:
        return LazyEvent(self)

    def current_stream(self, device: object = None) -> LazyStream:
        return getattr(self._current, "stream", self.compute)

    @contextmanager
    def stream(self, stream: LazyStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def launch(self, work: Work) -> None:
        """Enqueue on the current stream of the calling thread."""
        self.current_stream().enqueue(work)

    def step(self) -> bool:
        """Do what is next in some stream; False when nothing can be done."""
        with self.changed:
            ready = [stream for stream in self._streams if stream.is_ready]
            if ready:
                self._rng.choice(ready).step()
                self.changed.notify_all()
            return bool(ready)

    def run_some(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def run_all(self) -> None:
        while self.step():
            pass

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Do everything, and what other threads enqueue after it, until something is over."""
        while not is_over():
            with self.changed:
                if not self.step():
                    self.changed.wait(0.002)


@dataclass
class LazyStream:
    cuda: LazyCuda
    queue: deque[Work | _Point] = field(default_factory=deque)  # a point is waited for

    @property
    def is_ready(self) -> bool:
        head = self.queue[0] if self.queue else None
        return head is not None and (not isinstance(head, _Point) or head.is_reached)

    def step(self) -> None:
        head = self.queue.popleft()
        if not isinstance(head, _Point):
            head()

    def enqueue(self, work: Work | _Point) -> None:
        with self.cuda.changed:
            self.queue.append(work)
            self.cuda.changed.notify_all()

    def wait_event(self, event: LazyEvent) -> None:
        self.enqueue(event.point)

    def synchronize(self) -> None:
        while self.queue:
            assert self.cuda.step(), "a stream waits for what was never enqueued"


class LazyEvent:
    def __init__(self, cuda: LazyCuda) -> None:
        self.cuda = cuda
        self.point = _Point(is_reached=True)  # as long as it has not been recorded

    def record(self, stream: LazyStream) -> None:
        self.point = point = _Point()

        def reach() -> None:
            point.is_reached = True

        stream.enqueue(reach)

    def synchronize(self) -> None:
        """Whoever steps must let it come."""
        with self.cuda.changed:
            assert self.cuda.changed.wait_for(lambda: self.point.is_reached, WAIT_S)


@dataclass
class EnqueuedCopies:
    """The copies of ``inner``, done when the stream that is current has come to them."""

    inner: Copies
    cuda: LazyCuda
    name: str = "enqueued"

    def backup(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.cuda.launch(lambda: self.inner.backup(group, sources, targets))

    def load(self, group: int, sources: Sequence[int], targets: Sequence[int], *, layers: slice | None = None) -> None:
        self.cuda.launch(lambda: self.inner.load(group, sources, targets, layers=layers))

    def snapshot(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.cuda.launch(lambda: self.inner.snapshot(group, sources, targets))

    def restore(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.cuda.launch(lambda: self.inner.restore(group, sources, targets))

    def reset(self, group: int, targets: Sequence[int]) -> None:
        self.cuda.launch(lambda: self.inner.reset(group, targets))

    def clear(self, group: int, targets: Sequence[int]) -> None:
        self.cuda.launch(lambda: self.inner.clear(group, targets))
