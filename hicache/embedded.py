"""L3 in this very process: a backend opened by the engine itself, for one engine with no daemon."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hicache.backends.base import UNKNOWN_TAG, GetItem, PutItem
from hicache.errors import BackendError
from hicache.l3 import Done, L3Item
from hicache.lease_book import LeaseBook
from hicache.notices import Notices
from hicache.outcome import Outcome
from hicache.shared_memory import SharedMemory
from hicache.tenancy import DEFAULT_TENANT, physical_key, tenant_digest
from hicache.workers import Job, QueueFull, Workers

if TYPE_CHECKING:
    from hicache.backends.store import ObjectStore

OBJECT_BYTES_MAX = 64 * 1024 * 1024

_log = logging.getLogger(__name__)


class Store(Protocol):
    """What EmbeddedL3 asks of an ObjectStore."""

    def lookup(self, keys: Sequence[bytes], *, lease_s: float = 0.0) -> tuple[list[Outcome], int]: ...

    def release(self, lease_id: int) -> bool: ...

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]: ...

    def put(self, items: Sequence[PutItem]) -> list[Outcome]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    """Bounds of an embedded L3."""

    lease_s: float = 5.0  # how long a looked-up object is protected from eviction
    io_threads: int = 4  # gets and puts that run at the same time
    calls_max: int = 64  # calls that run or wait; one more is UNAVAILABLE
    close_timeout_s: float = 5.0  # how long `close` waits for what runs


class EmbeddedL3:
    """An ``L3`` on an ObjectStore, which it owns. Thread-safe.

    The medium works in threads of this object: a caller gets its own thread back at the deadline, whatever the medium
    does, and ``done`` when the thread that moves its bytes has ended. Calls above ``calls_max`` are UNAVAILABLE, and so
    are all calls of a forked child, which has none of these threads: the store stays its parent's.
    """

    def __init__(
        self,
        store: ObjectStore | Store,
        *,
        memory: SharedMemory,
        tenant: str = DEFAULT_TENANT,
        namespace_tag: int = UNKNOWN_TAG,
        settings: EmbeddedSettings | None = None,
    ) -> None:
        self._store = store
        self._memory = memory
        self._tenant = tenant_digest(tenant)
        self._namespace_tag = namespace_tag
        self._settings = settings or EmbeddedSettings()
        self._notices = Notices(_log)
        self._leases = LeaseBook(clock=time.monotonic)
        self._lock = threading.Lock()
        self._calls = 0
        self._is_closed = False
        self._pid = os.getpid()
        queue_max = self._settings.calls_max
        self._lookups = Workers("hicache-l3-lookup", threads=1, queue_max=queue_max)
        self._transfers = Workers("hicache-l3-io", threads=self._settings.io_threads, queue_max=queue_max)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        capacity_bytes: int,
        memory: SharedMemory,
        tenant: str = DEFAULT_TENANT,
        object_bytes_max: int = OBJECT_BYTES_MAX,
        namespace_tag: int = UNKNOWN_TAG,
        settings: EmbeddedSettings | None = None,
    ) -> EmbeddedL3:
        """Open ``lmdb:///path`` or ``file:///path`` for this process alone, or join ``mooncake://host:port``.

        Raises ConfigError for a URL that no backend takes, StorageInUse where another process holds the directory, and
        BackendError where it cannot be opened.
        """
        from hicache.backends.open import open_store  # backends load what they store into

        store = open_store(url, capacity_bytes=capacity_bytes, object_bytes_max=object_bytes_max)
        return cls(store, memory=memory, tenant=tenant, namespace_tag=namespace_tag, settings=settings)

    @property
    def calls_running(self) -> int:
        """Calls that run or wait for a thread."""
        with self._lock:
            return self._calls

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        """See ``L3.lookup``."""
        names = [physical_key(self._tenant, key) for key in keys]
        refusal = self._begin()
        if refusal is not None:
            return [refusal] * len(names)
        work = self._submit(
            self._lookups,
            lambda: self._guarded("lookup", len(names), lambda: self._look_up(names)),
        )
        try:
            return work.future.result(max(0.0, timeout_s))
        except TimeoutError:
            self._lookups.withdraw(work)
            return [Outcome.DEADLINE] * len(names)
        except CancelledError:
            return [Outcome.CANCELLED] * len(names)

    def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """See ``L3.get``."""
        self._transfer("get", items, self._get, timeout_s=timeout_s, done=done)

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """See ``L3.put``."""
        self._transfer("put", items, self._put, timeout_s=timeout_s, done=done)

    def close(self) -> None:
        """Cancel what waits, wait for what runs, and close the store. Idempotent, and nothing in a forked child.

        When the medium does not come back within ``close_timeout_s`` the store stays open, since closing it under a
        running call would be worse; ``done`` is then called when the medium does come back.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        deadline_s = time.monotonic() + self._settings.close_timeout_s
        for workers in (self._lookups, self._transfers):
            workers.close(timeout_s=0)  # nothing that waits is started while the others are waited for
        if all(workers.close(timeout_s=deadline_s - time.monotonic()) for workers in (self._lookups, self._transfers)):
            self._store.close()
        else:
            self._notices.warning("close", "the embedded L3 still works and was left open")

    def _transfer(
        self,
        operation: str,
        items: Sequence[L3Item],
        move: Callable[[Sequence[L3Item]], list[Outcome]],
        *,
        timeout_s: float,
        done: Done,
    ) -> None:
        """``done`` is called by the thread that ran the transfer, or by whoever cancelled it before it ran."""
        outcomes = [None if self._fits(item) else Outcome.BAD_RANGE for item in items]
        fitting = [item for item, outcome in zip(items, outcomes, strict=True) if outcome is None]

        def finish(moved: list[Outcome]) -> None:
            results = iter(moved)
            self._tell(operation, done, [next(results) if known is None else known for known in outcomes])

        refusal = self._begin()
        if refusal is not None:
            finish([refusal] * len(fitting))
            return
        ended = threading.Event()
        work = self._submit(
            self._transfers, lambda: self._guarded(operation, len(fitting), lambda: move(fitting) if fitting else [])
        )

        def settle(work: Future[list[Outcome]]) -> None:
            gave_up = Outcome.CANCELLED if self._is_closed else Outcome.DEADLINE
            finish([gave_up] * len(fitting) if work.cancelled() else work.result())
            ended.set()

        work.future.add_done_callback(settle)
        if not ended.wait(max(0.0, timeout_s)):
            self._transfers.withdraw(work)  # does nothing once it runs

    def _look_up(self, names: Sequence[bytes]) -> list[Outcome]:
        lease_s = self._settings.lease_s
        outcomes, lease_id = self._store.lookup(names, lease_s=lease_s)
        if lease_id:
            present = (name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.OK)
            self._leases.note(lease_id, present, lease_s=lease_s)
        return outcomes

    def _get(self, items: Sequence[L3Item]) -> list[Outcome]:
        names = [physical_key(self._tenant, item.key) for item in items]
        with ExitStack() as views:
            targets = [views.enter_context(self._slice(item)) for item in items]
            outcomes = self._store.get_into(list(map(GetItem, names, targets)))
        for lease_id in self._leases.settle(names):
            self._store.release(lease_id)
        return outcomes

    def _put(self, items: Sequence[L3Item]) -> list[Outcome]:
        with ExitStack() as views:
            payloads = [views.enter_context(self._slice(item)) for item in items]
            return self._store.put(
                [
                    PutItem(physical_key(self._tenant, item.key), payload, self._namespace_tag)
                    for item, payload in zip(items, payloads, strict=True)
                ]
            )

    def _slice(self, item: L3Item) -> memoryview:
        return self._memory.buffer[item.offset : item.offset + item.size_bytes]

    def _fits(self, item: L3Item) -> bool:
        return item.offset >= 0 and item.size_bytes > 0 and item.offset + item.size_bytes <= self._memory.size_bytes

    def _begin(self) -> Outcome | None:
        """Count a call in, or say why not."""
        if os.getpid() != self._pid:
            return Outcome.UNAVAILABLE
        with self._lock:
            if self._is_closed:
                return Outcome.CANCELLED
            if self._calls >= self._settings.calls_max:
                return Outcome.UNAVAILABLE
            self._calls += 1
            return None

    def _submit(self, workers: Workers, work: Callable[[], list[Outcome]]) -> Job[list[Outcome]]:
        try:
            job = workers.submit(work)
        except QueueFull:  # closed between the check and here: there is room for calls_max
            job = Job(work, Future())
            job.future.cancel()
        job.future.add_done_callback(self._count_out)
        return job

    def _count_out(self, work: Future[list[Outcome]]) -> None:
        with self._lock:
            self._calls -= 1

    def _guarded(self, operation: str, count: int, work: Callable[[], list[Outcome]]) -> list[Outcome]:
        """The outcomes of ``work``; never an exception: a broken backend is a miss with a reason."""
        try:
            outcomes = work()
        except BackendError as error:
            self._notices.error("backend", "the embedded L3 is broken: %s", error)
            return [Outcome.UNAVAILABLE] * count
        except Exception as error:
            self._notices.error(operation, "%s in the embedded L3 failed: %r", operation, error)
            return [Outcome.IO_ERROR] * count
        return outcomes if len(outcomes) == count else [Outcome.IO_ERROR] * count

    def _tell(self, operation: str, done: Done, outcomes: list[Outcome]) -> None:
        try:
            done(outcomes)
        except Exception:  # the caller's own mistake, in a thread that others need
            _log.exception("the done of an L3 %s raised", operation)
