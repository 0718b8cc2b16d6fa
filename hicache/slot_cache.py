"""SlotCache: L2 and L3 for an engine that hands out its L1 slots itself, such as vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, Unpack

from hicache.directory_config import DirectoryConfig
from hicache.front import CacheFront
from hicache.keys import BlockKeys, FieldValue, chained_key
from hicache.l3 import L3
from hicache.page_changes import PageChange
from hicache.policies.choice import policies_of
from hicache.policies.eviction import EvictionFactory
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy
from hicache.policies.read import READ_POLICY_DEFAULT, ReadFactory
from hicache.policies.write import WritePolicy
from hicache.pools import L1Pool, L2Pool
from hicache.ranks.messages import Hello
from hicache.ranks.settings import Ranks
from hicache.settings import SlotSettings
from hicache.slot_directory import SlotDirectory, Step
from hicache.slot_request import EngineSlot, SlotLoad, SlotRecord, SlotSave, SlotsByPage
from hicache.spec import CacheSpec
from hicache.stats import DirectoryStats
from hicache.tracing import traced


class SlotRequest:
    """One sequence, from ``SlotCache.open`` to ``SlotCache.release``. Used by one thread at a time."""

    def __init__(self, cache: SlotCache, root: bytes, record: SlotRecord) -> None:
        self._cache = cache
        self._root = root
        self._record = record
        self.prefetch_deadline_s = 0.0  # by the cache's clock

    @property
    def keys(self) -> Sequence[bytes]:
        """What its full pages are called in L2 and L3, by page."""
        return self._record.keys


class SlotCache(CacheFront[SlotDirectory]):
    """The engine names pages by its own chained hashes, and slots by their index in its own pools, which every rank has
    adopted (``L1Pool.adopt``). hicache says which prefix L2 and L3 can restore, copies it into slots that the engine
    names, and copies pages and states out of them. Thread-safe. No call but
    ``settle`` and ``flush`` waits for a copy, for L3 or for room.

    No fault of L2, L3 or a copy raises here. UsageError means that the engine's own call was refused.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        l1: L1Pool | None,
        l2: L2Pool | None,
        l3: L3 | None,
        salt: bytes | None = None,
        prefetch: PrefetchPolicy | None = None,
        write_policy: str | WritePolicy = "write_through",
        eviction: str | EvictionFactory = "lru",
        read_policy: str | ReadFactory = READ_POLICY_DEFAULT,
        one_numbering: bool = False,
        tells_changes: bool = False,
        ranks: Ranks | None = None,
        copies: str = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """As ``HiCache``: ``l1`` is the adopted pool of rank 0, or None for all three: see ``lead``. Settings: see
        SlotSettings.

        A rank that is here takes no steps of a RankWorker. The engine computes in the thread and stream in which it
        calls ``step``, ``load`` and ``save``: a step when none of the slots that it reuses are in ``busy_slots``, and
        before it saves what that has computed.
        """
        eviction_policy, policy = policies_of(eviction, write_policy)

        def directory(common: Hello, prefetch: PrefetchPolicy) -> SlotDirectory:
            config = DirectoryConfig(
                common.l1_slots,
                common.l2_slots,
                has_l3=common.has_l3,
                ranks=spec.rank_count,
                prefetch_threshold_tokens=prefetch.threshold_tokens,
            )
            return SlotDirectory(
                spec,
                config,
                write_policy=policy,
                read_policy=read_policy,
                eviction=eviction_policy,
                one_numbering=one_numbering,
                tells_changes=tells_changes,
            )

        super().__init__(
            spec,
            BlockKeys(spec.namespace, page_tokens=spec.page_tokens),  # chained_key is BLAKE2b, whatever the spec's hash
            directory,
            l1=l1,
            l2=l2,
            l3=l3,
            ranks=ranks,
            copies=copies,
            salt=salt,
            prefetch=prefetch,
            clock=clock,
        )

    @classmethod
    def lead(
        cls, spec: CacheSpec, *, ranks: Ranks, salt: bytes | None = None, **settings: Unpack[SlotSettings]
    ) -> Self:
        """The leader in a process without a rank, such as an engine's scheduler: every rank is a RankWorker.

        Waits for all ranks at ``ranks``. Raises ConfigError.
        """
        return cls(spec, l1=None, l2=None, l3=None, salt=salt, ranks=ranks, **settings)

    # -- a request ---------------------------------------------------------------------------------------------------

    @traced("hicache.open")
    def open(
        self,
        page_hashes: Sequence[bytes],
        *,
        token_count: int,
        salt: bytes | None = None,
        extras: Mapping[str, FieldValue] | None = None,
    ) -> SlotRequest:
        """A sequence of ``token_count`` tokens, by the engine's hash of each full page, which stands for all tokens up
        to its end. ``salt`` replaces the cache's own; ``extras``: further parts of its identity."""
        root = self._root(salt, extras)
        keys = [chained_key(root, page_hash) for page_hash in page_hashes]
        with self._changed:
            self._begin()
            record = self._directory.open(keys, token_count=token_count)
            self._pump.pump()
        return SlotRequest(self, root, record)

    @traced("hicache.prefetch")
    def prefetch(self, request: SlotRequest, *, beyond: int = 0, mode: PrefetchMode | None = None) -> None:
        """Begin to bring from L3 to L2 what makes the usable prefix longer than the ``beyond`` tokens that the engine
        has itself. Returns at once; does nothing the second time, unless a load, save or append has been in between."""
        chosen = self._mode(mode)
        with self._changed:
            self._begin()
            record = self._record_of(request)
            if record.prefetch is None or record.prefetch.concluded:
                tokens = self._directory.gainable_tokens(record, own_tokens=beyond)
                patience_s = self._let_wait(request, chosen, tokens=tokens)
                self._directory.prefetch(record, own_tokens=beyond, patience_s=patience_s)
                self._pump.pump()

    def usable(self, request: SlotRequest, *, beyond: int) -> int:
        """The longest prefix, in tokens, that ``load`` can restore now: whole pages, the last token left to compute,
        and all groups of it; ``beyond``, which the engine has itself, when it is not longer.

        ``beyond``: the attention of all these tokens, and the windows before its end. What is promised is kept in L2
        for the request until it is loaded, saved, appended to, released or asked for again, or for 30 s.
        """
        with self._changed:
            self._begin()
            tokens = self._directory.usable(self._record_of(request), own_tokens=beyond)
            self._pump.pump()
            return tokens

    def attention(self, request: SlotRequest) -> int:
        """Leading tokens, whole pages, whose attention the engine (see ``beyond``), L2 or L3 has, whether or not a
        state or window is there to go on from: where it ends, siblings diverge, and a state is worth its memory."""
        with self._changed:
            return self._directory.attention(self._record_of(request))

    @traced("hicache.load")
    def load(self, request: SlotRequest, *, beyond: int, tokens: int, slots: SlotsByPage) -> SlotLoad:
        """Begin to copy what a prefix of ``tokens`` tokens, which ``usable`` has told, needs beyond the engine's own
        into ``slots``: by group and page. Other slots that are named are left alone. A state's page is the last one
        before the boundary.

        The slots are hicache's until the load is ``done``; then it has ``failed``, or all is there. Copies run beside
        compute: the engine computes on these slots only in a step that it begins after that.
        """
        with self._changed:
            self._begin()
            self._replica.compute_here()
            load = self._directory.load(self._record_of(request), own_tokens=beyond, tokens=tokens, slots=slots)
            self._pump.pump()
            return load

    def append(self, request: SlotRequest, page_hashes: Sequence[bytes], *, token_count: int) -> None:
        """The sequence has ``token_count`` tokens now; ``page_hashes`` of the pages that are full by that."""
        keys = [chained_key(request._root, page_hash) for page_hash in page_hashes]
        with self._changed:
            self._begin()
            self._directory.append(self._record_of(request), keys, token_count=token_count)
            self._pump.pump()

    @traced("hicache.save")
    def save(self, request: SlotRequest, slots: SlotsByPage) -> SlotSave:
        """Begin to write down the pages and states in ``slots``, by group and page, as far as they are not below yet:
        what L2 or L3 has costs no copy. What finds no room in L2 is left out and counted.

        They are read after the last step that was numbered, and before any step that ``step`` is told to reuse them.
        """
        with self._changed:
            self._begin()
            self._replica.compute_here()
            save = self._directory.save(self._record_of(request), slots)
            self._pump.pump()
            return save

    def busy_slots(self, request: SlotRequest | None = None) -> set[EngineSlot]:
        """``(group, slot)`` of what copies for the request, or for any, read or write, or are about to write."""
        with self._changed:
            return self._directory.busy_slots(None if request is None else self._record_of(request))

    def step(self, reuses: Mapping[int, Iterable[int]] | None = None) -> Step:
        """Number the engine's next step, for ``RankWorker.step``: send it along with the step to every worker.

        On every rank, what was asked to be copied before this call sees what was computed before this step; what is
        asked after it, what the step has computed. ``reuses``: by group, the slots that the step writes to and that
        held something else before; it waits for copies that still read these. None: for all copies that read any slot.
        """
        with self._changed:
            self._begin()
            self._replica.compute_here()
            self._pump.pump()
            return self._directory.step(reuses)

    def release(self, request: SlotRequest) -> None:
        """The request is over, or given up at whatever point it was; copies under way end by themselves, and its loads
        and saves still tell when. Raises UsageError the second time."""
        with self._changed:
            self._directory.release(self._record_of(request))
            self._pump.pump()
        self._tell_misses()

    # -- the cache ---------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> DirectoryStats:
        """Counters since start, as they are now; see DirectoryStats for what is conserved."""
        with self._changed:
            return self._directory.stats.copy()

    def take_changes(self) -> list[PageChange]:
        """What of pages has come to L2 and L3 since the last call, as far as this cache was told, or has left them.
        Nothing without ``tells_changes``; of more than UNTAKEN_MAX changes, the oldest are missing."""
        with self._changed:
            return self._directory.take_changes()

    def settle(self, *, timeout_s: float) -> bool:
        """Wait until no copy reads or writes a slot of the engine, which may take its memory away then. False when the
        time was not enough."""
        with self._changed:
            self._pump.pump()
            deadline_s = self._clock() + timeout_s
            return self._pump.wait_while(lambda: bool(self._directory.busy_slots()), deadline_s=deadline_s)

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until nothing is under way between the tiers. False when the time was not enough."""
        with self._changed:
            self._pump.pump()
            return self._pump.wait_while(lambda: self._directory.open_jobs > 0, deadline_s=self._clock() + timeout_s)

    def _begin(self) -> None:
        """Every call that decides something begins so: with the lock held."""
        self._check_open()
        self._directory.tell_time(self._clock())
