"""What the executor makes of each fault of a copy between L1 and L2, or within L1."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hicache.moves import DIRECT, REFERENCE, by_speed
from hicache.outcome import Outcome
from tests.client.memory import SmallMemory
from tests.client.support import open_descriptors, wait_until
from tests.daemon.rig import DaemonThread
from tests.engine.conftest import Rank
from tests.faults.other_client import OtherClient
from tests.harnesses.cells import Bound, Cell, Part, Place, Table
from tests.harnesses.copy_legs import (
    ERRORS,
    LEGS,
    PAGES,
    Leg,
    MeetingCopies,
    back_ends_of,
    contents,
    copies_of,
    fill,
    is_copied,
)
from tests.harnesses.storage_faults import BASE_METRICS, DELAY_S, KILLED, SIZE_BYTES, text_of
from tests.harnesses.stores import StoreOpener

CLOSE_S = 0.3
WRONG_BYTES, NEVER, LATE = "wrong bytes", "never answers", "answers late"


def row(fault: str, leg: Leg) -> str:
    """One cell for each back end that the leg may go through."""
    bound = Bound()
    cells = {}
    for back_end in back_ends_of(leg):
        bound.learn(leg.name, lambda back_end=back_end: _executed(leg, back_end, lambda: None, Bound()))  # type: ignore[misc]  # bound now
        during = _faulted(fault, leg, back_end, bound)
        cells[back_end] = Cell(during, _executed(leg, back_end, lambda: None, bound))
    return text_of(cells)


def _faulted(fault: str, leg: Leg, back_end: str, bound: Bound) -> str:
    if fault in ERRORS:
        return _executed(leg, back_end, ERRORS[fault], bound, faults=1)
    if fault == "delay":
        return _executed(leg, back_end, _delay, bound)
    return _held(leg, back_end, bound, is_released=fault == LATE)


def _delay() -> None:
    threading.Event().wait(DELAY_S)


def _executed(leg: Leg, back_end: str, meet: Callable[[], Exception | None], bound: Bound, *, faults: int = 0) -> str:
    """The outcome of one job whose copies meet something; what it says must be true of the bytes, and counted."""
    descriptors = open_descriptors()
    rank = Rank()
    try:
        fill(rank)
        before = contents(rank)
        executor = rank.executor(copies=MeetingCopies(copies_of(rank, back_end), meet))
        with bound.within(0.0, leg.name):
            executor.submit(leg.job(1))
            [outcome] = set(rank.completions.outcomes(1))
        assert outcome is not Outcome.OK or is_copied(rank, leg, before), f"{leg.name} is OK with wrong bytes"
        counted = {f"copy.{leg.kind}": faults} if faults else {}
        assert executor.faults() == counted, f"counted {executor.faults()} in place of {counted}"
        assert not any(executor.open_jobs().values())
        assert executor.close()
    finally:
        rank.l2.close()
    assert open_descriptors() <= descriptors, f"{leg.name} leaves descriptors: {open_descriptors() - descriptors}"
    return outcome.name


def _held(leg: Leg, back_end: str, bound: Bound, *, is_released: bool) -> str:
    """A copy that goes on only when compute has gone on, or when the engine has given it up."""
    go_on, entered = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go_on.wait()

    rank = Rank()
    fill(rank)
    before = contents(rank)
    executor = rank.executor(copies=MeetingCopies(copies_of(rank, back_end), hold))  # type: ignore[arg-type]  # no error
    try:
        with bound.within(0.0, leg.name):
            executor.submit(leg.job(1))
            assert entered.wait(20)
        assert sum(executor.open_jobs().values()) == 1, "sources and targets are in use"
        assert not rank.completions.has(1)
        if is_released:
            go_on.set()
        else:
            with bound.within(CLOSE_S, leg.name):
                assert not executor.close(timeout_s=CLOSE_S), "it says that memory may still be touched"
            assert executor.faults() == {"close": 1}
        [outcome] = set(rank.completions.outcomes(1))
        assert outcome is not Outcome.OK or is_copied(rank, leg, before), f"{leg.name} is OK with wrong bytes"
        return outcome.name
    finally:
        go_on.set()
        executor.close()
        wait_until(lambda: not _threads_of(leg), what=f"the end of threads: {_threads_of(leg)}")
        rank.l2.close()


def _threads_of(leg: Leg) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(f"hicache-{leg.kind}")]


def wrong_bytes(leg: Leg) -> str:
    """Whether ``auto`` chooses a back end that has one bit of each copy wrong; beside it one that has all right."""

    class Garbling:
        def __init__(self, inner: Any) -> None:  # Any: a Mover
            self._inner = inner

        def scatter(self, objects: torch.Tensor, **slots: Any) -> None:
            if leg.name == "load":
                objects.view(-1)[objects.numel() // 2] ^= 1
            self._inner.scatter(objects, **slots)

        def gather(self, objects: torch.Tensor, **slots: Any) -> None:
            self._inner.gather(objects, **slots)
            if leg.name == "backup":
                objects.view(-1)[objects.numel() // 2] ^= 1

    def of_pages(pool: Any, pages: torch.Tensor, staging: Any) -> Any:
        return Garbling(DIRECT.of_pages(pool, pages, staging))

    names = []
    for moves in (replace(DIRECT, name="garbling", of_pages=of_pages), replace(DIRECT, name="right")):
        able = by_speed((REFERENCE, moves), run_bytes=4096, by_layer=False, device=torch.device("cpu"))
        names.append("chosen from" if any(each.name == moves.name for each in able) else "left out")
    return str(Cell(*names))


class KilledEngines:
    """Engines that are killed in the middle of a copy, with their memory registered; one daemon serves them all."""

    def __init__(self, folder: Path, legs: Collection[str]) -> None:
        self._daemon = DaemonThread(folder, StoreOpener("lmdb"))
        address = self._daemon.target.replace("unix:", "unix://")
        self._memory = SmallMemory(2 * SIZE_BYTES)
        self._other = OtherClient(address, self._memory, size_bytes=SIZE_BYTES)
        self._let_other_work()
        wait_until(lambda: not self._readings()["hicache_storage_busy_threads"], what="the end of the puts")
        self._base = self._readings()
        command = [sys.executable, "-m", "tests.harnesses.copy_victim", address, *legs]
        self._engines = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._descriptors = open_descriptors().total()

    def close(self) -> None:
        self._engines.kill()
        self._engines.communicate()
        self._other.close()
        self._memory.close()
        self._daemon.stop()

    def cell(self) -> Cell:
        """Of the next leg."""
        assert self._engines.stdin is not None
        assert self._engines.stdout is not None
        self._engines.stdin.write("next\n")
        self._engines.stdin.flush()
        engine = int(self._engines.stdout.readline())
        held = self._readings()
        assert held["hicache_regions"] == self._base["hicache_regions"] + 1, "its memory was registered"
        os.kill(engine, signal.SIGKILL)
        self._let_other_work()
        wait_until(lambda: self._readings() == self._base, what=f"{self._base} after a kill: {self._readings()}")
        wait_until(lambda: open_descriptors().total() <= self._descriptors, what="the end of its descriptors")
        return Cell("freed", "OK")

    def _let_other_work(self) -> None:
        with self._other:
            rounds = self._other.rounds
            wait_until(lambda: self._other.rounds > rounds, what="a round of the other engine")
        assert not self._other.wrong, self._other.wrong

    def _readings(self) -> dict[str, float]:
        return {name: self._daemon.metric(name) for name in BASE_METRICS if name != "hicache_inflight_bytes"}


def run_copies(places: Collection[Place]) -> Table:
    """These places of the table."""
    table: Table = {}
    for fault, leg in places:
        if fault == WRONG_BYTES:
            table[fault, leg] = wrong_bytes(LEGS[leg])
        elif fault != KILLED:
            table[fault, leg] = row(fault, LEGS[leg])
    killed = [leg for fault, leg in places if fault == KILLED]
    if killed:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hfm-")))
            engines = stack.enter_context(contextlib.closing(KilledEngines(folder, killed)))
            table |= {(KILLED, leg): str(engines.cell()) for leg in killed}
    return table


_IN_COMPUTE = (
    "it runs in the order of compute itself: a device on which it never ends computes nothing more either, and an "
    "engine that hangs so is killed (last column)"
)
_CHECKED_ONCE = "the back end is that of a load, and was checked as such"
_ONE_WAY = "one plain copy of torch, which is the reference for all others; nothing could check it but itself"


def _reasons() -> dict[Place, str]:
    in_compute = [leg.name for leg in LEGS.values() if not leg.is_beside]
    reasons = {(fault, leg): _IN_COMPUTE for fault in (NEVER, LATE) for leg in in_compute}
    for leg in LEGS.values():
        if leg.group != PAGES:
            reasons[WRONG_BYTES, leg.name] = _ONE_WAY
        elif leg.name not in ("load", "backup"):
            reasons[WRONG_BYTES, leg.name] = _CHECKED_ONCE
    return reasons


def copy_part() -> Part:
    """Every leg of a copy."""
    return Part("copies", tuple(LEGS), run_copies, _reasons())
