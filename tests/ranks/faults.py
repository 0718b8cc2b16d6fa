"""Faults within one rank: functions that a worker process is asked to call, or that are called on the leader."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hicache.cache import HiCache
from hicache.l3 import Done, L3Item
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.ranks.worker import RankWorker
from tests.client.support import wait_until

Rank = HiCache | RankWorker


def hold(rank: Rank, name: str, folder: Path) -> None:
    """Calls of ``l3.get``, ``copies.backup`` and the like wait until ``let_go``."""
    owner, method = _owner(rank, name)
    original: Callable[..., Any] = getattr(owner, method)

    def held(*arguments: Any, **options: Any) -> Any:
        (folder / f"{name}.reached").touch()
        wait_for_file(folder / f"{name}.open")
        return original(*arguments, **options)

    setattr(owner, method, held)


def wait_until_reached(name: str, folder: Path) -> None:
    """Until a call waits at the gate."""
    wait_for_file(folder / f"{name}.reached")


def let_go(name: str, folder: Path) -> None:
    """Open the gate, for good."""
    (folder / f"{name}.open").touch()


def wait_for_file(path: Path) -> None:
    """Until another process has made it."""
    wait_until(path.exists, timeout_s=30, what=path.name)


def fail_copies(rank: Rank, name: str, group: int) -> None:
    """The copies of one group fail, in the direction of ``copies.load`` and the like."""
    owner, method = _owner(rank, name)
    original: Callable[..., Any] = getattr(owner, method)

    def failing(of_group: int, *slots: Sequence[int]) -> None:
        if of_group == group:
            raise OSError("a copy failed on purpose")
        original(of_group, *slots)

    setattr(owner, method, failing)


def fail_gets(rank: Rank, keys: set[bytes]) -> None:
    """Gets of objects of these pages fail, and leave garbage where the objects should be."""
    owner, _ = _owner(rank, "l3.get")
    original = owner.get

    def get(items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        is_bad = [any(key in item.key for key in keys) for item in items]
        good = [item for item, bad in zip(items, is_bad, strict=True) if not bad]
        for item, bad in zip(items, is_bad, strict=True):
            if bad:
                assert rank.l2 is not None
                with rank.l2.buffer[item.offset : item.offset + item.size_bytes] as target:
                    target[:] = b"\xbb" * item.size_bytes

        def joined(outcomes: list[Outcome]) -> None:
            answers = iter(outcomes)
            done([Outcome.IO_ERROR if bad else next(answers) for bad in is_bad])

        if good:
            original(good, timeout_s=timeout_s, done=joined)
        else:
            joined([])

    owner.get = get


def poison(rank: Rank) -> None:
    """Everything in L1 and L2 is another tenant's."""
    for pages in rank.l1.paged.values():
        pages.fill_(66)
    for fields in rank.l1.state.values():
        for field in fields.values():
            field.fill_(66)
    assert rank.l2 is not None
    rank.l2.buffer[:] = b"\x42" * rank.l2.size_bytes


def open_things(rank: Rank) -> list[str]:
    """What descriptors of this process point to, less numbers that tell nothing."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        found.append(target.split(":")[0] if target.startswith(("socket:", "pipe:")) else target)
    return sorted(found)


def thread_names(rank: Rank) -> list[str]:
    """Threads of hicache in this process."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("hicache"))


def why_over(rank: RankWorker) -> str | None:
    """Wait until the worker is over."""
    return rank.wait(20)


def try_step(rank: RankWorker, step: int) -> None:
    """A step without compute."""
    with rank.step(step):
        pass


def assert_nothing_leaked(cache: HiCache) -> None:
    """Nobody holds a slot of any tier, and nothing is under way."""
    assert cache.flush(timeout_s=20)
    index = cache._directory.index
    assert cache.stats.prefetch_in_flight == 0
    for tier in Tier:
        for group, pool in enumerate(index.pools[tier]):
            handles = index.acquire(tier, group, pool.capacity)
            assert handles is not None, f"slots of group {group} in {tier} are held by nobody"
            index.release(tier, group, handles)
    assert not index.nodes


def _owner(rank: Rank, name: str) -> tuple[Any, str]:  # whatever the executor has there
    owner, method = name.split(".")
    executor = rank._executor if isinstance(rank, RankWorker) else rank._replica.executor
    assert executor is not None
    return {"l3": executor._l3, "copies": executor._copies}[owner], method
