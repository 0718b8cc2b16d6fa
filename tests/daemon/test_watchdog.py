"""The watchdog is fed by a loop that turns and a storage that answers; a recovery asks for time while it gets on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from hicache.backends.base import PutItem
from hicache.backends.progress import tell_progress, told_of_progress
from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.config import load_config
from hicache.daemon.recovery import PROGRESS_INTERVAL_S, RecoveryProgress, open_store
from hicache.daemon.service_manager import ServiceManager
from hicache.daemon.watchdog import Watchdog
from tests.daemon.rig import START_S, settings_in, wait_until


class HeardManager(ServiceManager):
    """Counts what it would say."""

    def __init__(self) -> None:
        super().__init__({"WATCHDOG_USEC": "3000"})
        self.feeds = 0
        self.asked: list[str] = []

    def alive(self) -> None:
        self.feeds += 1

    def busy(self, status: str, *, within_s: float) -> None:
        self.asked.append(status)


def test_a_storage_that_is_slow_is_borne_and_one_that_is_dead_is_not() -> None:
    manager, now_s, is_alive = HeardManager(), 0.0, True

    def ask() -> bool:
        return is_alive

    async def fed_within(turns: int) -> bool:
        before = manager.feeds
        for _ in range(turns):
            await asyncio.sleep(manager.watchdog_s / 3)
        return manager.feeds > before

    async def steps() -> None:
        nonlocal now_s, is_alive
        watchdog = Watchdog(manager, ask, storage_patience_s=60, clock=lambda: now_s)
        watchdog.start()
        assert await fed_within(20)
        is_alive, now_s = False, 59.0
        assert await fed_within(20)
        now_s = 61.0
        await fed_within(2)  # one may be on its way
        assert not await fed_within(20)
        is_alive = True
        assert await fed_within(20)
        await watchdog.stop()
        assert not await fed_within(20)

    asyncio.run(steps())


def test_a_loop_that_stands_still_feeds_nobody() -> None:
    manager, gate, is_stuck, is_over = HeardManager(), threading.Event(), threading.Event(), asyncio.Event()
    loop: asyncio.AbstractEventLoop | None = None

    def stand_still() -> None:
        is_stuck.set()
        gate.wait(START_S)

    async def steps() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        watchdog = Watchdog(manager, lambda: True)
        watchdog.start()
        await asyncio.sleep(3 * manager.watchdog_s)
        assert manager.feeds
        asyncio.get_running_loop().call_soon(stand_still)
        await is_over.wait()
        await watchdog.stop()

    turning = threading.Thread(target=asyncio.run, args=(steps(),))
    turning.start()
    assert is_stuck.wait(START_S)
    fed = manager.feeds
    assert not gate.wait(20 * manager.watchdog_s)
    assert manager.feeds == fed
    gate.set()
    wait_until(lambda: manager.feeds > fed, what="it turns again")
    assert loop is not None
    loop.call_soon_threadsafe(is_over.set)
    turning.join()


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_a_recovery_says_how_many_objects_it_has_read(tmp_path: Path, backend: str) -> None:
    config = load_config(None, settings_in(tmp_path, backend=backend))
    opened = open_store(config, StoreLimits())
    opened.store.put([PutItem(b"k" * 32 + bytes([number]), memoryview(b"bytes")) for number in range(5)])
    opened.store.close()
    progress = RecoveryProgress(HeardManager())
    open_store(config, StoreLimits(), on_progress=progress).store.close()
    assert progress.objects == 5


def test_progress_asks_for_time_once_a_second_and_no_progress_asks_for_none() -> None:
    manager, now_s = HeardManager(), 0.0
    progress = RecoveryProgress(manager, clock=lambda: now_s)
    with told_of_progress(progress):
        for step in range(100):
            now_s = step * PROGRESS_INTERVAL_S / 10
            tell_progress(1000)
    assert 10 <= len(manager.asked) <= 11
    assert manager.asked[-1] == "recovering: 91000 objects"
    tell_progress(1)
    assert progress.objects == 100_000, "who opens a store elsewhere is not counted"
