"""Sockets, selectors and event loops of fibers: the kernel's own sockets, whose waits the scheduler waits out.

Bytes on the way can be delayed, cut off and delivered in pieces, as the seed has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import selectors
import socket as real_socket
import struct
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from tests.simulation.scheduler import Process, Scheduler

_TIMEVAL = struct.Struct("@ll")


class NetworkFaults:
    """How often what happens to a socket operation. Changed by whoever drives the simulation."""

    def __init__(self) -> None:
        self.short_share = 0.1  # a piece of what is sent or received
        self.delay_share = 0.05
        self.delay_s_max = 0.05
        self.break_share = 0.0  # the connection breaks, at both ends
        self.broken = 0


class Sockets:
    """In place of the module ``socket``."""

    made: list[real_socket.socket]

    def __init__(self, scheduler: Scheduler, faults: NetworkFaults) -> None:
        sim = scheduler
        made = self.made = []

        class Socket(real_socket.socket):
            """Blocks its fiber where the kernel would block the thread."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                super().setblocking(False)
                self._limit_s: float | None = None
                self._receive_limit_s: float | None = None
                made.append(self)
                self.process: Process | None = None if sim.current is None else sim.current.process
                if self.process is not None:
                    self.process.at_death.append(self._die)

            def _die(self) -> None:
                if self.fileno() >= 0:
                    real_socket.socket.close(self)

            def setblocking(self, flag: bool) -> None:
                self._limit_s = None if flag else 0.0

            def settimeout(self, value: float | None) -> None:
                self._limit_s = value

            def gettimeout(self) -> float | None:
                return self._limit_s

            def setsockopt(self, level: int, option: int, value: Any, *rest: Any) -> None:
                if (level, option) == (real_socket.SOL_SOCKET, real_socket.SO_RCVTIMEO):
                    seconds, microseconds = _TIMEVAL.unpack(value)
                    self._receive_limit_s = seconds + microseconds / 1e6
                elif option not in (real_socket.SO_SNDBUF, real_socket.SO_RCVBUF):
                    super().setsockopt(level, option, value, *rest)

            def _meddle(self) -> None:
                """What happens to a connection before anything else does."""
                if sim.current is None or sim.is_over:
                    return
                sim.maybe_switch()
                if self._limit_s != 0.0 and sim.rng.random() < faults.delay_share:
                    sim.sleep(sim.rng.uniform(0, faults.delay_s_max))
                if faults.break_share and sim.rng.random() < faults.break_share and self.family == real_socket.AF_UNIX:
                    try:
                        super().shutdown(real_socket.SHUT_RDWR)
                        faults.broken += 1
                    except OSError:  # it listens, or is not connected
                        pass

            def _blocking(self, act: Callable[[], Any], mask: int, *, limit_s: float | None) -> Any:
                until_s = None if limit_s is None else sim.now_s + limit_s
                while True:
                    try:
                        return act()
                    except BlockingIOError:
                        if limit_s == 0.0:
                            raise
                        if until_s is not None and sim.now_s >= until_s:
                            raise TimeoutError("timed out") from None
                        sim.park(until_s=until_s, descriptors={self.fileno(): mask})

            def _receiving(self, act: Callable[[], Any], flags: int = 0) -> Any:
                self._meddle()
                if self._limit_s is None and self._receive_limit_s:
                    try:
                        return self._blocking(act, select.POLLIN, limit_s=self._receive_limit_s)
                    except TimeoutError:
                        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable") from None
                limit_s = 0.0 if flags & real_socket.MSG_DONTWAIT else self._limit_s
                return self._blocking(act, select.POLLIN, limit_s=limit_s)

            def _piece(self, size: int) -> int:
                if size > 1 and sim.current is not None and sim.rng.random() < faults.short_share:
                    return sim.rng.randrange(1, size)
                return size

            def connect(self, address: Any) -> None:
                self._meddle()
                self._blocking(lambda: real_socket.socket.connect(self, address), select.POLLOUT, limit_s=self._limit_s)

            def accept(self) -> tuple[real_socket.socket, Any]:
                descriptor, address = self._blocking(self._accept, select.POLLIN, limit_s=self._limit_s)
                return Socket(self.family, self.type, self.proto, fileno=descriptor), address

            def send(self, part: Any, flags: int = 0) -> int:
                self._meddle()
                piece = bytes(memoryview(part).cast("B")[: self._piece(len(part))])  # no view: it may be a bytearray
                return int(
                    self._blocking(
                        lambda: real_socket.socket.send(self, piece, flags), select.POLLOUT, limit_s=self._limit_s
                    )
                )

            def sendall(self, part: Any, flags: int = 0) -> None:
                view = memoryview(part).cast("B")
                while len(view):
                    view = view[self.send(view, flags) :]

            def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:
                self._meddle()
                parts = list(buffers)
                return int(
                    self._blocking(
                        lambda: real_socket.socket.sendmsg(self, parts, *rest), select.POLLOUT, limit_s=self._limit_s
                    )
                )

            def recv(self, size: int, flags: int = 0) -> bytes:
                size = self._piece(size)
                return bytes(self._receiving(lambda: real_socket.socket.recv(self, size, flags), flags))

            def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
                view = memoryview(buffer).cast("B")
                return self._fill([view[: size or len(view)]], flags)

            def recvmsg_into(self, buffers: Sequence[Any], ancillary: int = 0, flags: int = 0) -> Any:  # type: ignore[override]
                return self._fill([memoryview(buffer).cast("B") for buffer in buffers], flags), [], 0, None

            def recvmsg(self, size: int, ancillary: int = 0, flags: int = 0) -> Any:  # type: ignore[override]
                size = self._piece(size)
                return self._receiving(lambda: real_socket.socket.recvmsg(self, size, ancillary, flags), flags)

            def _fill(self, views: list[memoryview], flags: int) -> int:
                """Like recvmsg, and with MSG_WAITALL up to the end of all buffers, the stream, or the time."""
                is_whole = bool(flags & real_socket.MSG_WAITALL)
                flags &= ~real_socket.MSG_WAITALL
                filled = 0
                for whole in views:
                    start = 0
                    while start < len(whole):
                        view = whole[start:]
                        part = view if is_whole else view[: self._piece(len(view))]
                        try:
                            count = self._receiving(
                                lambda p=part: real_socket.socket.recv_into(self, p, 0, flags), flags
                            )  # type: ignore[misc]
                        except OSError:
                            if filled:
                                return filled
                            raise
                        filled += count
                        start += count
                        if count == 0 or not is_whole:
                            return filled
                return filled

            def __eq__(self, other: object) -> bool:
                return self is other

            def __hash__(self) -> int:
                return id(self)

        self.socket = Socket

    def bury(self) -> None:
        """Close what the dead have left open."""
        for socket in self.made:
            real_socket.socket.close(socket)

    def socketpair(self) -> tuple[real_socket.socket, real_socket.socket]:
        left, right = real_socket.socketpair()
        make = self.socket
        return (
            make(left.family, left.type, left.proto, fileno=left.detach()),
            make(right.family, right.type, right.proto, fileno=right.detach()),
        )

    def __getattr__(self, name: str) -> Any:  # Any: whatever the module has
        return getattr(real_socket, name)


class Eventfds:
    """In place of the module ``os`` where descriptors are made that belong to no folder: the dead leave some."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def eventfd(self, initial: int, flags: int = 0) -> int:
        descriptor = os.eventfd(initial, flags)
        self._open.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        os.close(descriptor)

    def bury(self) -> None:
        """Close what the dead have left open."""
        while self._open:
            self.close(self._open.pop())

    def __getattr__(self, name: str) -> Any:  # Any: whatever the module has
        return getattr(os, name)


class Selectors:
    """In place of the module ``selectors``."""

    def __init__(self, scheduler: Scheduler) -> None:
        class Selector(selectors.PollSelector):
            """Waits as a fiber."""

            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                ready = super().select(0)
                if ready or (timeout is not None and timeout <= 0):
                    scheduler.maybe_switch()
                    return ready
                masks = {
                    fd: (select.POLLIN if key.events & selectors.EVENT_READ else 0)
                    | (select.POLLOUT if key.events & selectors.EVENT_WRITE else 0)
                    for fd, key in self.get_map().items()
                    if isinstance(fd, int)
                }
                until_s = None if timeout is None else scheduler.now_s + timeout
                scheduler.park(until_s=until_s, descriptors=masks)
                return super().select(0)

        self.DefaultSelector = Selector

    def __getattr__(self, name: str) -> Any:  # Any: whatever the module has
        return getattr(selectors, name)


class _Counted:
    """Hashes that do not depend on where an object lies."""

    count = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        _Counted.count += 1
        made.number = _Counted.count
        return made

    def __hash__(self) -> int:
        return self.number  # type: ignore[attr-defined, no-any-return]

    def __eq__(self, other: object) -> bool:
        return self is other


class _Future(_Counted, asyncio.futures._PyFuture):  # type: ignore[name-defined, misc]
    pass


class _Task(_Counted, asyncio.tasks._PyTask):  # type: ignore[name-defined, misc]
    pass


class Loop(asyncio.SelectorEventLoop):
    """An event loop in a fiber, on the virtual clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.tasks: list[Any] = []
        super().__init__(Selectors(scheduler).DefaultSelector())
        self.set_task_factory(self._make_task)

    def _make_task(self, loop: Any, coroutine: Coroutine[Any, Any, Any], context: Any = None) -> Any:
        task = _Task(coroutine, loop=loop, context=context)
        self.tasks.append(task)
        return task

    def bury(self) -> None:
        """End the tasks of a dead process, so that nothing of them runs when they are collected."""
        for task in self.tasks:
            task._log_destroy_pending = False
            with contextlib.suppress(BaseException):
                task._coro.close()
        self.close()

    def create_future(self) -> Any:
        return _Future(loop=self)

    def time(self) -> float:
        return self._scheduler.now_s
