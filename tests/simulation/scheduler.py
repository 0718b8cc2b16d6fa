"""Who runs next, and what time it is: fibers in one thread, chosen by a seed, on a clock of its own."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import select
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import greenlet

STEP_S = 1e-6  # what a step takes: whoever asks for the time again and again sees it pass
POLL_SHARE = 0.25  # how often descriptors are looked at while somebody can run anyway
STEPS_MAX = 3_000_000  # of one life: more is a livelock
BUSY_STEPS = 40_000  # within BUSY_S: somebody looks again and again, in place of waiting
BUSY_S = 1.0


class SimulationError(AssertionError):
    """What must not happen in any interleaving has happened."""


class Process:
    """What dies together. A killed one never runs again: no ``finally`` of it is executed, as after SIGKILL."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.held: list[Fiber] = []  # that would run, were it not stopped
        self.at_death: list[Callable[[], object]] = []  # what the kernel does for it


class Fiber:
    """A thread of a simulated process."""

    def __init__(self, number: int, name: str, process: Process, body: greenlet.greenlet) -> None:
        self.number = number
        self.name = name
        self.process = process
        self.body = body
        self.loop: asyncio.AbstractEventLoop | None = None  # that runs in it
        self.thread: Any = None  # Any: its Thread of primitives.py, if it is one
        self.parked = 0  # 0: it can run; else which of its waits it is in
        self.waits = 0
        self.was_woken = False
        self.descriptors: dict[int, int] = {}  # that it waits for
        self.is_done = False


class Scheduler:
    """Runs fibers until the director, the first of them, is done.

    Everything that can come in another order is drawn from ``rng``; whoever waits for time has it pass at once when
    nobody can run. ``trace`` is a digest of who ran when: equal for equal seeds.
    """

    def __init__(self, seed: int, *, preempt_share: float = 0.2, statements_per_switch: float = 0.0) -> None:
        """``preempt_share`` of what is done with locks, queues and sockets lets others run first; with
        ``statements_per_switch`` so does, on average, one statement of so many."""
        self.rng = random.Random(seed)
        self._statements_per_switch = statements_per_switch
        self._statements_left = self._draw_statements()
        self.now_s = 1_000.0
        self.wall_offset_s = 1.7e9
        self.steps = 0
        self._looked_at_s = 0.0
        self.preempt_share = preempt_share
        self.current: Fiber | None = None
        self.is_over = False
        self.fibers: list[Fiber] = []
        self._ready: list[Fiber] = []
        self._timers: list[tuple[float, int, Fiber, int]] = []
        self._timer_numbers = itertools.count()
        self._numbers = itertools.count(1)
        self._polled: dict[int, Fiber] = {}  # by number, who waits for descriptors
        self._hub = greenlet.getcurrent()
        self._digest = blake2b(digest_size=16)

    @property
    def has_points(self) -> bool:
        """Whether statements are switched between, too."""
        return self._statements_per_switch > 0

    @property
    def trace(self) -> str:
        """What has happened so far, in a few digits."""
        return self._digest.hexdigest()

    def spawn(self, run: Callable[[], object], *, name: str, process: Process) -> Fiber:
        """A new fiber, which can run from now on."""

        def body() -> None:
            try:
                run()
            finally:
                fiber.is_done = True

        fiber = Fiber(next(self._numbers), name, process, greenlet.greenlet(body, parent=self._hub))
        self.fibers.append(fiber)
        self._ready.append(fiber)
        return fiber

    def run(self, director: Fiber) -> None:
        """Until ``director`` is done. Raises what a fiber of a living process raises, and SimulationError."""
        while not director.is_done:
            self._look_at_descriptors()
            if not self._ready:
                self._let_time_pass()
                continue
            fiber = self._ready.pop(self.rng.randrange(len(self._ready)))
            if fiber.process.is_stopped:
                fiber.process.held.append(fiber)
            elif fiber.process.is_alive and not fiber.is_done:
                self._switch_to(fiber)

    def _switch_to(self, fiber: Fiber) -> None:
        self.steps += 1
        self.now_s += STEP_S
        if self.steps > STEPS_MAX:
            raise SimulationError(f"{STEPS_MAX} steps without an end, the last one of {fiber.name}")
        if self.steps % BUSY_STEPS == 0:
            passed_s, self._looked_at_s = self.now_s - self._looked_at_s, self.now_s
            if passed_s < BUSY_S:
                raise SimulationError(
                    f"{BUSY_STEPS} steps in {passed_s:.3f} s, the last one of {fiber.name}: who waits?"
                )
        self._digest.update(b"%d %d;" % (fiber.number, int(self.now_s * 1e6)))
        self.current = fiber
        asyncio._set_running_loop(fiber.loop)
        try:
            fiber.body.switch()
        finally:
            fiber.loop = asyncio._get_running_loop()
            asyncio._set_running_loop(None)
            self.current = None

    def _let_time_pass(self) -> None:
        while self._timers:
            at_s, _, fiber, wait = heapq.heappop(self._timers)
            if fiber.parked == wait and fiber.process.is_alive:
                self.now_s = max(self.now_s, at_s)
                self._unpark(fiber, was_woken=False)
                return
        waiting = [fiber.name for fiber in self.fibers if not fiber.is_done and fiber.process.is_alive]
        raise SimulationError(f"nobody can go on: {', '.join(waiting)}")

    # -- called by fibers --------------------------------------------------------------------------------------------

    def maybe_switch(self) -> None:
        """Let somebody else run here, or not."""
        if self.current is not None and not self.is_over and self.rng.random() < self.preempt_share:
            self.give_way()

    def point(self, value: Any = None) -> Any:
        """Between two statements: perhaps somebody else runs here."""
        self._statements_left -= 1
        if self._statements_left <= 0:
            self._statements_left = self._draw_statements()
            fiber = self.current
            if fiber is not None and not self.is_over and greenlet.getcurrent() is fiber.body:
                self.give_way()
        return value

    def _draw_statements(self) -> int:
        mean = self._statements_per_switch
        return 1 + int(self.rng.expovariate(1 / mean)) if mean else 1 << 62

    def give_way(self) -> None:
        """Let somebody else run, perhaps."""
        fiber = self._self()
        self._ready.append(fiber)
        self._hub.switch()

    def park(self, *, until_s: float | None = None, descriptors: dict[int, int] | None = None) -> bool:
        """Wait until ``wake``, ``until_s``, or until one of the descriptors is ready. Whether it was not the time."""
        if self.is_over:
            raise greenlet.GreenletExit
        fiber = self._self()
        fiber.waits += 1
        fiber.parked = fiber.waits
        if descriptors:
            fiber.descriptors = descriptors
            self._polled[fiber.number] = fiber
        if until_s is not None:
            heapq.heappush(self._timers, (until_s, next(self._timer_numbers), fiber, fiber.parked))
        self._hub.switch()
        if self.is_over:
            raise greenlet.GreenletExit
        return fiber.was_woken

    def wake(self, fiber: Fiber) -> None:
        """End the wait of another fiber; nothing happens when it is in none."""
        if fiber.parked:
            self._unpark(fiber, was_woken=True)

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.park(until_s=self.now_s + max(0.0, seconds))

    # -- called by anybody -------------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """As SIGKILL. A fiber that kills its own process goes on until it waits."""
        process.is_alive = False
        for act in process.at_death:
            act()
        for number in [number for number, fiber in self._polled.items() if fiber.process is process]:
            del self._polled[number]

    def stop(self, process: Process, *, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT some time later. One that is stopped already stays so for as long as it was to."""
        if process.is_stopped:
            return
        process.is_stopped = True

        def go_on() -> None:
            self.sleep(seconds)
            process.is_stopped = False
            self._ready += process.held
            process.held = []

        self.spawn(go_on, name=f"{process.name}:stopped", process=Process("kernel"))

    def bury(self) -> None:
        """End what is left of everybody, so that nothing of this life is there in the next one."""
        self.is_over = True
        for fiber in self.fibers:
            if not fiber.is_done and fiber.body:
                with contextlib.suppress(BaseException):  # whatever a dead process would have said
                    fiber.body.throw(greenlet.GreenletExit)

    def _self(self) -> Fiber:
        assert self.current is not None, "called from outside of the simulation"
        return self.current

    def _unpark(self, fiber: Fiber, *, was_woken: bool) -> None:
        fiber.parked = 0
        fiber.was_woken = was_woken
        if self._polled.pop(fiber.number, None) is not None:
            fiber.descriptors = {}
        self._ready.append(fiber)

    def _look_at_descriptors(self) -> None:
        if not self._polled or (self._ready and self.rng.random() > POLL_SHARE):
            return
        poll = select.poll()
        masks: dict[int, int] = {}
        for fiber in self._polled.values():
            for descriptor, mask in fiber.descriptors.items():
                masks[descriptor] = masks.get(descriptor, 0) | mask
        for descriptor, mask in masks.items():
            poll.register(descriptor, mask)
        ready = dict(poll.poll(0))
        if ready:
            always = select.POLLERR | select.POLLHUP | select.POLLNVAL
            for fiber in list(self._polled.values()):
                if any(ready.get(fd, 0) & (mask | always) for fd, mask in fiber.descriptors.items()):
                    self._unpark(fiber, was_woken=True)
