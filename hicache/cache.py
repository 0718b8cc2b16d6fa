"""HiCache: what an engine imports. Ties the directory to the pools, the executor and L3 of one engine process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hicache.connect import CAPACITY_BYTES_DEFAULT, open_l3
from hicache.directory import Directory, DirectoryConfig
from hicache.errors import ConfigError, UsageError
from hicache.executor import Executor
from hicache.jobs import Completion, Job
from hicache.keys import BlockKeys, FieldValue, Tokens, token_array
from hicache.l3 import L3
from hicache.loader import Load
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy, check_mode
from hicache.policies.write import WritePolicy
from hicache.pools import ArenaPool, L1Pool, L2Pool, l2_slot_counts, open_l1
from hicache.pools.registration import registrar_for
from hicache.request import RequestRecord
from hicache.slots import slot_of
from hicache.spec import CacheSpec
from hicache.stats import DirectoryStats


@dataclass(frozen=True, slots=True)
class Hit:
    """Tokens of the prompt that were found in this engine, by the tier that they would be loaded from."""

    l1_tokens: int
    l2_tokens: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The restored prefix. ``by_source`` gives tokens by ``l1``, ``l2``, ``l3`` and ``computed`` (left to compute)."""

    tokens: int
    by_source: Mapping[str, int]


class Request:
    """One sequence, from ``HiCache.match`` to ``HiCache.release``. Used by one thread at a time."""

    def __init__(
        self, cache: HiCache, tokens: NDArray[np.int64], keys: BlockKeys, root: bytes, record: RequestRecord
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._root = root
        self._record = record
        self._count = len(tokens)
        self._tail: list[int] = tokens[len(record.keys) * keys.page_tokens :].tolist()  # of the last, partial page
        self.hit = Hit(record.local_tokens["l1"], record.local_tokens["l2"])
        self.prefetch_deadline_s = 0.0  # by the cache's clock

    @property
    def token_count(self) -> int:
        """Tokens of the sequence so far."""
        return self._count

    def page_table(self, group: int) -> list[int | None]:
        """The L1 page of every page of the sequence; None where a sliding window needs none."""
        return [None if handle is None else slot_of(handle) for handle in self._record.tables[group]]

    def state_slot(self, group: int) -> int:
        """The live L1 state slot of a state group: the request's own until it is released."""
        if group not in self._record.live:
            raise UsageError(f"group {group} has no live state: it is no state group, or the request is not loaded")
        return slot_of(self._record.live[group])

    def _append(self, tokens: NDArray[np.int64]) -> list[bytes]:
        """Takes the tokens in; returns the keys of the pages that they fill."""
        self._tail += tokens.tolist()
        self._count += len(tokens)
        parent = self._record.keys[-1] if self._record.keys else self._root
        keys = self._keys.chain(self._tail, parent=parent)
        del self._tail[: len(keys) * self._keys.page_tokens]
        return keys


class HiCache:
    """The cache of one engine process (one rank). Thread-safe; requests of different threads may interleave.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if spec.shard_count > 1:
            raise ConfigError("spec.tp_size * spec.pp_size", spec.shard_count, "1: HiCache drives one rank so far")
        self.spec = spec
        self.l1 = l1
        self.l2 = l2
        self.l3 = l3
        self._prefetch_policy = prefetch or PrefetchPolicy()
        self._salt = salt
        self._clock = clock
        self._keys = BlockKeys(spec.namespace, page_tokens=spec.page_tokens, key_hash=spec.key_hash)
        groups = range(len(spec.groups))
        self._directory = Directory(
            spec,
            DirectoryConfig(
                l1_slots=tuple(l1.slot_counts),
                l2_slots=tuple(l2.slot_counts) if l2 is not None else tuple(0 for _ in groups),
                has_l3=l3 is not None,
                l1_arena=l1.layout if isinstance(l1, ArenaPool) else None,
                prefetch_threshold_tokens=self._prefetch_policy.threshold_tokens,
            ),
            write_policy=write_policy,
        )
        self._changed = threading.Condition(threading.RLock())
        self._completions: deque[Completion] = deque()
        self._jobs: deque[Job] = deque()
        self._pumping = False
        self._closed = False
        self._executor = Executor(spec, l1, l2, l3, on_complete=self._on_complete)

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
        salt: bytes | None = None,
        device: str = "cpu",
        prefetch: PrefetchPolicy | None = None,
        write_policy: WritePolicy | None = None,
    ) -> Self:
        """Build the pools and connect to L3. Never waits for L3, nor fails when it is away.

        L1 has ``l1_pages`` and ``l1_state_slots`` of each group, or all groups share ``l1_bytes``.
        ``l3`` is an address (``unix:///run/hicache/hicached.sock``, ``tcp://host:port``), a backend to open in this
        process (``lmdb:///path``, ``file:///path``, of ``l3_capacity_bytes``), or None. ``salt`` keeps what the
        engine's own tenants may not share apart; ``token`` is what hicached knows the engine by.

        Raises ConfigError when settings contradict each other or ask for more than there is.
        """
        _check_settings(
            counts={
                "l1_pages": l1_pages,
                "l1_state_slots": l1_state_slots,
                "l1_bytes": l1_bytes,
                "l2_bytes": l2_bytes,
            },
            texts={"l3": l3, "token": token, "device": device},
            salt=salt,
        )
        if l3 is not None and l2_bytes == 0:
            raise ConfigError("l2_bytes", l2_bytes, "more than 0 when l3 is set: L3 reads and writes L2 pages")
        l1 = open_l1(spec, pages=l1_pages, state_slots=l1_state_slots, size_bytes=l1_bytes, device=device)
        l2 = None
        client: L3 | None = None
        try:
            if l2_bytes:
                counts = l2_slot_counts(spec, l2_bytes, state_share=l2_state_share)
                l2 = L2Pool(spec, counts, registrar=registrar_for(l1.device))
            if l3 is not None and l2 is not None:
                client = open_l3(l3, spec=spec, memory=l2, token=token, capacity_bytes=l3_capacity_bytes)
            return cls(spec, l1=l1, l2=l2, l3=client, salt=salt, prefetch=prefetch, write_policy=write_policy)
        except BaseException:
            if client is not None:
                client.close()
            if l2 is not None:
                l2.close()
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
        """Load, and wait for the copies; False when L1 has no room."""
        while (progress := self._load(record)) is Load.STARTED:
            self._pump()
            if record.loading:  # the executor completes every job, at the latest when it is closed
                self._changed.wait()
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

    def _on_complete(self, completion: Completion) -> None:
        """Called by the executor, from any thread."""
        self._completions.append(completion)
        with self._changed:
            self._pump()

    def _pump(self) -> None:
        """Tell the directory what is done and hand out what it wants next, until there is neither."""
        if self._pumping:  # a job that was done at once: the loop below takes its completion
            return
        self._pumping = True
        try:
            while True:
                while self._completions:
                    self._directory.complete(self._completions.popleft())
                self._jobs.extend(self._directory.take_jobs())
                if not self._jobs and not self._completions:
                    break
                while self._jobs:  # one that is interrupted leaves the others for the next call
                    self._executor.submit(self._jobs.popleft())
        finally:
            self._pumping = False
        self._changed.notify_all()


def _check_settings(*, counts: Mapping[str, object], texts: Mapping[str, object], salt: object) -> None:
    """Raises ConfigError for what a type checker would have refused."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(name, value, "a whole number of at least 0")
    for name, value in texts.items():
        if not isinstance(value, str) and not (name == "l3" and value is None):
            raise ConfigError(name, value, "text")
    if not isinstance(salt, bytes | None):
        raise ConfigError("salt", type(salt).__name__, "bytes, or None")
