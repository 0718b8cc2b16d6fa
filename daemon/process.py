"""The process of hicached: its signals, its limits, and the daemon in it from start to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Mapping

import structlog

from hicache.daemon.config import DaemonConfig
from hicache.daemon.dumps import keep_memory_out_of_dumps
from hicache.daemon.early_signals import answer_signals
from hicache.daemon.process_limits import check_limits
from hicache.daemon.server import Daemon
from hicache.daemon.stopping import STOP_S_MAX

log = structlog.get_logger("hicache.daemon")


async def serve(
    config: DaemonConfig, *, environment: Mapping[str, str], reread: Callable[[], DaemonConfig] | None = None
) -> bool:
    """Runs until SIGTERM or SIGINT, or until it was told to drain. True after a clean stop.

    Raises what ``Daemon.start`` raises. A second signal ends the process at once, as if the first had not been caught.
    On SIGHUP the daemon takes what ``reread`` says.
    """
    gc.collect()  # what was imported is there for good: no collection walks through it again, with all threads waiting
    gc.freeze()
    check_limits(config)
    keep_memory_out_of_dumps()
    daemon = Daemon(config, environment=environment, reread=reread)
    reload_wanted = asyncio.Event()
    _catch_signals(stop=lambda: daemon.drain.begin(within_s=daemon.drain_s), reload=reload_wanted.set)
    answer_signals()
    starting = asyncio.ensure_future(daemon.start())
    draining = asyncio.ensure_future(daemon.drain.begun.wait())
    reloading: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        await asyncio.wait((starting, draining), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            gc.freeze()  # and so are the parts, and the tenants
            reloading = asyncio.ensure_future(daemon.reloader.reload_when_asked(reload_wanted))
            await draining
            await daemon.drain.wait()
            log.info("stopping")
    finally:
        for task in (starting, draining, reloading):
            task.cancel()
        await asyncio.gather(starting, draining, reloading, return_exceptions=True)
        _limit_stop_time()
        stopped_clean = await daemon.stop()
    log.info("stopped", clean=stopped_clean)
    return stopped_clean


def _catch_signals(*, stop: Callable[[], None], reload: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()

    def stop_once() -> None:
        stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_once)
    loop.add_signal_handler(signal.SIGHUP, reload)


def _limit_stop_time() -> None:
    """The process ends after STOP_S_MAX, whatever is stuck: stores survive that, supervisors' patience does not."""
    timer = threading.Timer(STOP_S_MAX, os._exit, (1,))
    timer.daemon = True
    timer.start()
