"""Signals that come before the daemon can answer them are kept, and answered then. Imports next to nothing."""

from __future__ import annotations

import signal

ANSWERED = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


def hold_signals() -> None:
    """They stay pending in this thread, and in the threads that it starts, until ``answer_signals``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ANSWERED)


def answer_signals() -> None:
    """There are handlers: what was held is delivered, and what comes is answered at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ANSWERED)
