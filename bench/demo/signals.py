"""What ends the demo from outside: SIGINT, SIGTERM and SIGHUP, each after everything was put away."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(SystemExit):
    """A signal asked for the end. The exit code is the one that shells know: 128 and the signal's number."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def stop_signals_raised() -> Iterator[None]:
    """Within, the first stop signal raises ``Stopped``; those after it are ignored, so that nothing is left behind."""

    def stop(number: int, _: FrameType | None) -> None:
        for stop_signal in STOP_SIGNALS:
            signal.signal(stop_signal, signal.SIG_IGN)
        raise Stopped(signal.Signals(number))

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started within never see a stop signal, which a terminal sends to all: their parent ends them.

    The parent hears of one afterwards: a child whose start it broke off would complain.
    """
    heard: list[int] = []
    resource_tracker.ensure_running()  # its start would unblock SIGINT again
    handlers = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in STOP_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited; other threads here go on hearing
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for first in heard[:1]:
            signal.raise_signal(first)
