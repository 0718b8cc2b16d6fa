"""A rank in a process of its own, told over a pipe what to do."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.daemon_process import BenchError
from hicache.cache import HiCache
from hicache.ranks.settings import Ranks
from hicache.ranks.worker import RankWorker
from hicache.spec import CacheSpec

ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a process opens its RankWorker with, or the HiCache of rank 0 unless it is led; ``settings`` are
    those of their ``open``.
    """

    spec: CacheSpec
    rank: int
    leader: Ranks
    settings: dict[str, Any] = field(default_factory=dict)  # Any: of whatever type each setting is
    is_led: bool = False  # whatever its rank


class RankProcess:
    """One rank. Functions that it is asked to call must be importable; they get the RankWorker, or HiCache, first."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Start it."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bench.rank_patterns", "bench.rank_process"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(settings, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.rank = settings.rank

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def ready(self) -> None:
        """Wait until it belongs to the replica. Raises BenchError with what the RankWorker raised."""
        self.answer()

    def ask(self, function: Callable[..., object], *arguments: object) -> None:
        """Have it call ``function(worker, *arguments)``; ``answer`` gets what that returns."""
        self._pipe.send((function, arguments))

    def answer(self) -> Any:  # whatever the function returns
        """What the function returned that was asked for first. Raises BenchError: also for what it raised."""
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise BenchError(f"rank {self.rank} has not answered within {ANSWER_TIMEOUT_S:g} s")
        try:
            error, result = self._pipe.recv()
        except (EOFError, ConnectionResetError) as gone:
            raise BenchError(f"rank {self.rank} has died") from gone
        if error is not None:
            raise BenchError(f"rank {self.rank}: {error}")
        return result

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; returns when the process is dead after SIGKILL, stopped after SIGSTOP."""
        os.kill(self.pid, number)
        if number is signal.SIGKILL:
            self._process.join(ANSWER_TIMEOUT_S)
        if number is signal.SIGSTOP:
            stat = Path(f"/proc/{self.pid}/stat")
            while stat.read_text().rpartition(")")[2].split()[0] not in ("T", "t"):
                pass

    def end(self) -> None:
        """Leaves no process behind. Idempotent."""
        if self._pipe.closed:
            return
        if self._process.is_alive():
            self._process.kill()
        self._process.join(ANSWER_TIMEOUT_S)
        self._pipe.close()
        self._process.close()


def _opened(settings: WorkerSettings) -> RankWorker | HiCache:
    if settings.rank == 0 and not settings.is_led:
        return HiCache.open(settings.spec, ranks=settings.leader, **settings.settings)
    return RankWorker.open(settings.spec, rank=settings.rank, leader=settings.leader, **settings.settings)


def _serve(settings: WorkerSettings, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        rank = _opened(settings)
    except Exception as error:
        pipe.send((repr(error), None))
        return
    pipe.send((None, None))
    with rank:
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            try:
                result = function(rank, *arguments)
            except Exception as error:
                pipe.send((repr(error), None))
            else:
                pipe.send((None, result))
