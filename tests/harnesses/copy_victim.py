"""Engines in the middle of a copy, to be killed there: ``python -m tests.harnesses.copy_victim ADDRESS LEG...``.

For each leg one process, whenever a line is read: prints its id when its copy has begun.
"""

from __future__ import annotations

import os
import sys
import threading

from hicache.client import DaemonL3
from tests.engine.conftest import Rank
from tests.harnesses.copy_legs import LEGS, MeetingCopies, back_ends_of, copies_of


def stand(address: str, leg: str) -> None:
    """Register L2 with the daemon, begin the copy, and never end it."""

    def hold() -> None:
        print(os.getpid(), flush=True)
        threading.Event().wait()

    rank = Rank()
    client = DaemonL3(address, spec=rank.spec, memory=rank.l2)
    assert client.wait_ready(timeout_s=20)
    copies = MeetingCopies(copies_of(rank, back_ends_of(LEGS[leg])[0]), hold)  # type: ignore[arg-type]  # never returns
    rank.executor(client, copies=copies).submit(LEGS[leg].job(1))
    threading.Event().wait()


def main(address: str, *legs: str) -> None:
    """Each in a fork of this process, which has no thread of its own: imports take seconds."""
    for leg in legs:
        sys.stdin.readline()
        child = os.fork()
        if not child:
            stand(address, leg)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
