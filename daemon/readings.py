"""The numbers that /metrics reads at each scrape rather than counts: sessions, memory, queues, the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from hicache.backends.base import Usage
from hicache.backends.store_stats import StoreStats
from hicache.daemon.metrics import Reading
from hicache.daemon.sessions import Sessions
from hicache.daemon.storage import Storage, Store
from hicache.errors import BackendError
from hicache.workers import QueueFull

SNAPSHOT_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class StoreNumbers:
    """What a store says about itself at one moment."""

    usage: Usage
    stats: StoreStats

    @classmethod
    def of(cls, store: Store) -> StoreNumbers:
        """Asks the store; blocking."""
        return cls(store.usage(), store.stats())


class StoreSnapshot:
    """What the store last said about itself: asked before each scrape, in a control thread, never in the event loop."""

    def __init__(self, storage: Storage, numbers: StoreNumbers) -> None:
        self._storage = storage
        self._numbers = numbers

    @property
    def usage(self) -> Usage:
        """Space."""
        return self._numbers.usage

    @property
    def stats(self) -> StoreStats:
        """Counters."""
        return self._numbers.stats

    async def refresh(self) -> None:
        """Asks again. A store that does not answer soon goes on showing its last numbers."""
        store = self._storage.store
        with contextlib.suppress(TimeoutError, QueueFull, BackendError):
            self._numbers = await self._storage.ask(lambda: StoreNumbers.of(store), timeout_s=SNAPSHOT_TIMEOUT_S)


def session_readings(sessions: Sessions) -> Iterator[Reading]:
    """What clients hold."""
    yield Reading("hicache_sessions", "Open sessions.", lambda: len(sessions))
    yield Reading("hicache_sessions_opened", "Sessions opened.", lambda: sessions.opened_count, is_counter=True)
    yield Reading(
        "hicache_inflight_bytes", "Payload that is being moved now.", lambda: sessions.budgets.total.used_bytes
    )
    yield Reading("hicache_regions", "Memory regions of clients that are mapped.", lambda: len(sessions.mapped))
    yield Reading(
        "hicache_region_bytes",
        "Bytes of clients' memory that is mapped.",
        lambda: sum(region.size_bytes for region in sessions.mapped),
    )


def thread_readings(storage: Storage) -> Iterator[Reading]:
    """How busy the storage threads are."""
    yield Reading("hicache_storage_queued_chunks", "Chunks waiting for a thread.", lambda: storage.bulk.queued_count)
    yield Reading("hicache_storage_busy_threads", "Threads at work.", lambda: len(storage.bulk.busy_for_s()))
    yield Reading(
        "hicache_storage_oldest_chunk_seconds",
        "How long the longest running chunk has been running.",
        lambda: max(storage.bulk.busy_for_s(), default=0.0),
    )


def store_readings(snapshot: StoreSnapshot) -> Iterator[Reading]:
    """Space, and what became of objects."""
    yield Reading("hicache_store_capacity_bytes", "Capacity.", lambda: snapshot.usage.capacity_bytes)
    yield Reading("hicache_store_used_bytes", "Space used, with overhead.", lambda: snapshot.usage.stored_bytes)
    yield Reading("hicache_store_payload_bytes", "Payload stored.", lambda: snapshot.usage.payload_bytes)
    yield Reading("hicache_store_objects", "Objects stored.", lambda: snapshot.usage.objects)
    yield Reading("hicache_store_leases", "Leases that have not ended.", lambda: snapshot.stats.holds.leases)
    yield Reading("hicache_store_leased_objects", "Objects under a lease.", lambda: snapshot.stats.holds.leased_keys)
    counters: tuple[tuple[str, str, Callable[[StoreStats], int]], ...] = (
        ("hicache_store_read_bytes", "Payload read and verified.", lambda stats: stats.bytes_read),
        ("hicache_store_written_bytes", "Payload written.", lambda stats: stats.bytes_written),
        ("hicache_store_evicted_objects", "Objects evicted.", lambda stats: stats.evictions),
        ("hicache_store_evicted_bytes", "Space freed by eviction.", lambda stats: stats.evicted_bytes),
        (
            "hicache_store_eviction_failures",
            "Objects that could not be evicted.",
            lambda stats: stats.eviction_failures,
        ),
        ("hicache_store_corrupt_objects", "Corrupt objects met and dropped.", lambda stats: stats.corrupt_dropped),
    )
    for name, description, read in counters:
        yield Reading(name, description, partial(_read_counter, snapshot, read), is_counter=True)


def _read_counter(snapshot: StoreSnapshot, read: Callable[[StoreStats], int]) -> int:
    return read(snapshot.stats)
