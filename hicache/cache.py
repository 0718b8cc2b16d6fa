"""HiCache: what an engine imports. Ties the directory to the pools, the executor and L3 of one engine process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from hicache.connect import CAPACITY_BYTES_DEFAULT
from hicache.directory import Directory, DirectoryConfig
from hicache.errors import ConfigError, UsageError
from hicache.executor import Executor
from hicache.jobs import Completion, Job
from hicache.keys import BlockKeys, FieldValue, Tokens, token_array
from hicache.l3 import L3
from hicache.loader import Load
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy, check_mode
from hicache.policies.write import WritePolicy
from hicache.pools import L1Pool, L2Pool
from hicache.rank_memory import MemorySettings, RankMemory
from hicache.ranks.leader import open_links
from hicache.ranks.settings import Ranks
from hicache.request import RequestRecord
from hicache.sequence import Request, Restored
from hicache.spec import CacheSpec
from hicache.stats import DirectoryStats


class HiCache:
    """The cache of one engine: of its only rank, or of all of them, as the leader and the first of them. Thread-safe;
    requests of different threads may interleave.

    No fault of L2, L3 or a copy raises here: it shortens what is restored, and is counted in ``stats``. UsageError
    means that the engine's own call was refused.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        l1: L1Pool,
        l2: L2Pool | None,
        l3: L3 | None,
        salt: bytes | None = None,
        prefetch: PrefetchPolicy | None = None,
        write_policy: WritePolicy | None = None,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Over pools of the engine's own, such as ``L1Pool.adopt``, which are those of rank 0.

        Where the spec has more ranks, waits for all of them at ``ranks``. Takes ``l2`` and ``l3`` over, but for when it
        raises: ConfigError when ranks have not come in time.
        """
        self.spec = spec
        self.l1 = l1
        self.l2 = l2
        self.l3 = l3
        self._prefetch_policy = prefetch or PrefetchPolicy()
        self._salt = salt
        self._clock = clock
        self._keys = BlockKeys(spec.namespace, page_tokens=spec.page_tokens, key_hash=spec.key_hash)
        self._changed = threading.Condition(threading.RLock())
        self._inbox: deque[Callable[[], None]] = deque()  # what the directory has to be told
        self._jobs: deque[Job] = deque()
        self._pumping = False
        self._closed = False
        self._executor = Executor(spec, l1, l2, l3, on_complete=lambda completion: self._on_complete(0, completion))
        with ExitStack() as undo:
            undo.callback(self._executor.close)
            self._links = open_links(spec, ranks, l1=l1, l2=l2, has_l3=l3 is not None)
            undo.callback(self._links.close)
            config = DirectoryConfig(
                *self._links.slots,
                has_l3=l3 is not None,
                ranks=spec.rank_count,
                prefetch_threshold_tokens=self._prefetch_policy.threshold_tokens,
            )
            self._directory = Directory(spec, config, write_policy=write_policy)
            undo.pop_all()
        self._links.start(on_complete=self._on_complete, on_lost=self._on_lost)

    @classmethod
    def open(
        cls,
        spec: CacheSpec,
        *,
        l1_pages: int,
        l1_state_slots: int = 0,
        l2_bytes: int = 0,
        l2_state_share: float = 0.25,
        l3: str | None = None,
        l3_capacity_bytes: int = CAPACITY_BYTES_DEFAULT,
        token: str = "",
        salt: bytes | None = None,
        device: str = "cpu",
        prefetch: PrefetchPolicy | None = None,
        write_policy: WritePolicy | None = None,
        ranks: Ranks | None = None,
    ) -> Self:
        """Build the pools and connect to L3. Never waits for L3, nor fails when it is away.

        ``l3`` is an address (``unix:///run/hicache/hicached.sock``, ``tcp://host:port``), a backend to open in this
        process (``lmdb:///path``, ``file:///path``, of ``l3_capacity_bytes``), or None. ``salt`` keeps what the
        engine's own tenants may not share apart; ``token`` is what hicached knows the engine by.

        With a spec of several ranks this is the leader and rank 0: it waits at ``ranks`` for a RankWorker of each other
        rank. Raises ConfigError when settings contradict each other, ask for more than there is, or ranks do not come.
        """
        if not isinstance(salt, bytes | None):
            raise ConfigError("salt", type(salt).__name__, "bytes, or None")
        settings = MemorySettings(
            l1_pages=l1_pages,
            l1_state_slots=l1_state_slots,
            l2_bytes=l2_bytes,
            l2_state_share=l2_state_share,
            l3=l3,
            l3_capacity_bytes=l3_capacity_bytes,
            token=token,
            device=device,
        )
        memory = RankMemory.open(spec, settings, rank=0)
        try:
            return cls(
                spec,
                l1=memory.l1,
                l2=memory.l2,
                l3=memory.l3,
                salt=salt,
                prefetch=prefetch,
                write_policy=write_policy,
                ranks=ranks,
            )
        except BaseException:
            memory.close()
            raise

    # -- a request ---------------------------------------------------------------------------------------------------

    def match(
        self, tokens: Tokens, *, salt: bytes | None = None, extras: Mapping[str, FieldValue] | None = None
    ) -> Request:
        """Find what of a prompt is in L1 and L2 and keep it there until ``release``, which every request must reach.

        ``salt`` replaces the cache's own for this request; ``extras`` are further parts of its identity (LoRA id,
        multimodal hashes). Raises UsageError when ``tokens`` are not integers.
        """
        array = token_array(tokens)
        if not isinstance(salt, bytes | None):
            raise UsageError(f"salt is a {type(salt).__name__}: expected bytes, or None for the cache's own")
        root = self._keys.root(salt=self._salt if salt is None else salt, extras=extras)
        keys = self._keys.chain(array, parent=root)
        with self._changed:
            self._check_open()
            record = self._directory.open(keys, token_count=len(array), now_s=self._clock())
        return Request(self, array, self._keys, root, record)

    def prefetch(self, request: Request, *, mode: PrefetchMode | None = None) -> None:
        """Begin to bring from L3 what makes the usable prefix longer. Returns at once; does nothing the second time."""
        if mode is not None:
            check_mode(mode)
        gainable = request.token_count - request.hit.l1_tokens - request.hit.l2_tokens
        patience_s = self._prefetch_policy.patience_s(mode or self._prefetch_policy.mode, tokens=gainable)
        with self._changed:
            record = self._record_of(request)
            if record.prefetch is None:
                request.prefetch_deadline_s = self._clock() + patience_s
                self._directory.prefetch(record)
                self._pump()

    def wait(self, request: Request) -> bool:
        """Wait for the prefetch as its mode says, never past its deadline. Returns whether it is settled."""
        with self._changed:
            while not self.is_ready(request):
                self._changed.wait(max(0.0, request.prefetch_deadline_s - self._clock()))
            return self._directory.is_settled(self._record_of(request))

    def is_ready(self, request: Request) -> bool:
        """Whether ``wait`` would return at once, for engines that poll instead."""
        with self._changed:
            settled = self._directory.is_settled(self._record_of(request))
            return settled or self._closed or self._clock() >= request.prefetch_deadline_s

    def load(self, request: Request, *, timeout_s: float = 0.0) -> Restored | None:
        """Bring the longest usable prefix into L1 and give the request its live state slots.

        The page tables then cover the restored prefix; live states hold its snapshot, or are empty. Waits for copies
        within this engine. None when L1 has no room even for an empty start, for ``timeout_s``: room comes when a
        request ends, and when pages have been written down.
        """
        with self._changed:
            record = self._record_of(request)
            if not self._within(timeout_s, lambda: self._is_loaded(record)):
                return None
            pages = record.loaded_pages
            assert pages is not None, "a load that is done has a length"
            return Restored(pages * self.spec.page_tokens, dict(record.by_source))

    def _is_loaded(self, record: RequestRecord) -> bool:
        """Load, and wait for the copies; False when L1 has no room, or they have not ended in time."""
        until_s = time.monotonic() + self._links.load_timeout_s
        while (progress := self._load(record)) is Load.STARTED:
            self._pump()
            if record.loading and not self._changed.wait(until_s - time.monotonic()):
                return False
        self._pump()
        return progress is Load.DONE

    def _load(self, record: RequestRecord) -> Load:
        self._check_open()
        return self._directory.load(record)

    def extend(self, request: Request, *, tokens: int, timeout_s: float = 0.0) -> bool:
        """Make the page tables cover ``tokens`` tokens. False, and nothing changed, when L1 has no room.

        Waits up to ``timeout_s`` for room: it comes when a request ends, and when pages have been written down.
        """
        with self._changed:
            record = self._record_of(request)
            return self._within(timeout_s, lambda: self._directory.extend(record, tokens=tokens))

    def _within(self, timeout_s: float, attempt: Callable[[], bool]) -> bool:
        """Try again whenever something has changed, until it works or the time is over."""
        deadline_s = self._clock() + timeout_s
        while True:
            self._check_open()
            if attempt():
                return True
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return False
            self._changed.wait(left_s)

    def append(self, request: Request, tokens: Tokens) -> None:
        """The sequence goes on with ``tokens`` (decoded ones, or more of the prompt)."""
        array = token_array(tokens)
        with self._changed:
            self._check_open()
            record = self._record_of(request)
            keys = request._append(array)
            self._directory.append(record, keys, token_count=request.token_count)

    def store(self, request: Request, *, computed: int, state_at: int | None = None, state_pending: int = 0) -> None:
        """Tokens ``[0, computed)`` are in the request's L1 pages: publish the full ones, and begin to write them down.

        With ``state_at`` the live state is copied as the snapshot of that boundary; it must equal ``computed``, a
        multiple of the page size, and be committed: ``state_pending``, the updates in the ring or resting on drafts,
        must be 0. Raises StateNotCommitted otherwise, and publishes nothing.
        """
        with self._changed:
            self._check_open()
            self._directory.store(
                self._record_of(request), computed=computed, state_at=state_at, state_pending=state_pending
            )
            self._pump()

    def step(self) -> int:
        """Number the engine's next step, for ``RankWorker.step`` of every other rank: send it along with the step.

        On every rank, what was loaded and stored before this call is done before the step is computed; what is loaded
        and stored after it sees what the step has computed.
        """
        with self._changed:
            self._check_open()
            self._pump()
            return self._directory.step()

    def release(self, request: Request) -> None:
        """The request is over, or given up at whatever point it was. Raises UsageError the second time."""
        with self._changed:
            self._directory.release(self._record_of(request))
            self._pump()

    # -- the cache ---------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> DirectoryStats:
        """Counters since start; see DirectoryStats for what is conserved."""
        return self._directory.stats

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until nothing is under way between the tiers. False when the time was not enough."""
        deadline_s = self._clock() + timeout_s
        with self._changed:
            while self._directory.open_jobs:
                left_s = deadline_s - self._clock()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def close(self) -> None:
        """Give up what is under way, disconnect, and free L2. Idempotent. No tensor of ``l2`` may be used after."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._links.close()
        is_memory_ours = self._executor.close()
        if self.l2 is not None and is_memory_ours:  # else hicached may still write there: the memory is left to it
            self.l2.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _record_of(self, request: Request) -> RequestRecord:
        """Raises UsageError for a request of another cache: its slots mean something else here."""
        if request._cache is not self:
            raise UsageError("the request belongs to another HiCache: give it to the one that matched it")
        return request._record

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the cache has been closed")

    def _on_complete(self, rank: int, completion: Completion) -> None:
        """Called by the executor and the links, from any thread."""
        self._inbox.append(lambda: self._directory.complete(completion, rank=rank))
        with self._changed:
            self._pump()

    def _on_lost(self, rank: int, reason: str) -> None:
        """Called by the links, from any thread."""
        self._inbox.append(lambda: self._directory.lose_rank(rank, reason))
        with self._changed:
            self._pump()

    def _pump(self) -> None:
        """Tell the directory what is done and hand out what it wants next, until there is neither."""
        if self._pumping:  # a job that was done at once: the loop below takes its completion
            return
        self._pumping = True
        try:
            while True:
                while self._inbox:
                    self._inbox.popleft()()
                self._jobs.extend(self._directory.take_jobs())
                if not self._jobs and not self._inbox:
                    break
                while self._jobs:  # one that is interrupted leaves the others for the next call
                    job = self._jobs.popleft()
                    self._links.submit(job)  # first: the other ranks work on it meanwhile
                    self._executor.submit(job)
        finally:
            self._pumping = False
        self._changed.notify_all()
