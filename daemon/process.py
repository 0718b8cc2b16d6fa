"""The process of hicached: its signals, its limits, and the daemon in it from start to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Mapping

import structlog

from hicache.daemon.config import DaemonConfig
from hicache.daemon.open_files import raise_open_files_limit
from hicache.daemon.reload import resize_when_asked
from hicache.daemon.server import Daemon
from hicache.daemon.stopping import STOP_S_MAX

log = structlog.get_logger("hicache.daemon")


async def serve(
    config: DaemonConfig, *, environment: Mapping[str, str], reread: Callable[[], DaemonConfig] | None = None
) -> bool:
    """Runs until SIGTERM or SIGINT. True after a clean stop. Raises what ``Daemon.start`` raises.

    A second signal ends the process at once, as if the first had not been caught. On SIGHUP the capacity becomes the
    one that ``reread`` says.
    """
    stop_wanted, resize_wanted = asyncio.Event(), asyncio.Event()
    _catch_signals(stop_wanted)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, resize_wanted.set)
    raise_open_files_limit()
    daemon = Daemon(config, environment=environment)
    starting = asyncio.ensure_future(daemon.start())
    waiting = asyncio.ensure_future(stop_wanted.wait())
    resizing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            resizing = asyncio.ensure_future(
                resize_when_asked(resize_wanted, reread=reread or (lambda: config), store=daemon.store)
            )
            await waiting
            log.info("stopping")
    finally:
        waiting.cancel()
        starting.cancel()
        resizing.cancel()
        await asyncio.gather(starting, waiting, resizing, return_exceptions=True)
        _limit_stop_time()
        stopped_clean = await daemon.stop()
    log.info("stopped", clean=stopped_clean)
    return stopped_clean


def _catch_signals(stop_wanted: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stop_wanted.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def _limit_stop_time() -> None:
    """The process ends after STOP_S_MAX, whatever is stuck: stores survive that, supervisors' patience does not."""
    timer = threading.Timer(STOP_S_MAX, os._exit, (1,))
    timer.daemon = True
    timer.start()
