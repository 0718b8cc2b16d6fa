"""The thread that watches links: reads what comes, sends what waits, and keeps the pulse."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

_LOG = logging.getLogger(__name__)


class Watched(Protocol):
    """A socket that the loop watches. Its methods are called in the loop's thread and do not raise."""

    def fileno(self) -> int: ...

    @property
    def has_backlog(self) -> bool: ...

    def on_readable(self, now_s: float) -> None: ...

    def on_writable(self) -> None: ...


class LinkLoop:
    """Calls ``on_tick`` at least every ``tick_s``, after everything that had come was read: so a peer is never thought
    silent because this process was. ``watch`` and ``forget`` belong to the loop's thread (or come before ``start``);
    ``wake`` and ``call`` are for every thread.
    """

    def __init__(self, name: str, *, tick_s: float, on_tick: Callable[[float], None]) -> None:
        self._tick_s = tick_s
        self._on_tick = on_tick
        self._selector = selectors.DefaultSelector()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._watched: dict[Watched, int] = {}  # with the events that the selector waits for
        self._work: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def watch(self, watched: Watched) -> None:
        """Read from it from now on."""
        self._selector.register(watched, selectors.EVENT_READ, watched)
        self._watched[watched] = selectors.EVENT_READ

    def forget(self, watched: Watched) -> None:
        """Watch it no more; call before it is closed. Idempotent."""
        if self._watched.pop(watched, None) is not None:
            self._selector.unregister(watched)

    def wake(self) -> None:
        """Look at everything again soon."""
        with self._lock:
            if not self._is_stopped:
                os.eventfd_write(self._woken, 1)

    def call(self, work: Callable[[], None]) -> None:
        """Have the loop's thread do something soon; it is left undone when the loop is stopped before."""
        self._work.append(work)
        self.wake()

    def stop(self, *, timeout_s: float) -> bool:
        """End the thread, unless it is the calling one, which ends then. Returns whether it has ended. Idempotent."""
        with self._lock:
            was_stopped, self._is_stopped = self._is_stopped, True
            if not was_stopped:
                os.eventfd_write(self._woken, 1)
        if self._thread is threading.current_thread():
            return True
        if self._thread.ident is None:
            self._release()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        tick_at_s = time.monotonic()
        while not self._is_stopped:
            try:
                self._turn(max(0.0, tick_at_s - time.monotonic()))
                while self._work:
                    self._work.popleft()()
                if time.monotonic() >= tick_at_s and not self._is_stopped:
                    self._turn(0.0)
                    now_s = time.monotonic()
                    self._on_tick(now_s)
                    tick_at_s = now_s + self._tick_s
            except Exception:  # a defect must cost neither the pulse nor the other links
                _LOG.exception("the loop of the ranks failed")
        self._release()

    def _turn(self, timeout_s: float) -> None:
        for watched, events in list(self._watched.items()):
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if watched.has_backlog else 0)
            if wanted != events:
                self._selector.modify(watched, wanted, watched)
                self._watched[watched] = wanted
        for key, ready in self._selector.select(timeout_s):
            peer: Watched | None = key.data
            if peer is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._woken)
                continue
            if ready & selectors.EVENT_WRITE and peer in self._watched:
                peer.on_writable()
            if ready & selectors.EVENT_READ and peer in self._watched:
                peer.on_readable(time.monotonic())

    def _release(self) -> None:
        with self._lock:
            self._is_stopped = True
            self._watched.clear()
            if self._selector.get_map() is not None:
                self._selector.close()
                os.close(self._woken)
