"""How late the event loop is: whatever is answered in it waits for that long, and this tells of whose making it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hicache.daemon.tasks import end
from hicache.exposition import counter, histogram
from hicache.histogram import Histogram

TICK_S = 0.025
PERIOD_S = 60.0
PERIODS_MAX = 60  # an hour

_SCHEDSTAT = "/proc/thread-self/schedstat"  # of a thread: ns on a core, ns that it waited for one, turns


class Delay(NamedTuple):
    """How late a tick came, and for how much of that the loop's thread could run and had no core."""

    seconds: float
    core_wait_s: float


NO_DELAY = Delay(0.0, 0.0)


class LoopDelay(Collector):
    """Ticks in the event loop from ``start`` to ``stop``. Event loop only, but for ``collect``.

    The kernel says how long the loop's thread waited for a core: that is of the machine's making. The rest is the
    daemon's own: what ran in the loop meanwhile, or other threads that kept the interpreter to themselves.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        core_wait_s: Callable[[], float] | None = None,
    ) -> None:
        """``core_wait_s`` is how long the calling thread has waited for a core by now; None: as the kernel says."""
        self.delays = Histogram()
        self.core_wait_s = 0.0  # since the start
        self._clock = clock
        self._read_core_wait_s = core_wait_s
        self._periods: deque[tuple[float, Delay]] = deque(maxlen=PERIODS_MAX)  # when it began, the longest in it
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to tick."""
        self._task = asyncio.create_task(self._run(), name="hicached-loop-delay")

    async def stop(self) -> None:
        """Ends it. Idempotent."""
        await end(self._task)

    @property
    def longest(self) -> Delay:
        """The longest of the last hour."""
        since_s = self._clock() - PERIOD_S * PERIODS_MAX
        return max((delay for begun_s, delay in self._periods if begun_s > since_s), default=NO_DELAY)

    def collect(self) -> Iterator[Metric]:
        """See docs/metrics.md."""
        yield histogram("hicache_loop_delay_seconds", "How late the event loop is.", (), {(): self.delays.copy()})
        name, text = "hicache_loop_core_wait_seconds", "How long the event loop could run and had no core."
        yield counter(name, text, (), {(): self.core_wait_s})

    async def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            read_s = self._read_core_wait_s or _kernel_core_wait_s(stack)
            before_s, waited_before_s = self._clock(), read_s()
            while True:
                await asyncio.sleep(TICK_S)
                now_s, waited_s = self._clock(), read_s()
                self._note(now_s, max(0.0, now_s - before_s - TICK_S), waited_s - waited_before_s)
                before_s, waited_before_s = now_s, waited_s

    def _note(self, now_s: float, late_s: float, core_wait_s: float) -> None:
        self.delays.observe(late_s)
        self.core_wait_s += core_wait_s
        if not self._periods or now_s - self._periods[-1][0] >= PERIOD_S:
            self._periods.append((now_s, NO_DELAY))
        begun_s, longest = self._periods[-1]
        self._periods[-1] = begun_s, max(longest, Delay(late_s, min(late_s, core_wait_s)))


def _kernel_core_wait_s(stack: contextlib.ExitStack) -> Callable[[], float]:
    """Reads the kernel's account of this thread. 0 where it keeps none, or may not be read."""
    try:
        account = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return lambda: 0.0
    stack.callback(os.close, account)

    def read_s() -> float:
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int(os.pread(account, 128, 0).split()[1]) / 1e9
        return 0.0

    return read_s
