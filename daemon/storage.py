"""The object store behind an event loop: blocking calls in threads, bounded queues, deadlines for those who wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from hicache.backends.attempt import Attempt
from hicache.backends.base import GetItem, Number, PutItem, Usage, WalkedObject
from hicache.backends.events import Subscription
from hicache.backends.store_stats import StoreStats, TenantStats
from hicache.backends.tenant_limits import StoreLimits
from hicache.backends.tenant_usage import TenantUsage
from hicache.outcome import Outcome
from hicache.workers import Job, Workers

T = TypeVar("T")

CONTROL_THREADS = 2
QUEUE_MAX = 8192  # jobs of at most a chunk each; sessions_max times the chunks that one session may queue is far less
STUCK_S = 30.0  # a storage thread that works on one chunk for so long counts as stuck
PROBE_TIMEOUT_S = 0.5
PROBES_MAX = 1024  # that wait for a store which does not answer
NO_ANSWER = "the storage does not answer"


class Store(Protocol):
    """What the daemon calls of an object store (hicache.backends.store.ObjectStore). Thread-safe and blocking."""

    @property
    def store_id(self) -> bytes:
        """Another one after the content was lost."""
        ...

    is_indexed: bool  # whether it knows what it has: only then are there pins, watches, and limits of tenants

    def lookup(self, keys: Sequence[bytes], *, lease_s: float = 0.0) -> tuple[list[Outcome], int]:
        """An outcome for each key, and the id of a lease on those that are OK (0: none was asked for)."""
        ...

    def renew(self, lease_id: int, *, lease_s: float) -> bool:
        """Extends a lease; False when it is gone."""
        ...

    def release(self, lease_id: int) -> bool:
        """Ends a lease; False when it is gone."""
        ...

    def pin(self, keys: Sequence[bytes], *, pin_s: float) -> list[Outcome]:
        """Keeps objects for a time; OK, ABSENT or REFUSED for each."""
        ...

    def unpin(self, keys: Sequence[bytes]) -> list[Outcome]:
        """Ends pins."""
        ...

    def watch(self, tenant: bytes, *, wake: Callable[[], None]) -> Subscription:
        """Subscribes to what comes and goes of a tenant."""
        ...

    def unwatch(self, subscription: Subscription) -> None:
        """Ends a subscription."""
        ...

    def snapshot(self, tenant: bytes) -> Iterator[list[bytes]]:
        """The physical keys of a tenant, part by part."""
        ...

    def sweep(self) -> int:
        """Removes some of what has to go without a put that needs the room; 0: there is nothing of it."""
        ...

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Reads each object into its target and verifies it there."""
        ...

    def verify(self, items: Sequence[GetItem]) -> list[Outcome]:
        """As ``get_into``, without counting as use."""
        ...

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """All objects behind a key, or those of a tenant, with their namespaces, in an order that stays."""
        ...

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """Stores each object, evicting others where there is no room."""
        ...

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """Drops objects."""
        ...

    def forget_tenant(self, tenant: bytes) -> bool:
        """Drops the key of a tenant; False without one. Raises OSError."""
        ...

    def resize(self, capacity_bytes: int, attempt: Attempt) -> None:
        """Another capacity, which settles ``attempt``; raises ConfigError or BackendError and keeps the old one where
        it cannot be, or where the attempt was abandoned.
        """
        ...

    def numbers(self) -> Iterator[Number]:
        """What its backend tells about itself beside what every backend does."""
        ...

    def problem(self) -> str:
        """What is wrong with the medium as a whole; empty: nothing."""
        ...

    def stored_bytes(self, size_bytes: int) -> int:
        """What an object of so many bytes takes of the capacity."""
        ...

    def set_limits(self, limits: StoreLimits) -> None:
        """Other limits of tenants."""
        ...

    def usage(self) -> Usage:
        """Space as it is on the medium."""
        ...

    def tenant_usage(self, tenant: bytes) -> TenantUsage:
        """What is under one tenant digest."""
        ...

    def tenant_stats(self, tenants: Sequence[bytes]) -> list[TenantStats]:
        """What each of these has, and has lost."""
        ...

    def stats(self) -> StoreStats:
        """Counters since the store was opened."""
        ...

    def close(self) -> None:
        """Lets go of the medium."""
        ...


class Storage:
    """Owns the threads that call the store: lookups never queue behind bulk transfers, nor probes behind lookups."""

    def __init__(
        self, store: Store, *, io_threads: int, stuck_s: float = STUCK_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store = store
        self._stuck_s = stuck_s
        self.bulk = Workers("hicached-io", threads=io_threads, queue_max=QUEUE_MAX, clock=clock)
        self.control = Workers("hicached-control", threads=CONTROL_THREADS, queue_max=QUEUE_MAX, clock=clock)
        self._probing = Workers("hicached-probe", threads=1, queue_max=PROBES_MAX, clock=clock)

    async def ask(self, work: Callable[[], T], *, timeout_s: float, too_late: Callable[[T], None] | None = None) -> T:
        """Runs a short call of the store in a control thread and returns what it returns.

        Raises TimeoutError after ``timeout_s``, QueueFull, or what ``work`` raises. Work that no thread has started by
        then never runs; where it was running, ``too_late`` gets its result in the thread, to undo it.
        """
        return await _ask(self.control, work, timeout_s=timeout_s, too_late=too_late)

    async def ask_bulk(self, work: Callable[[], T], *, timeout_s: float) -> T:
        """As ``ask``, in a thread for transfers: for work that takes long, such as a chunk of deletes."""
        return await _ask(self.bulk, work, timeout_s=timeout_s, too_late=None)

    @property
    def is_stuck(self) -> bool:
        """Whether all threads of a kind have been at one piece of work for too long."""
        return any(
            sum(busy_s > self._stuck_s for busy_s in workers.busy_for_s()) == workers.thread_count
            for workers in (self.bulk, self.control)
        )

    async def problem(self) -> str:
        """Why what is stored now will not be there later, or cannot be stored at all; empty: nothing is known.

        NO_ANSWER where the store does not answer a simple question within PROBE_TIMEOUT_S.
        """
        try:
            return await _ask(self._probing, self._probe, timeout_s=PROBE_TIMEOUT_S, too_late=None)
        except Exception:
            return NO_ANSWER

    def _probe(self) -> str:
        self.store.usage()
        return self.store.problem()

    def close(self, *, timeout_s: float) -> bool:
        """Blocking. Waits for the threads, then closes the store; False, and nothing closed, when one is stuck.

        A store that is still in use cannot be closed: the caller ends the process, which backends survive.
        """
        started = time.monotonic()
        ended = [
            workers.close(timeout_s=max(0.0, started + timeout_s - time.monotonic()))
            for workers in (self._probing, self.control, self.bulk)
        ]
        if not all(ended):
            return False
        self.store.close()
        return True


async def _ask(workers: Workers, work: Callable[[], T], *, timeout_s: float, too_late: Callable[[T], None] | None) -> T:
    job = workers.submit(work)
    try:
        async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 loses a cancellation that meets the result
            return await asyncio.shield(asyncio.wrap_future(job.future))
    except (TimeoutError, asyncio.CancelledError):
        if not workers.withdraw(job) and too_late is not None:
            _when_late(job, too_late)
        raise


def _when_late(job: Job[T], too_late: Callable[[T], None]) -> None:
    def undo(_: object) -> None:
        if not job.future.cancelled() and job.future.exception() is None:
            too_late(job.future.result())

    job.future.add_done_callback(undo)
