"""SIGHUP: a changed capacity is taken from the configuration while the daemon runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from hicache.daemon.config import DaemonConfig
from hicache.daemon.storage import Store
from hicache.errors import BackendError, ConfigError
from hicache.workers import Workers

log = structlog.get_logger("hicache.daemon")


async def resize_when_asked(asked: asyncio.Event, *, reread: Callable[[], DaemonConfig], store: Store) -> None:
    """Each time that ``asked`` is set, gives the store the capacity that ``reread`` says. Runs until cancelled.

    Whatever is wrong is logged, and the store stays as it is. A resize that has begun goes on in its thread.
    """
    resizing = Workers("hicached-resize", threads=1, queue_max=1)
    try:
        while True:
            await asked.wait()
            asked.clear()
            try:
                job = resizing.submit(partial(_resize, reread, store))
                capacity_bytes = await asyncio.wrap_future(job.future)
            except (ConfigError, BackendError, OSError) as error:
                log.error("the capacity stays as it is", reason=str(error))
            except Exception:  # a mistake of ours must not make the daemon deaf to the next signal
                log.exception("the capacity stays as it is")
            else:
                log.info("the capacity is as configured", capacity_bytes=capacity_bytes)
    finally:
        resizing.close(timeout_s=0)


def _resize(reread: Callable[[], DaemonConfig], store: Store) -> int:
    config = reread()
    store.resize(config.capacity_bytes)
    return config.capacity_bytes
