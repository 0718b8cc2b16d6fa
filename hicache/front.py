"""What the caches that an engine imports have in common: keys, a replica behind a lock, and an end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from hicache.ceiling import Ceiling, CeilingReading
from hicache.costs.measured import MeasuredCosts, tell_prefill
from hicache.errors import UsageError
from hicache.index import Index
from hicache.job_times import JobNumbers
from hicache.keys import BlockKeys, FieldValue
from hicache.l3 import L3, TierFills, tell_fills
from hicache.misses import MissLog, misses_of
from hicache.node import Tier
from hicache.policies import policy_of
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy, check_mode
from hicache.pools import L1Pool, L2Pool
from hicache.prefetch_record import Prefetch
from hicache.pump import Decides
from hicache.ranks.messages import Hello
from hicache.ranks.settings import Ranks
from hicache.replica import Replica
from hicache.spec import CacheSpec
from hicache.stats import DirectoryStats
from hicache.tracing import tracer


class MeasuredDirectory(Decides, Protocol):
    """A directory that learns what loads and prefills take."""

    costs: MeasuredCosts
    stats: DirectoryStats
    index: Index


@dataclass(frozen=True, slots=True)
class EngineReading:
    """A cache at one moment: see DirectoryStats and JobNumbers for what is conserved."""

    stats: DirectoryStats
    jobs: JobNumbers
    slots: Mapping[tuple[str, str], int]  # by tier and group
    used_slots: Mapping[tuple[str, str], int]
    window: CeilingReading  # in pages


class Waits(Protocol):
    """What a directory knows of a request that may wait for L3."""

    prefetch: Prefetch | None


R_co = TypeVar("R_co", bound=Waits, covariant=True)


class Owned(Protocol[R_co]):
    """A request of one cache."""

    prefetch_deadline_s: float  # as its mode says, by the cache's clock

    @property
    def _cache(self) -> object: ...

    @property
    def _record(self) -> R_co: ...


TELL_S = 1.0  # between two looks for what the log should say

_log = logging.getLogger("hicache.misses")

D = TypeVar("D", bound=MeasuredDirectory)


class CacheFront(Generic[D]):
    """Made when every rank is there; thread-safe from then on, by the lock ``_changed``."""

    def __init__(
        self,
        spec: CacheSpec,
        keys: BlockKeys,
        directory: Callable[[Hello, PrefetchPolicy], D],
        *,
        l1: L1Pool | None,
        l2: L2Pool | None,
        l3: L3 | None,
        ranks: Ranks | None,
        copies: str,
        salt: bytes | None,
        prefetch: PrefetchPolicy | None,
        clock: Callable[[], float],
    ) -> None:
        """``directory`` is made of what all ranks have in common. Raises ConfigError; the ranks are given up then."""
        self.spec = spec
        self.l3 = l3
        self._salt = salt
        self._clock = clock
        self._prefetch_policy = policy_of("prefetch", prefetch, PrefetchPolicy)
        self._keys = keys
        self._closed = False
        self._tracer = tracer()
        self._replica = Replica(spec, l1=l1, l2=l2, l3=l3, ranks=ranks, copies=copies)
        try:
            self._directory = directory(self._replica.common, self._prefetch_policy)
        except BaseException:
            self._replica.give_up()
            raise
        self._window = Ceiling(clock=clock)
        self._misses = MissLog(clock=clock)
        self._tell_at_s = -math.inf
        self._directory.stats.on_served = self._window.note
        self._pump = self._replica.start(self._directory, clock=clock)
        self._changed = self._pump.changed
        tell_fills(l3, self._fills)

    def tell_prefill(self, start: int, end: int, *, seconds: float) -> None:
        """The tokens ``[start, end)`` of a prompt, with all before them restored or computed, took so long to compute.

        Tell it once for each request, or each chunk that was computed alone: the read policy compares loads with it.
        Without it everything that is found is loaded. Raises UsageError unless ``0 <= start < end``.
        """
        self.tell_step([(start, end)], seconds=seconds)

    def tell_step(self, parts: Sequence[tuple[int, int]], *, seconds: float) -> None:
        """One step computed these ``[start, end)`` of as many prompts: ``tell_prefill`` for those who batch them.
        Steps that mostly decode say little of prefills: leave them out. Raises UsageError likewise, and for no parts.
        """
        with self._changed:
            tell_prefill(self._directory.costs, parts, seconds)

    def is_ready(self, request: Owned[Waits]) -> bool:
        """Whether the request waits no longer for what L3 is bringing: all is there, or its mode does not let it, or
        computing would have been over by now."""
        with self._changed:
            return self._is_settled(request) or self._closed or self._clock() >= self._deadline_s(request)

    def _let_wait(self, request: Owned[Waits], mode: PrefetchMode, *, tokens: int) -> float:
        """From now on it waits as its mode says, for up to ``tokens``. Returns how long what comes is of use to it."""
        policy = self._prefetch_policy
        request.prefetch_deadline_s = self._clock() + policy.patience_s(mode, tokens=tokens)
        return policy.horizon_s(mode, tokens=tokens)

    def _mode(self, mode: PrefetchMode | None) -> PrefetchMode:
        """What a request asks for, or what holds for all. Raises ConfigError for none of the three."""
        if mode is not None:
            check_mode(mode)
        return mode or self._prefetch_policy.mode

    def _is_settled(self, request: Owned[Waits]) -> bool:
        prefetch = self._record_of(request).prefetch
        return prefetch is None or prefetch.settled

    def _deadline_s(self, request: Owned[Waits]) -> float:
        prefetch = self._record_of(request).prefetch
        return min(request.prefetch_deadline_s, math.inf if prefetch is None else prefetch.give_up_at_s)

    def _record_of(self, request: Owned[R_co]) -> R_co:
        """Raises UsageError for a request of another cache: its slots mean something else here."""
        if request._cache is not self:
            name = type(self).__name__
            raise UsageError(f"the request belongs to another {name}: give it to the one that it was opened with")
        return request._record

    @property
    def stats(self) -> DirectoryStats:
        """Counters since start; see DirectoryStats for what is conserved."""
        return self._directory.stats

    def read(self) -> EngineReading:
        """Everything that is counted, at one moment."""
        with self._changed:
            index = self._directory.index
            pools = {
                (tier.name.lower(), group.name): pool
                for tier in Tier
                for group, pool in zip(self.spec.groups, index.pools[tier], strict=True)
            }
            return EngineReading(
                self._directory.stats.copy(),
                self._pump.times.read(),
                {name: pool.capacity for name, pool in pools.items()},
                {name: pool.used_count for name, pool in pools.items()},
                self._window.read(),
            )

    def _fills(self) -> TierFills:
        """How full L1 and L2 of this rank are; none of a tier that the cache does not hand out itself."""
        object_bytes = [sum(shard.size_bytes for shard in shards) for shards in self.spec.rank(0).shards]
        fills = {}
        with self._changed:
            for tier, arena_bytes in ((Tier.L1, self._replica.common.l1_bytes), (Tier.L2, 0)):
                pools = self._directory.index.pools[tier]
                used = sum(pool.used_count * size for pool, size in zip(pools, object_bytes, strict=True))
                room = sum(pool.capacity * size for pool, size in zip(pools, object_bytes, strict=True))
                if room:
                    fills[tier.name.lower()] = (used, arena_bytes or room)
        return fills

    def _tell_misses(self, *, is_last: bool = False) -> None:
        """Say in the log what is new. Not under the lock: whoever writes to a log may have to wait."""
        now_s = self._clock()
        if now_s < self._tell_at_s and not is_last:
            return
        with self._changed:
            self._tell_at_s = now_s + TELL_S
            news = self._misses.news(misses_of(self._directory.stats))
        for miss in news:
            level = logging.WARNING if miss.meaning.is_fault else logging.INFO
            fields = {"kind": miss.kind, "reason": miss.reason, "count": miss.count, "unit": miss.unit}
            _log.log(
                level,
                "miss: %d %s, %s %s: %s",
                miss.count,
                miss.unit,
                miss.kind,
                miss.reason,
                miss.meaning.text,
                extra={"hicache": fields},
            )

    def close(self) -> None:
        """Give up what is under way, disconnect, and free L2. Idempotent. No tensor of ``l2`` may be used after."""
        with self._changed:
            if self._closed:
                return
            self._closed = self._pump.is_closed = True
            self._changed.notify_all()
        self._replica.close()
        self._tell_misses(is_last=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _root(self, salt: bytes | None, extras: Mapping[str, FieldValue] | None) -> bytes:
        """The parent of a sequence's first page. Raises UsageError for a salt that is none or separates nobody."""
        if not isinstance(salt, bytes | None):
            raise UsageError(f"salt is a {type(salt).__name__}: expected bytes, or None for the cache's own")
        if salt not in (None, self._salt) and self._keys.key_hash != "blake2b":
            raise UsageError(
                f"a request has a salt of its own, but key_hash {self._keys.key_hash!r} is for one trusted tenant: "
                "expected key_hash 'blake2b', or the cache's own salt"
            )
        return self._keys.root(salt=self._salt if salt is None else salt, extras=extras)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the cache has been closed")
