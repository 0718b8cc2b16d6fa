"""Opens the store in a thread, which may take long, and closes it when a stop comes first."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from hicache.backends.open import open_store as open_backend_store
from hicache.backends.progress import told_of_progress
from hicache.backends.tenant_limits import StoreLimits
from hicache.backends.wipe import wipe_store
from hicache.daemon.config import DaemonConfig
from hicache.daemon.service_manager import ServiceManager
from hicache.daemon.stopping import Stopping
from hicache.daemon.storage import Store
from hicache.daemon.store_look import StoreLook
from hicache.errors import ConfigError
from hicache.workers import Job, Workers

PROGRESS_INTERVAL_S = 1.0
PROGRESS_PATIENCE_S = 30.0  # without progress for so long, a recovery counts as stuck

log = structlog.get_logger("hicache.daemon")


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A recovered store, and what it is."""

    store: Store
    store_id: bytes
    look: StoreLook


class RecoveryProgress:
    """Counts what a recovery has read, and asks the service manager for more time as long as it goes on.

    Called by the thread that recovers: one that hangs asks for nothing, and its start is given up.
    """

    def __init__(self, manager: ServiceManager, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.objects = 0
        self._manager = manager
        self._clock = clock
        self._told_s = -math.inf

    def __call__(self, count: int) -> None:
        """``count`` more objects have been read."""
        self.objects += count
        now_s = self._clock()
        if now_s - self._told_s >= PROGRESS_INTERVAL_S:
            self._told_s = now_s
            self._manager.busy(f"recovering: {self.objects} objects", within_s=PROGRESS_PATIENCE_S)


def open_store(
    config: DaemonConfig, limits: StoreLimits, *, on_progress: Callable[[int], None] = lambda _: None
) -> OpenedStore:
    """Blocking: opens the backend and recovers its index. Raises ConfigError, StorageInUse or BackendError.

    ``on_progress`` is told, in this thread, how many more objects have been read.
    """
    with told_of_progress(on_progress):
        if not config.persist:
            wipe_left_over(config.path)
        return _open_store(config, limits)


def wipe_left_over(path: str) -> None:
    """What an earlier run has left, for example by a crash, is gone. Raises ConfigError or StorageInUse."""
    try:
        is_wiped = wipe_store(Path(path))
    except OSError as error:
        raise ConfigError(
            "path", path, f"a directory that can be emptied, as persist = false wants ({error})"
        ) from error
    if is_wiped:
        log.info("removed what an earlier run has left", path=path)


async def wipe_at_stop(path: str, stopping: Stopping) -> None:
    """Removes the closed store within what the stop has left; the next start removes what it did not get to."""
    wiping = Workers("hicached-wipe", threads=1, queue_max=1)
    job = asyncio.wrap_future(wiping.submit(partial(wipe_store, Path(path))).future)
    done, _ = await asyncio.wait([job], timeout=stopping.store_left_s)
    wiping.close(timeout_s=0)
    if not done or job.exception() is not None:
        stopping.is_clean = False
        reason = str(job.exception()) if done else "it takes longer than a stop"
        log.error("the store was not removed; the next start with persist = false does it", reason=reason)


def _open_store(config: DaemonConfig, limits: StoreLimits) -> OpenedStore:
    store = open_backend_store(
        config.backend_url,
        capacity_bytes=config.capacity_bytes,
        object_bytes_max=config.object_bytes_max,
        high_watermark=config.high_watermark,
        low_watermark=config.low_watermark,
        free_space_floor_bytes=config.free_space_floor_bytes,
        objects_max=config.objects_max,
        limits=limits,
        encryption_keys=config.encryption_keys,
    )
    return OpenedStore(store, store.store_id, StoreLook.at(store))


async def recover(opener: Callable[[], OpenedStore], stages: AsyncExitStack, stopping: Stopping) -> OpenedStore:
    """What ``opener`` opens in a thread; probes are answered meanwhile. Raises what it raises."""
    opening = Workers("hicached-recovery", threads=1, queue_max=1)
    job = opening.submit(opener)
    try:
        opened = await asyncio.wrap_future(job.future)
    except asyncio.CancelledError:
        if not opening.withdraw(job):
            stages.push_async_callback(_close_overtaken, opening, job, stopping)
        raise
    except BaseException:
        opening.close(timeout_s=0)
        raise
    opening.close(timeout_s=0)
    return opened


async def _close_overtaken(opening: Workers, job: Job[OpenedStore], stopping: Stopping) -> None:
    """A stop overtook the recovery: what it opens within the time of the stop is closed as after any other run.

    A recovery that takes longer ends with the process, as with SIGKILL, which backends survive.
    """
    closing = asyncio.wrap_future(opening.submit(partial(_close_opened, job)).future)  # one thread: after the opening
    done, _ = await asyncio.wait([closing], timeout=stopping.store_left_s)
    opening.close(timeout_s=0)
    if not done:
        stopping.is_clean = False
        log.warning("stopped in the middle of a recovery; the next start begins it again")
    elif (error := closing.exception()) is not None:
        stopping.is_clean = False
        log.error("the storage was not closed cleanly", reason=str(error))


def _close_opened(job: Job[OpenedStore]) -> None:
    job.future.result().store.close()
