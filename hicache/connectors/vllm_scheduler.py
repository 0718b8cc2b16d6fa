"""The scheduler's half of the vLLM connector: which blocks are loaded and saved, and what vLLM is told of it.

Everything here runs in vLLM's scheduler and waits for nothing. The order of copies against compute is that of steps:

    step n: vLLM zeroes new blocks, computes | loads into blocks of step n, saves of blocks filled by it | step n + 1

Each step says which blocks are somebody else's from then on: it begins when nothing that was saved is still read from
them. So no request keeps its blocks for the sake of a save, whether it ends, is aborted or preempted.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from hicache.connectors.step_times import PrefillTimes
from hicache.connectors.vllm_pages import BlockIds, Cache, Events, Geometry, Load, Slots, VllmRequest
from hicache.samples import Samples, samples_of

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_SETTLE_S = 5.0  # many times what the copies of a whole prompt take


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every worker is told of one engine step: its place among the copies, and what to report of loads.

    ``fence``: a further step, without compute, that ends when nothing is read from blocks any more. ``is_idle``: it
    computes nothing, and what vLLM would compute waits for L3 or for copies. ``is_timed``: how long it computes shall
    be told.
    """

    number: int
    after: tuple[int, ...]
    fence: tuple[int, tuple[int, ...]] | None = None
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    is_idle: bool = False
    is_timed: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """What of a request's identity its block hashes may lack: its tenant's salt, and adapters by their content."""

    salt: bytes | None = None
    extras: Mapping[str, Any] | None = None  # what SlotCache takes


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A load that the next step begins."""

    beyond: int
    tokens: int
    slots: Slots


@dataclass(slots=True)
class _Entry:
    """One request of vLLM, from its arrival until it has ended, and what was under way for it as well."""

    request: VllmRequest
    record: Any = None  # of the cache; None: nothing is cached for it
    hashes: list[bytes] = field(default_factory=list)  # of its pages, as the cache knows them
    token_count: int = 0  # likewise
    computed: int = 0  # what vLLM had itself when it last asked
    wanted: _Wanted | None = None
    load: Load | None = None
    saved_pages: int = 0
    is_over: bool = False
    is_refused: bool = False  # the cache did not take a call for it
    is_stale: bool = False  # the cache was reset since its load began


@dataclass(slots=True)
class Counts:
    """What happened since start that the cache does not count."""

    requests_uncached: int = 0  # without the salt that is required, or with an adapter of unknown content
    loads_failed: int = 0  # whose requests were computed instead
    checkpoints_wanted: int = 0
    calls_refused: int = 0  # a defect: the request went on without the cache


class SchedulerSide:
    """Called by vLLM's scheduler only, in its thread. Requests are known from ``opened`` to ``finished``."""

    def __init__(
        self,
        cache: Cache,
        geometry: Geometry,
        *,
        identity_of: Callable[[Any], Identity | None],
        loads: bool = True,
        saves: bool = True,
        zeroes_early: bool = False,
        events: Events | None = None,
        stages: int = 1,
    ) -> None:
        """``identity_of``: None for a request that must neither load nor save. ``zeroes_early``: workers may write to
        new blocks before they take the step. ``events``: are told what pages requests are made of. ``stages``: of the
        pipeline.
        """
        self.cache = cache
        self.counts = Counts()
        self._geometry = geometry
        self._identity_of = identity_of
        self._loads = loads
        self._saves = saves
        self._zeroes_early = zeroes_early
        self._events = events
        self._entries: dict[str, _Entry] = {}
        self._busy: dict[str, _Entry] = {}  # those with a load that vLLM waits for
        self._has_waiting = False  # since the last step a request was told to wait for L3
        self._reused: set[int] = set()  # blocks that loads of the next step were given
        self._epoch: str | None = None
        self.prefill_times = PrefillTimes(lambda parts, seconds: cache.tell_step(parts, seconds=seconds), stages=stages)

    # -- a request ---------------------------------------------------------------------------------------------------

    def opened(self, request: VllmRequest, computed: int) -> None:
        """It has come: L3 is asked for it while it waits to be scheduled. vLLM has ``computed`` tokens of it itself."""
        self._entries[request.request_id] = entry = _Entry(request)
        self._try(entry, lambda: self._arrived(entry, computed), otherwise=None)

    def _arrived(self, entry: _Entry, computed: int) -> None:
        if not self._open(entry):
            self.counts.requests_uncached += 1
        elif self._may_load(entry):
            self.cache.prefetch(entry.record, beyond=computed)

    def matched(self, request: VllmRequest, computed: int) -> int | None:
        """Tokens that can be loaded beyond ``computed``; None while it is worth waiting. May be asked any time."""
        entry = self._entries.get(request.request_id)
        if entry is None or not self._may_load(entry):
            return 0
        nothing: int | None = 0
        return self._try(entry, lambda: self._matched(entry, computed), otherwise=nothing)

    def _matched(self, entry: _Entry, computed: int) -> int | None:
        entry.computed = computed
        if not (entry.record is not None or self._open(entry)) or not self._follow(entry, exactly=True):
            return 0
        self.cache.prefetch(entry.record, beyond=computed)
        if not self.cache.is_ready(entry.record):
            self._has_waiting = True
            return None
        page = self._geometry.page_tokens
        usable = self.cache.usable(entry.record, beyond=computed) // page * page
        limit = (entry.request.num_tokens - 1) // page * page
        usable = min(usable, limit)
        self._want_checkpoint(entry, max(usable, computed), limit)
        return max(0, usable - computed)

    def allocated(self, request: VllmRequest, block_ids: BlockIds, external_tokens: int) -> None:
        """vLLM has blocks for what ``matched`` told; 0 tokens: for what it computes itself."""
        entry = self._entries.get(request.request_id)
        if entry is None or not external_tokens:
            return
        self._busy[request.request_id] = entry
        self._reused.update(block for blocks in block_ids for block in blocks)
        self._try(entry, lambda: self._want(entry, block_ids, external_tokens), otherwise=None)

    def _want(self, entry: _Entry, block_ids: BlockIds, external_tokens: int) -> None:
        end = entry.computed + external_tokens
        first, stop = entry.computed // self._geometry.page_tokens, end // self._geometry.page_tokens
        slots = self._geometry.attention_slots(block_ids, range(first, stop))
        entry.wanted = _Wanted(entry.computed, end, slots | self._geometry.state_slots(block_ids, stop - 1))

    def finished(self, request: VllmRequest) -> None:
        """It has ended, however. A load that vLLM waits for is reported all the same."""
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return
        entry.is_over, entry.wanted = True, None
        if entry.load is None:
            self._release(entry)

    # -- a step ------------------------------------------------------------------------------------------------------

    def plan(
        self,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], BlockIds | None],
        states: Mapping[str, Sequence[tuple[int, int, int]]],
        new_blocks: Iterable[int],
    ) -> StepPlan:
        """Begin what belongs to this step. ``scheduled``: tokens by request; ``states``: what vLLM offers of it, as
        (vLLM group, block, tokens up to which it is the state); ``new_blocks``: all that the step may be the first to
        write to. To be called once for each step that workers take.
        """
        self._reused.update(new_blocks)
        step = self.cache.step(reuses={0: list(self._reused)})  # blocks of all groups are one numbering
        self._reused.clear()
        for entry in self._busy.values():
            self._try(entry, partial(self._load, entry), otherwise=None)
        if self._saves:
            for request_id in [*scheduled, *(each for each in states if each not in scheduled)]:
                self._save(request_id, scheduled.get(request_id, 0), blocks_of, states.get(request_id, ()))
        fence = self.cache.step(reuses=None) if self._zeroes_early else None
        received, failed = self._settled()
        has_waiting, self._has_waiting = self._has_waiting or bool(self._busy), False
        return StepPlan(
            step.number,
            tuple(step.after),
            None if fence is None else (fence.number, tuple(fence.after)),
            received,
            failed,
            is_idle=has_waiting and not scheduled and not received,
            is_timed=self.prefill_times.planned(step.number, self._computed_by(scheduled)),
        )

    def _computed_by(self, scheduled: Mapping[str, int]) -> Iterator[tuple[int, int]]:
        """What a step computes of each request, without drafts, which are few."""
        for request_id, tokens in scheduled.items():
            if (entry := self._entries.get(request_id)) is not None:
                start = entry.request.num_computed_tokens
                yield start, min(start + tokens, entry.request.num_tokens)

    def _load(self, entry: _Entry) -> None:
        wanted, entry.wanted = entry.wanted, None
        if wanted is not None and not entry.is_stale:
            entry.load = self.cache.load(entry.record, beyond=wanted.beyond, tokens=wanted.tokens, slots=wanted.slots)

    def _save(
        self,
        request_id: str,
        tokens: int,
        blocks_of: Callable[[str], BlockIds | None],
        states: Sequence[tuple[int, int, int]],
    ) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.record is not None:
            self._try(entry, lambda: self._save_filled(entry, tokens, blocks_of, states), otherwise=None)

    def _save_filled(
        self,
        entry: _Entry,
        tokens: int,
        blocks_of: Callable[[str], BlockIds | None],
        states: Sequence[tuple[int, int, int]],
    ) -> None:
        if not self._follow(entry):
            return
        slots = self._filled(entry, tokens, blocks_of) if tokens else {}
        for group, block, boundary in states:
            page, rest = divmod(boundary, self._geometry.page_tokens)
            if rest or not 1 <= page <= len(entry.hashes):
                continue
            for index, each in enumerate(self._geometry.groups):
                if each.is_state and each.group == group:
                    slots.setdefault(index, {})[page - 1] = block
        if slots:
            self.cache.save(entry.record, slots)

    def _filled(self, entry: _Entry, tokens: int, blocks_of: Callable[[str], BlockIds | None]) -> Slots:
        """Blocks that are complete after this step: of tokens that are settled, which drafts are not."""
        request = entry.request
        settled = min(request.num_computed_tokens + tokens, request.num_tokens)
        pages = min(settled // self._geometry.page_tokens, len(entry.hashes))
        if pages <= entry.saved_pages or (block_ids := blocks_of(request.request_id)) is None:
            return {}
        first, entry.saved_pages = entry.saved_pages, pages
        return self._geometry.attention_slots(block_ids, range(first, pages))

    def _settled(self) -> tuple[frozenset[str], frozenset[str]]:
        """The requests whose load has ended since the last step, and those of them that have to be computed."""
        ended = {
            request_id: entry
            for request_id, entry in self._busy.items()
            if entry.wanted is None and (entry.load is None or entry.load.done)
        }
        failed = set()
        for request_id, entry in ended.items():
            del self._busy[request_id]
            if not entry.is_over and (entry.load is None or entry.load.failed or entry.is_stale):
                failed.add(request_id)
                self.counts.loads_failed += 1
            if entry.is_over or entry.is_stale or entry.is_refused:
                self._release(entry)
            entry.load, entry.is_stale = None, False
        return frozenset(ended), frozenset(failed)

    # -- the whole cache ---------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Nothing that was saved before is found again by this engine: its weights may be others from now on.

        Requests under way go on; what they have computed is not saved. Whatever is saved from now on is this engine's
        alone until it starts again. Waits for copies that are under way: vLLM may take the blocks' memory away next.
        Not where this is False: they have not ended.
        """
        if not (is_settled := self.cache.settle(timeout_s=_SETTLE_S)):
            _LOG.error("copies of KV blocks have not ended within %g s of a reset", _SETTLE_S)
        self._epoch = uuid.uuid4().hex
        for entry in self._entries.values():
            entry.is_stale = entry.load is not None or entry.wanted is not None
            if not entry.is_stale:
                self._release(entry)
        if self._events is not None:
            self._events.forget()
        return is_settled

    def samples(self) -> Samples:
        """Everything that was counted since start."""
        samples = samples_of(self.cache.stats)
        samples.update({(name,): getattr(self.counts, name) for name in Counts.__slots__})
        return samples

    def close(self) -> None:
        """The engine ends."""
        self._entries.clear()
        self._busy.clear()
        self.cache.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _try(self, entry: _Entry, call: Callable[[], T], *, otherwise: T) -> T:
        """Whatever fails here is a defect of this module or of the cache: the request goes on without the cache."""
        try:
            return call()
        except Exception:  # raised, it would end the engine, for the sake of one request's cache
            _LOG.exception("request %s goes on without the cache", entry.request.request_id)
            self.counts.calls_refused += 1
            entry.is_refused = True
            if entry.load is None:
                self._release(entry)
            return otherwise

    def _may_load(self, entry: _Entry) -> bool:
        return self._loads and not getattr(entry.request, "skip_reading_prefix_cache", False)

    def _open(self, entry: _Entry) -> bool:
        """False for a request that is not cached."""
        request = entry.request
        identity = None if entry.is_refused else self._identity_of(request)
        if identity is None:
            return False
        extras = dict(identity.extras or {})
        if self._epoch is not None:
            extras["epoch"] = self._epoch
        entry.hashes = self._geometry.page_hashes(request.block_hashes, 0)
        entry.token_count = self._geometry.tokens_known(request, len(entry.hashes))
        entry.saved_pages = 0
        entry.record = self.cache.open(
            list(entry.hashes), token_count=entry.token_count, salt=identity.salt, extras=extras or None
        )
        self._name_pages(entry, 0)
        return True

    def _follow(self, entry: _Entry, *, exactly: bool = False) -> bool:
        """Tell the cache how the sequence has grown, ``exactly`` or by full pages. False where it is not the one that
        was opened any more.
        """
        if entry.record is None or entry.is_stale:
            return False
        known = len(entry.hashes)
        grown = self._geometry.page_hashes(entry.request.block_hashes, max(0, known - 1))
        if known and grown[:1] != entry.hashes[-1:]:
            if entry.load is None and entry.wanted is None:
                self._release(entry)
            return False
        fresh = grown[1:] if known else grown
        token_count = self._geometry.tokens_known(entry.request, known + len(fresh))
        if fresh or (exactly and token_count != entry.token_count):
            self.cache.append(entry.record, fresh, token_count=token_count)
            entry.hashes += fresh
            entry.token_count = token_count
            self._name_pages(entry, known)
        return True

    def _name_pages(self, entry: _Entry, first: int) -> None:
        if self._events is not None:
            self._events.name_pages(entry.request, entry.record.keys, entry.hashes, first)

    def _want_checkpoint(self, entry: _Entry, restored: int, limit: int) -> None:
        """Where attention is known beyond the last state, ask vLLM to stop there once: the next sibling finds a state.

        ``shared_prefix_boundary`` is vLLM's own field for where its local cache found the same.
        """
        if not self._geometry.has_state or not hasattr(entry.request, "shared_prefix_boundary"):
            return
        page = self._geometry.page_tokens
        known = min(self.cache.attention(entry.record) // page * page, limit)
        if known > restored and known > entry.request.shared_prefix_boundary:
            entry.request.shared_prefix_boundary = known
            self.counts.checkpoints_wanted += 1

    def _release(self, entry: _Entry) -> None:
        record, entry.record, entry.hashes = entry.record, None, []
        if record is not None:
            self.cache.release(record)
