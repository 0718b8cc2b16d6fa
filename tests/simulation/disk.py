"""What happens to the calls of the file backend."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from hicache.backends.file_calls import FileCalls
from tests.simulation.scheduler import Scheduler
from tests.simulation.tally import Tally


class DiskFaults:
    """What happens to the calls of the file backend. ``share`` of them meet one."""

    def __init__(self, scheduler: Scheduler, tally: Tally) -> None:
        self._sim, self._tally = scheduler, tally
        self.share = 0.0
        self.forgets_share = 0.0  # of what is read, a bit is wrong
        self.freezes_reads_only = False
        self.frozen_until_s = 0.0  # a call that begins before ends after

    @property
    def wall_s(self) -> float:
        return self._sim.now_s + self._sim.wall_offset_s

    def meet(self, *, is_read: bool = False) -> None:
        """Before a call: perhaps a delay, perhaps an error."""
        sim = self._sim
        if sim.current is None or sim.is_over:
            return
        sim.maybe_switch()
        if (is_read or not self.freezes_reads_only) and sim.now_s < self.frozen_until_s and sim.rng.random() < 0.5:
            self._tally.disk_faults += 1
            sim.sleep(self.frozen_until_s - sim.now_s + sim.rng.uniform(0, 0.1))
        if self.share and sim.rng.random() < self.share:
            self._tally.disk_faults += 1
            kind = sim.rng.choice(("delay", "delay", "slow", "EIO", "ENOSPC"))
            if kind in ("delay", "slow"):
                sim.sleep(sim.rng.uniform(0, 0.2 if kind == "delay" else 30.0))
            else:
                raise OSError(getattr(errno, kind), "simulated")

    def calls_class(self) -> type:
        """In place of ``FileCalls``."""
        faults = self

        class Calls(FileCalls):
            def write(self, fd: int, parts: list[memoryview], offset: int) -> int:
                faults.meet()
                count = super().write(fd, faults.shortened(parts), offset)
                now_s = faults.wall_s
                os.utime(fd, (now_s, now_s))  # the kernel's clock is not that of the seed, and times of use order files
                return count

            def read(self, fd: int, targets: list[memoryview], offset: int) -> int:
                faults.meet(is_read=True)
                targets = faults.shortened(targets)
                count = super().read(fd, targets, offset)
                if count == sum(len(target) for target in targets):
                    faults.spoil(targets[-1])
                return count

        def wrapped(name: str) -> Callable[..., Any]:
            def call(self: Calls, *args: Any) -> Any:
                faults.meet(is_read=name == "open")
                return getattr(FileCalls, name)(self, *args)

            return call

        for name in ("create", "reopen", "open", "rename", "link", "remove", "claim", "make_folder"):
            setattr(Calls, name, wrapped(name))
        return Calls

    def spoil(self, target: memoryview) -> None:
        """Perhaps the medium has forgotten a bit."""
        sim = self._sim
        if self.forgets_share and sim.current is not None and len(target) and sim.rng.random() < self.forgets_share:
            self._tally.bits_flipped += 1
            target[sim.rng.randrange(len(target))] ^= 1 << sim.rng.randrange(8)

    def shortened(self, parts: list[memoryview]) -> list[memoryview]:
        sim = self._sim
        if sim.current is not None and len(parts[0]) > 1 and sim.rng.random() < 0.02:
            return [parts[0][: sim.rng.randrange(1, len(parts[0]))]]
        return parts
