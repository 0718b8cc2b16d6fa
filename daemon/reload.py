"""SIGHUP and POST /v1/reload: what changed in the settings is taken while the daemon runs, all of it or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from typing import Protocol

import structlog

from hicache.admin.lifecycle import ReloadAnswer
from hicache.backends.attempt import Attempt
from hicache.daemon.config import DaemonConfig
from hicache.daemon.logs import set_log_level
from hicache.daemon.service_manager import ServiceManager
from hicache.daemon.storage import Store
from hicache.errors import BackendError, ConfigError, ReloadHangs
from hicache.workers import Workers

# Beside the tenants file, which is read again whether or not its name changed.
RELOADED = ("capacity_bytes", "log_level", "tenants_file", "drain_s")

RELOAD_S_MAX = 45.0  # one whose files or whose store do not answer is given up

log = structlog.get_logger("hicache.daemon")

Commit = Callable[[], None]


class Reloadable(Protocol):
    """A part of the daemon that can take other settings, or files with other content, while it runs."""

    settings: Sequence[str]  # those that it takes, beside the content of files

    def prepare(self, config: DaemonConfig) -> Commit:
        """Reads and checks everything, and changes nothing; blocking, in a thread. Raises ConfigError.

        What it returns is called in the event loop when all others are prepared, too, and cannot fail.
        """
        ...


class Reloader:
    """Owns the running configuration. One reload at a time; those who ask meanwhile get the next one."""

    def __init__(
        self,
        config: DaemonConfig,
        reread: Callable[[], DaemonConfig],
        parts: Sequence[Reloadable],
        *,
        store: Store,
        manager: ServiceManager,
    ) -> None:
        """``reread`` reads the configuration file again; blocking, raises ConfigError."""
        self._config = config
        self._reread = reread
        self._parts = parts
        self._store = store
        self._manager = manager
        self._turn = asyncio.Lock()
        self._hanging: Future[tuple[DaemonConfig, list[Commit]]] | None = None  # the thread of the latest one
        self._next: asyncio.Task[ReloadAnswer] | None = None  # waits for its turn
        self._tasks: set[asyncio.Task[ReloadAnswer]] = set()

    @property
    def config(self) -> DaemonConfig:
        """What holds now."""
        return self._config

    async def reload(self) -> ReloadAnswer:
        """Takes what changed. Raises ConfigError or BackendError, and then everything stays as it is: ReloadHangs
        after RELOAD_S_MAX.

        The capacity is changed last, since that alone may fail after it was checked. A reload goes on when the caller
        does not wait for it.
        """
        if self._next is None:
            self._next = task = asyncio.create_task(self._reload_in_turn())
            self._tasks.add(task)
            task.add_done_callback(self._done)
        return await asyncio.shield(self._next)

    def stop(self) -> None:
        """Nothing is reloaded any more."""
        for task in self._tasks:
            task.cancel()

    def _done(self, task: asyncio.Task[ReloadAnswer]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told in the log, also where nobody waits for it any more

    async def _reload_in_turn(self) -> ReloadAnswer:
        async with self._turn:
            self._next = None  # who asks from here on may have changed what is read already
            self._manager.reloading()
            try:
                answer = await self._reload()
            except Exception as error:
                is_expected = isinstance(error, ConfigError | BackendError | OSError)
                log.error("nothing was reloaded", reason=str(error) or repr(error), exc_info=not is_expected)
                self._manager.ready(f"serving clients; the last reload failed: {error}")
                raise
            self._manager.ready("serving clients")
            log.info("reloaded", changed=answer.changed, needs_restart=answer.needs_restart)
            return answer

    async def reload_when_asked(self, asked: asyncio.Event) -> None:
        """Each time that ``asked`` is set. Runs until cancelled; what goes wrong is in the log."""
        while True:
            await asked.wait()
            asked.clear()
            try:
                await self.reload()
            except Exception:  # a mistake of ours must not make the daemon deaf to the next signal
                log.debug("a reload failed; the line before says why")

    async def _reload(self) -> ReloadAnswer:
        config, commits = await self._prepared()
        for commit in commits:
            commit()
        set_log_level(config.log_level)
        before, self._config = self._config, config
        changed = [field.name for field in fields(config) if getattr(config, field.name) != getattr(before, field.name)]
        taken = {*RELOADED, *(name for part in self._parts for name in part.settings)}
        return ReloadAnswer(
            changed=[name for name in changed if name in taken],
            needs_restart=[name for name in changed if name not in taken],
        )

    async def _prepared(self) -> tuple[DaemonConfig, list[Commit]]:
        """What is to be taken, the capacity excepted, which is another one already. Raises ReloadHangs."""
        if self._hanging is not None and not self._hanging.done():
            raise ReloadHangs("an earlier reload still hangs in the storage, or in a file: see to that first")
        attempt, work = Attempt(), Workers("hicached-reload", threads=1, queue_max=1)
        try:
            self._hanging = work.submit(partial(self._prepare, attempt)).future
            prepared = asyncio.wrap_future(self._hanging)
            await asyncio.wait([prepared], timeout=RELOAD_S_MAX)
            if prepared.done() or not attempt.abandon():
                return await prepared
        except asyncio.CancelledError:
            attempt.abandon()
            raise
        finally:
            work.close(timeout_s=0)
        prepared.add_done_callback(_tell_late)
        raise ReloadHangs(
            f"not done within {RELOAD_S_MAX:g} s, so all settings are as before: see to the storage, and to the files "
            "of the settings; where objects were evicted for a smaller capacity, reload again to go on"
        )

    def _prepare(self, attempt: Attempt) -> tuple[DaemonConfig, list[Commit]]:
        config = self._reread()
        commits = [part.prepare(config) for part in self._parts]
        if config.backend == "mooncake":  # it has the capacity of its nodes
            attempt.settle()
        else:
            self._store.resize(config.capacity_bytes, attempt)
        return config, commits


def _tell_late(prepared: asyncio.Future[tuple[DaemonConfig, list[Commit]]]) -> None:
    """What a reload that was given up came to."""
    if not prepared.cancelled():
        log.warning("a reload that was given up has ended", reason=str(prepared.exception()))
