"""HiCache: what an engine imports. Ties the directory to the pools, the executor and L3 of one engine process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Self, Unpack

from hicache.arena import arena_layout
from hicache.connect import CAPACITY_BYTES_DEFAULT
from hicache.directory import Directory
from hicache.directory_config import DirectoryConfig
from hicache.errors import UsageError
from hicache.front import CacheFront
from hicache.keys import BlockKeys, FieldValue, Tokens, token_array
from hicache.l3 import L3
from hicache.loader import Load
from hicache.policies import policy_of
from hicache.policies.choice import policies_of
from hicache.policies.eviction import EvictionFactory
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy
from hicache.policies.read import READ_POLICY_DEFAULT, ReadFactory
from hicache.policies.snapshot import SnapshotPolicy
from hicache.policies.write import WritePolicy
from hicache.pools import L1Pool, L2Pool
from hicache.rank_memory import MemorySettings, RankMemory
from hicache.ranks.messages import Hello
from hicache.ranks.settings import Ranks
from hicache.request import RequestRecord
from hicache.sequence import Request, Restored, Stored, found_tokens, restored_tokens
from hicache.settings import CacheSettings
from hicache.spec import CacheSpec
from hicache.tracing import traced


class HiCache(CacheFront[Directory]):
    """The cache of one engine: of its only rank, or of all of them, as the leader, and the first of them unless it is
    opened by ``lead``. Thread-safe; requests of different threads may interleave.

    No fault of L2, L3 or a copy raises here: it shortens what is restored, and is counted in ``stats``. UsageError
    means that the engine's own call was refused.
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
        snapshot_policy: SnapshotPolicy | None = None,
        double_buffering: bool = False,
        layerwise: bool = False,
        ranks: Ranks | None = None,
        copies: str = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Over pools of the engine's own, such as ``L1Pool.adopt``, which are those of rank 0; None for all: see
        ``lead``. Settings: see CacheSettings and ``open``.

        Where the spec has more ranks, waits for all of them at ``ranks``. Takes ``l2`` and ``l3`` over, but for when it
        raises: ConfigError when ranks have not come in time.
        """
        self._l1 = l1
        self.l2 = l2
        snapshots = policy_of("snapshot_policy", snapshot_policy, SnapshotPolicy)
        eviction_policy, policy = policies_of(eviction, write_policy)

        def directory(common: Hello, prefetch: PrefetchPolicy) -> Directory:
            config = DirectoryConfig(
                common.l1_slots,
                common.l2_slots,
                has_l3=common.has_l3,
                ranks=spec.rank_count,
                l1_arena=arena_layout(spec, common.l1_bytes) if common.l1_bytes else None,
                prefetch_threshold_tokens=prefetch.threshold_tokens,
                double_buffering=double_buffering,
                layerwise=layerwise,
            )
            return Directory(
                spec,
                config,
                write_policy=policy,
                read_policy=read_policy,
                snapshot_policy=snapshots,
                eviction=eviction_policy,
            )

        super().__init__(
            spec,
            BlockKeys(spec.namespace, page_tokens=spec.page_tokens, key_hash=spec.key_hash),
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
    def open(
        cls,
        spec: CacheSpec,
        *,
        l1_pages: int = 0,
        l1_state_slots: int = 0,
        l1_bytes: int = 0,
        l2_bytes: int = 0,
        l2_state_share: float = 0.25,
        l3: str | None = None,
        l3_capacity_bytes: int = CAPACITY_BYTES_DEFAULT,
        token: str = "",
        deployment: str = "",
        salt: bytes | None = None,
        device: str = "cpu",
        ranks: Ranks | None = None,
        copies: str = "auto",
        **settings: Unpack[CacheSettings],
    ) -> Self:
        """Build the pools and connect to L3. Never fails when L3 is away, nor waits for it, but as said below.

        L1 has ``l1_pages`` and ``l1_state_slots`` of each group, or all groups share ``l1_bytes``.
        ``l3`` is an address of hicached (``unix:///run/hicached/hicached.sock``, ``tls://host:port?ca=FILE``) or of a
        backend in this process (``lmdb:///path``, ``file:///path``, of ``l3_capacity_bytes``), or None. ``salt`` keeps
        apart what the engine's own tenants may not share; ``token`` is what hicached knows the engine by. ``copies``:
        ``reference``, ``direct``, ``kernel``, ``staged``, or ``auto``, which measures. Others: see CacheSettings.

        ``deployment`` names engines that must find each other's state, as a prefill and a decode engine must. While one
        of them is connected, hicached refuses one with another ``spec`` or ``salt``. This call waits for hicached's
        first answer, 2 s at most, and raises ConfigError, with the fields that differ, when it is such a refusal, or
        another one that lasts. A refusal that comes later, since hicached was away, shows in ``l3.status()``.

        With a spec of several ranks this is the leader and rank 0: it waits at ``ranks`` for a RankWorker of each other
        rank. Raises ConfigError when settings contradict each other, ask for more than there is, or ranks do not come.
        """
        memory_settings = MemorySettings(
            l1_pages=l1_pages,
            l1_state_slots=l1_state_slots,
            l1_bytes=l1_bytes,
            l2_bytes=l2_bytes,
            l2_state_share=l2_state_share,
            l3=l3,
            l3_capacity_bytes=l3_capacity_bytes,
            token=token,
            deployment=deployment,
            salt=salt,
            device=device,
        )
        policies_of(settings.get("eviction", "lru"), settings.get("write_policy", "write_through"))  # before all else
        memory = RankMemory.open(spec, memory_settings, rank=0)
        try:
            return cls(
                spec, l1=memory.l1, l2=memory.l2, l3=memory.l3, salt=salt, ranks=ranks, copies=copies, **settings
            )
        except BaseException:
            memory.close()
            raise

    @classmethod
    def lead(
        cls, spec: CacheSpec, *, ranks: Ranks, salt: bytes | None = None, **settings: Unpack[CacheSettings]
    ) -> Self:
        """The leader in a process without a rank, such as an engine's scheduler: every rank is a RankWorker, rank 0 as
        well, also where there is only one. They have L1, L2 and L3, and their settings are the replica's.

        Waits for all ranks at ``ranks``. Raises ConfigError.
        """
        return cls(spec, l1=None, l2=None, l3=None, salt=salt, ranks=ranks, **settings)

    @property
    def l1(self) -> L1Pool:
        """L1 of rank 0. Raises UsageError where this process has no rank."""
        if self._l1 is None:
            raise UsageError("this leader has no rank: L1 is that of its RankWorkers")
        return self._l1

    @traced("hicache.match", found_tokens)
    def match(
        self, tokens: Tokens, *, salt: bytes | None = None, extras: Mapping[str, FieldValue] | None = None
    ) -> Request:
        """Find what of a prompt is in L1 and L2 and keep it there until ``release``, which every request must reach.

        ``salt`` replaces the cache's own for this request; ``extras`` are further parts of its identity (LoRA id,
        multimodal hashes). Raises UsageError when ``tokens`` are not integers.
        """
        array = token_array(tokens)
        root = self._root(salt, extras)
        keys = self._keys.chain(array, parent=root)
        with self._changed:
            self._check_open()
            record = self._directory.open(keys, token_count=len(array), now_s=self._clock())
        return Request(self, array, self._keys, root, record)

    @traced("hicache.prefetch")
    def prefetch(self, request: Request, *, mode: PrefetchMode | None = None) -> None:
        """Begin to bring from L3 what makes the usable prefix longer. Returns at once; does nothing the second time."""
        chosen = self._mode(mode)
        gainable = request.token_count - request.hit.l1_tokens - request.hit.l2_tokens
        with self._changed:
            record = self._record_of(request)
            if record.prefetch is None:
                self._directory.tell_time(self._clock())
                self._directory.prefetch(record, patience_s=self._let_wait(request, chosen, tokens=gainable))
                self._pump.pump()

    def wait(self, request: Request) -> bool:
        """Wait for the prefetch as its mode says, never past its deadline. Returns whether it is settled."""
        with self._changed:
            while not self.is_ready(request):
                self._changed.wait(max(0.0, self._deadline_s(request) - self._clock()))
            return self._is_settled(request)

    @traced("hicache.load", restored_tokens)
    def load(self, request: Request, *, timeout_s: float = 0.0) -> Restored | None:
        """Bring the longest usable prefix into L1 and give the request its live state slots.

        The page tables then cover the restored prefix; live states hold its snapshot, or are empty. Waits for copies
        within this engine. None when L1 has no room even for an empty start, for ``timeout_s``: room comes when a
        request ends, and when pages have been written down.
        """
        with self._changed:
            self._replica.compute_here()
            record = self._record_of(request)
            if not self._pump.attempt(lambda patient: self._is_loaded(record, patient), timeout_s=timeout_s):
                return None
            pages = record.loaded_pages
            assert pages is not None, "a load that is done has a length"
            return Restored(pages * self.spec.page_tokens, dict(record.by_source))

    def _is_loaded(self, record: RequestRecord, patient: bool) -> bool:
        """Load, and wait for the copies; False when L1 has no room, or they have not ended in time."""
        until_s = time.monotonic() + self._replica.load_timeout_s
        self._check_open()
        self._directory.tell_time(self._clock())
        while (progress := self._directory.load(record, patient=patient)) is Load.STARTED:
            if self._directory.has_jobs:  # without, waking others who load would only make them look, and wake us
                self._pump.pump()
            if record.loading and not self._changed.wait(until_s - time.monotonic()):
                return False
            self._check_open()
        return progress is Load.DONE

    def wait_layer(self, layer: int) -> None:
        """With ``layerwise``: what this thread asks of its current stream from now on comes after everything that has
        been loaded of ``layer``, by the id that the spec gives it. Returns at once, and does nothing on a CPU.

        Call it in every forward, before the first kernel that reads or writes pages or states of the layer, on the
        stream of that kernel and outside of CUDA graphs. Raises UsageError for a layer of no group of the rank, or
        without a rank here.
        """
        if self._replica.executor is None:
            raise UsageError("this leader has no rank: call wait_layer of its RankWorkers")
        self._replica.executor.wait_layer(layer)

    def extend(self, request: Request, *, tokens: int, timeout_s: float = 0.0) -> bool:
        """Make the page tables cover ``tokens`` tokens. False, and nothing changed, when L1 has no room.

        Waits up to ``timeout_s`` for room: it comes when a request ends, and when pages have been written down.
        """
        with self._changed:
            record = self._record_of(request)
            return self._pump.attempt(lambda patient: self._is_extended(record, tokens, patient), timeout_s=timeout_s)

    def _is_extended(self, record: RequestRecord, tokens: int, patient: bool) -> bool:
        self._check_open()
        return self._directory.extend(record, tokens=tokens, patient=patient)

    def append(self, request: Request, tokens: Tokens) -> None:
        """The sequence goes on with ``tokens`` (decoded ones, or more of the prompt)."""
        array = token_array(tokens)
        with self._changed:
            self._check_open()
            record = self._record_of(request)
            keys = request._append(array)
            self._directory.append(record, keys, token_count=request.token_count)

    def next_state_stop(self, request: Request, *, computed: int, until: int, ends_at: int | None = None) -> int | None:
        """The first page boundary in ``(computed, until]`` at which the snapshot policy wants the state; None: none.

        ``until`` is where the engine would stop anyway: a chunk end, or as far as it decodes in one step. ``ends_at``
        is where the sequence ends, if the engine knows. Ask before each step, and store the state at that boundary.
        """
        with self._changed:
            self._check_open()
            self._replica.compute_here()
            stop = self._directory.next_state_stop(
                self._record_of(request), computed=computed, until=until, ends_at=ends_at
            )
            self._pump.pump()
            return stop

    def state_moved(self, request: Request) -> None:
        """With double buffering: compute has been asked to do the step that reads every state from ``state_source`` and
        writes it to ``state_slot``, where it is read from now on. Does nothing when they are the same already.

        A step that leaves the state where it was, such as drafts that wait in a ring, moves nothing.
        """
        with self._changed:
            self._directory.state_moved(self._record_of(request))
            self._changed.notify_all()  # who waits for room may find a snapshot to evict

    @traced("hicache.store")
    def store(
        self,
        request: Request,
        *,
        computed: int,
        state_at: int | None = None,
        state_pending: int = 0,
        donate: bool = False,
    ) -> None:
        """Tokens ``[0, computed)`` are in the request's L1 pages: publish the full ones, and begin to write them down.

        With ``state_at`` the live state is kept as the snapshot of that boundary; it must equal ``computed``, a
        multiple of the page size, and be committed: ``state_pending``, the updates in the ring or resting on drafts,
        must be 0. Raises StateNotCommitted otherwise, and publishes nothing.

        The snapshot is a copy. With ``donate`` it is the live slot itself: the request has none after that and can only
        be released. With double buffering the request may have gone on in another slot when this returns.
        """
        with self._changed:
            self._check_open()
            self._replica.compute_here()
            self._directory.store(
                self._record_of(request),
                computed=computed,
                state_at=state_at,
                state_pending=state_pending,
                donate=donate,
            )
            self._pump.pump()

    def wait_stored(self, request: Request, *, timeout_s: float) -> Stored:
        """Wait until L3 has acknowledged what was stored of a loaded request, for another engine to go on from.

        Asks L3 what it still has of that, and writes down again what it has not, for whatever reason, as long as that
        brings anything. Waits up to ``timeout_s``, and no longer than something of the request is on its way, or waits
        for what others store to leave L2.
        """
        with self._changed:
            self._check_open()
            handover = self._directory.hand_over(self._record_of(request))
            is_over = self._pump.attempt(lambda patient: handover.go_on(), timeout_s=timeout_s)
            result = handover.result
            return Stored(result.pages_in_l3 * self.spec.page_tokens, is_over and result.is_complete)

    def step(self) -> int:
        """Number the engine's next step, for ``RankWorker.step``: send it along with the step to every worker.

        On every rank, what was loaded and stored before this call is done before the step is computed; what is loaded
        and stored after it sees what the step has computed.
        """
        with self._changed:
            self._check_open()
            self._pump.pump()
            return self._directory.step()

    def release(self, request: Request) -> None:
        """The request is over, or given up at whatever point it was. Raises UsageError the second time."""
        with self._changed:
            self._directory.tell_time(self._clock())
            self._directory.release(self._record_of(request))
            self._pump.pump()
        self._tell_misses()

    def flush(self, *, timeout_s: float) -> bool:
        """Write down what ``write_back`` has left for later, and wait until nothing is under way between the tiers.

        False when the time was not enough, or when something could not be written.
        """
        deadline_s = self._clock() + timeout_s
        with self._changed:
            stored = -1
            while stored != (stored := self.stats.bytes_moved["store"]):  # as long as more is written each time
                self._directory.flush()
                self._pump.pump()
                if not self._pump.wait_while(lambda: self._directory.open_jobs > 0, deadline_s=deadline_s):
                    return False
                if self._directory.is_all_written:
                    return True
            return False

    def close(self, *, flush_timeout_s: float = 5.0) -> None:
        """Give up what is under way, disconnect, and free L2. Idempotent. No tensor of ``l2`` may be used after.

        What ``write_back`` has left for later is written before, as far as ``flush_timeout_s`` allows.
        """
        with self._changed:
            if not self._closed and not self._directory.is_all_written:
                self.flush(timeout_s=flush_timeout_s)
        super().close()
