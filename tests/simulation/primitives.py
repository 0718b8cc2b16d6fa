"""What the code under test gets in place of ``threading``, ``queue`` and ``time``: the same, for fibers."""

from __future__ import annotations

import threading as real_threading
import time as real_time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from tests.simulation.scheduler import Fiber, Scheduler


class Time:
    """In place of the module ``time``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now_s

    perf_counter = monotonic

    def monotonic_ns(self) -> int:
        return int(self._scheduler.now_s * 1e9)

    perf_counter_ns = monotonic_ns

    def time(self) -> float:
        return self._scheduler.now_s + self._scheduler.wall_offset_s

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)

    def __getattr__(self, name: str) -> Any:  # Any: whatever the module has
        return getattr(real_time, name)


class Threading:
    """In place of the module ``threading``."""

    TIMEOUT_MAX = real_threading.TIMEOUT_MAX

    def __init__(self, scheduler: Scheduler) -> None:
        sim = scheduler

        class Lock:
            """Not re-entrant; whoever likes may release it. Waiters are woken in an order of the seed."""

            def __init__(self) -> None:
                self._holder: Fiber | None = None
                self._waiting: deque[Fiber] = deque()
                self._is_locked = False

            def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
                if sim.current is None or sim.is_over:  # before the first fiber runs, and after the last one has
                    self._is_locked = True
                    return True
                sim.maybe_switch()
                until_s = None if timeout is None or timeout < 0 else sim.now_s + timeout
                while self._is_locked:
                    if not blocking or (until_s is not None and sim.now_s >= until_s):
                        return False
                    me = sim.current
                    self._waiting.append(me)
                    sim.park(until_s=until_s)
                    if me in self._waiting:
                        self._waiting.remove(me)
                self._is_locked = True
                return True

            def release(self) -> None:
                if not self._is_locked and not sim.is_over:
                    raise RuntimeError("release unlocked lock")
                self._is_locked = False
                while self._waiting:
                    index = sim.rng.randrange(len(self._waiting))
                    fiber = self._waiting[index]
                    del self._waiting[index]
                    if fiber.process.is_alive:
                        sim.wake(fiber)
                        break
                sim.maybe_switch()

            def locked(self) -> bool:
                return self._is_locked

            def __enter__(self) -> bool:
                return self.acquire()

            def __exit__(self, *_: object) -> None:
                self.release()

        class RLock:
            """Re-entrant, by fiber."""

            def __init__(self) -> None:
                self._block = Lock()
                self._owner: Fiber | None = None
                self._count = 0

            def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
                if self._owner is not None and self._owner is sim.current:
                    self._count += 1
                    return True
                if not self._block.acquire(blocking, timeout):
                    return False
                self._owner, self._count = sim.current, 1
                return True

            def release(self) -> None:
                self._count -= 1
                if self._count <= 0:
                    self._owner = None
                    self._block.release()

            def release_all(self) -> int:
                count, self._count, self._owner = self._count, 0, None
                self._block.release()
                return count

            def restore(self, count: int) -> None:
                self._block.acquire()
                self._owner, self._count = sim.current, count

            def __enter__(self) -> bool:
                return self.acquire()

            def __exit__(self, *_: object) -> None:
                self.release()

        class Condition:
            """Over a Lock or an RLock."""

            def __init__(self, lock: Any = None) -> None:  # Any: one of the two above
                self._lock = RLock() if lock is None else lock
                self._waiting: deque[Fiber] = deque()

            def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
                return bool(self._lock.acquire(blocking, timeout))

            def release(self) -> None:
                self._lock.release()

            def __enter__(self) -> bool:
                return bool(self._lock.acquire())

            def __exit__(self, *_: object) -> None:
                self._lock.release()

            def wait(self, timeout: float | None = None) -> bool:
                me = sim.current
                assert me is not None
                self._waiting.append(me)
                count = self._lock.release_all() if isinstance(self._lock, RLock) else self._lock.release()
                try:
                    # Somebody else may have run within the release, and woken us.
                    woken = me not in self._waiting
                    if not woken and (timeout is None or timeout > 0):
                        sim.park(until_s=None if timeout is None else sim.now_s + timeout)
                    woken = me not in self._waiting
                finally:
                    if me in self._waiting:
                        self._waiting.remove(me)
                    if isinstance(self._lock, RLock):
                        self._lock.restore(count)
                    else:
                        self._lock.acquire()
                return woken

            def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
                until_s = None if timeout is None else sim.now_s + timeout
                result = predicate()
                while not result:
                    left_s = None if until_s is None else until_s - sim.now_s
                    if left_s is not None and left_s <= 0:
                        break
                    self.wait(left_s)
                    result = predicate()
                return result

            def notify(self, n: int = 1) -> None:
                for _ in range(min(n, len(self._waiting))):
                    sim.wake(self._waiting.popleft())

            def notify_all(self) -> None:
                self.notify(len(self._waiting))

        class Event:
            """A flag."""

            def __init__(self) -> None:
                self._changed = Condition(Lock())
                self._is_set = False

            def is_set(self) -> bool:
                return self._is_set

            def set(self) -> None:
                with self._changed:
                    self._is_set = True
                    self._changed.notify_all()

            def clear(self) -> None:
                with self._changed:
                    self._is_set = False

            def wait(self, timeout: float | None = None) -> bool:
                with self._changed:
                    return bool(self._changed.wait_for(lambda: self._is_set, timeout))

        class Thread:
            """A fiber of the process that starts it."""

            def __init__(
                self,
                group: None = None,
                target: Callable[..., object] | None = None,
                name: str | None = None,
                args: Iterable[Any] = (),
                kwargs: Mapping[str, Any] | None = None,
                *,
                daemon: bool | None = None,
            ) -> None:
                self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
                self.name = name or "thread"
                self.daemon = daemon
                self._fiber: Fiber | None = None
                self._is_over = Event()

            def run(self) -> None:
                if self._target is not None:
                    self._target(*self._args, **self._kwargs)

            def start(self) -> None:
                if sim.is_over:
                    return
                parent = sim.current
                assert parent is not None, "a thread is started outside of the simulation"
                self._fiber = sim.spawn(self._run, name=f"{parent.process.name}:{self.name}", process=parent.process)
                self._fiber.thread = self
                sim.maybe_switch()

            def _run(self) -> None:
                try:
                    self.run()
                finally:
                    if not sim.is_over:
                        self._is_over.set()

            @property
            def ident(self) -> int | None:
                return None if self._fiber is None else self._fiber.number

            def is_alive(self) -> bool:
                return self._fiber is not None and not self._is_over.is_set()

            def join(self, timeout: float | None = None) -> None:
                self._is_over.wait(timeout)

        class Timer(Thread):
            """Calls something later."""

            def __init__(self, interval: float, function: Callable[..., object], args: Iterable[Any] = ()) -> None:
                super().__init__(target=function, args=args, name="timer")
                self._interval = interval
                self._cancelled = Event()

            def run(self) -> None:
                if not self._cancelled.wait(self._interval):
                    super().run()

            def cancel(self) -> None:
                self._cancelled.set()

        class Local:
            """Attributes of each fiber."""

            def _mine(self) -> dict[str, Any]:
                number = 0 if sim.current is None else sim.current.number
                return vars(self).setdefault(f"of {number}", {})  # type: ignore[no-any-return]

            def __getattr__(self, name: str) -> Any:
                try:
                    return self._mine()[name]
                except KeyError:
                    raise AttributeError(name) from None

            def __setattr__(self, name: str, value: object) -> None:
                self._mine()[name] = value

        self._scheduler = scheduler
        self._main = Thread(name="main")
        self.Lock, self.RLock, self.Condition, self.Event = Lock, RLock, Condition, Event
        self.Thread, self.Timer = Thread, Timer
        self.local = Local

    def current_thread(self) -> Any:  # Any: a Thread
        fiber = self._scheduler.current
        return self._main if fiber is None or fiber.thread is None else fiber.thread

    def get_ident(self) -> int:
        fiber = self._scheduler.current
        return 0 if fiber is None else fiber.number

    def __getattr__(self, name: str) -> Any:  # Any: whatever the module has
        return getattr(real_threading, name)


class Queues:
    """In place of the module ``queue``."""

    def __init__(self, scheduler: Scheduler, threading: Threading) -> None:
        class SimpleQueue:
            """First in, first out."""

            def __init__(self) -> None:
                self._changed = threading.Condition(threading.Lock())
                self._items: deque[Any] = deque()

            def put(self, item: Any) -> None:
                with self._changed:
                    self._items.append(item)
                    self._changed.notify()

            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                import queue

                with self._changed:
                    if not self._changed.wait_for(lambda: self._items, timeout if block else 0):
                        raise queue.Empty
                    return self._items.popleft()

            def get_nowait(self) -> Any:
                return self.get(block=False)

            def empty(self) -> bool:
                return not self._items

            def qsize(self) -> int:
                return len(self._items)

            @classmethod
            def __class_getitem__(cls, _: object) -> type:
                return cls

        self.SimpleQueue = SimpleQueue

    def __getattr__(self, name: str) -> Any:  # Any: whatever the module has
        import queue

        return getattr(queue, name)


__all__ = ["Queues", "Threading", "Time", "TracebackType"]
