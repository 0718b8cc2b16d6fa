"""The directory of an engine that owns its L1 slots: what L2 and L3 keep, what can be restored, and what is saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hicache.costs.measured import MeasuredCosts
from hicache.directory_config import DirectoryConfig
from hicache.errors import ConfigError, UsageError
from hicache.index import Index
from hicache.jobbook import JobBook, JobSide
from hicache.page_changes import PageChange, PageChanges
from hicache.policies.eviction import EvictionFactory
from hicache.policies.eviction_choice import lru
from hicache.policies.read import READ_POLICY_DEFAULT, ReadFactory, read_policy_of
from hicache.policies.write import WritePolicy, WriteThrough
from hicache.prefetch import Prefetcher
from hicache.read_admission import ReadAdmission
from hicache.slot_loader import SlotLoader
from hicache.slot_request import EngineSlot, SlotLoad, SlotRecord, SlotSave, SlotsByPage
from hicache.slot_saver import SlotSaver
from hicache.slot_use import SlotUse
from hicache.spec import CacheSpec
from hicache.stats import DirectoryStats
from hicache.writer import Writer, WriterLimits

PROMISE_S = 30.0  # an engine that has not asked again by then has no room for the request


class Step(NamedTuple):
    """One step of the engine: send both to ``RankWorker.step`` of every rank."""

    number: int
    after: tuple[int, ...]  # jobs that still read slots which the step writes to


class SlotDirectory(JobSide):
    """Not thread-safe: one thread at a time. Emits jobs (``take_jobs``) and is told what became of them (``complete``).

    L1 is the engine's: nothing is allocated or published there, and no decision is taken about it. A request goes
    through ``open``, and in any order ``prefetch``, ``usable``, ``load``, ``append`` and ``save``, and ``release``.
    """

    def __init__(
        self,
        spec: CacheSpec,
        config: DirectoryConfig,
        *,
        write_policy: WritePolicy | None = None,
        eviction: EvictionFactory = lru,
        read_policy: str | ReadFactory = READ_POLICY_DEFAULT,
        one_numbering: bool = False,
        tells_changes: bool = False,
    ) -> None:
        """``config.l1_slots`` are the engine's; with ``one_numbering`` those of all groups lie on the same bytes.
        Raises ConfigError without L2, and for a policy that writes back."""
        policy = write_policy or WriteThrough()
        _check(config, policy)
        self.spec = spec
        self.stats = DirectoryStats(spec.object_bytes)
        self.costs = MeasuredCosts()
        none = (0,) * len(spec.groups)
        self.index = Index(
            spec,
            (none, config.l2_slots),
            has_l3=config.has_l3,
            has_gaps=True,
            lost=self.stats.tokens_lost,
            eviction=eviction,
        )
        if tells_changes:
            self.index.changes = PageChanges()
        self._l1_slots = config.l1_slots
        self._jobs = JobBook(ranks=config.ranks)
        self._use = SlotUse(one_numbering=one_numbering)
        limits = WriterLimits(
            has_l2=True,
            has_l3=config.has_l3,
            store_share=config.store_l2_share,
            confirm_interval_s=config.l3_confirm_interval_s,
        )
        self._writer = Writer(self.index, self._jobs, policy, limits, self.stats)
        self._prefetcher = Prefetcher(
            self.index,
            self._jobs,
            config,
            self.stats,
            ReadAdmission(
                read_policy_of(read_policy, self.costs),
                self.costs,
                page_tokens=spec.page_tokens,
                now_s=lambda: self.index.now_s,
            ),
        )
        self._loader = SlotLoader(
            self.index,
            self._jobs,
            self._prefetcher,
            self._use,
            self.stats,
            page_tokens=spec.page_tokens,
            promise_s=PROMISE_S,
        )
        self._saver = SlotSaver(
            self.index,
            self._jobs,
            self._writer,
            self._loader,
            self._use,
            self.stats,
            has_l3=config.has_l3,
        )

    # -- jobs --------------------------------------------------------------------------------------------------------

    def step(self, reuses: Mapping[int, Iterable[int]] | None = None) -> Step:
        """Number the engine's next step: after all jobs emitted so far, and before all that follow.

        ``reuses``: by group, the slots that the step may write to and that were somebody else's before; None: any.
        """
        if reuses is None:
            after = self._use.reading
        else:
            after = self._use.touching(self._use.slot(group, slot) for group, slots in reuses.items() for slot in slots)
        return Step(self._jobs.number(), tuple(sorted(after)))

    def take_changes(self) -> list[PageChange]:
        """What of pages has come to L2 and L3, or left them, since the last call; nothing unless it was asked for."""
        return [] if self.index.changes is None else self.index.changes.take()

    # -- a request ---------------------------------------------------------------------------------------------------

    def tell_time(self, now_s: float) -> None:
        """By any clock that goes forward. Promises end by it."""
        self.index.tell_time(now_s)
        self.index.expire()
        self._loader.expire()

    def open(self, keys: list[bytes], *, token_count: int) -> SlotRecord:
        """``keys``: of all full pages of a sequence of ``token_count`` tokens."""
        self._check_length(len(keys), token_count)
        record = SlotRecord(keys, token_count, self.spec.page_tokens)
        pages = self.index.match(keys[: record.restorable_pages])
        self._writer.confirm(self.index.path(keys, pages))
        self.stats.requests += 1
        return record

    def gainable_tokens(self, record: SlotRecord, *, own_tokens: int) -> int:
        """Tokens that L3 might have, beyond what is here and what the engine has itself."""
        own = self._own_pages(record, own_tokens)
        keys = record.keys[: record.restorable_pages]
        return (len(keys) - max(own, self.index.match(keys, own=own))) * self.spec.page_tokens

    def prefetch(self, record: SlotRecord, *, own_tokens: int, patience_s: float = math.inf) -> None:
        """Begin to bring from L3 what makes the usable prefix longer than the engine's own. Does nothing while an
        earlier prefetch of the request has not been concluded: by a load, a save or more tokens."""
        self._check_not_released(record)
        record.own_pages = self._own_pages(record, own_tokens)
        if not self._jobs.has_lost:
            self._saver.ask(record, record.own_pages)
        if record.prefetch is None or record.prefetch.concluded:
            keys = [] if self._jobs.has_lost else record.keys[: record.restorable_pages]
            record.prefetch = self._prefetcher.start(keys, own=min(record.own_pages, len(keys)), patience_s=patience_s)

    def is_settled(self, record: SlotRecord) -> bool:
        """Whether waiting longer for the prefetch can bring nothing more."""
        return record.prefetch is None or record.prefetch.settled

    def usable(self, record: SlotRecord, *, own_tokens: int) -> int:
        """The longest prefix, in tokens, that can be loaded now; ``own_tokens`` when it is not longer than that.

        Kept for the request until it is loaded, saved, appended to, released, asked for anew, or PROMISE_S have passed.
        """
        self._check_not_released(record)
        record.own_pages = own = self._own_pages(record, own_tokens)
        if not self._jobs.has_lost:
            self._saver.ask(record, own)
        return max(own_tokens, self._loader.usable_pages(record, own) * self.spec.page_tokens)

    def attention(self, record: SlotRecord) -> int:
        """Leading tokens, whole pages, whose attention the engine, L2 or, as far as its look-up told, L3 has."""
        rule, known = self.index.rule, record.prefetch
        paged = rule.full_mask or rule.all_mask
        keys = record.keys[: record.restorable_pages]
        pages = record.own_pages
        while pages < len(keys):
            remote = known.remote[pages] if known is not None and pages < len(known.remote) else 0
            if (self.index.resident(keys[pages]) | remote) & paged != paged:
                break
            pages += 1
        return pages * self.spec.page_tokens

    def load(self, record: SlotRecord, *, own_tokens: int, tokens: int, slots: SlotsByPage) -> SlotLoad:
        """Copy what a prefix of ``tokens`` tokens needs, beyond the engine's own, into ``slots``: all of it, or none.

        Raises UsageError when a slot is missing or in use, or another load of the request is under way. What is not
        here any more makes a load that is done, and has failed.
        """
        self._check_not_released(record)
        own = self._own_pages(record, own_tokens)
        if tokens % self.spec.page_tokens or tokens <= own * self.spec.page_tokens:
            raise UsageError(
                f"load: tokens = {tokens}: expected whole pages of {self.spec.page_tokens} tokens, beyond {own_tokens}"
            )
        if record.load is not None:
            raise UsageError("load: another load of the request is under way")
        self._check_slots(slots)
        record.own_pages = own
        return self._loader.load(record, own, tokens // self.spec.page_tokens, slots)

    def append(self, record: SlotRecord, keys: Sequence[bytes], *, token_count: int) -> None:
        """The sequence has grown: ``keys`` of the pages that are full now and were not before."""
        self._check_not_released(record)
        self._check_length(len(record.keys) + len(keys), token_count)
        self._compute(record)
        record.keys += keys
        record.token_count = token_count

    def save(self, record: SlotRecord, slots: SlotsByPage) -> SlotSave:
        """Write down what of these pages is not below yet, and may go down: ancestors first, all groups together.

        The page of a state is the last one before its boundary. Raises UsageError for slots that a load writes to.
        """
        self._check_not_released(record)
        self._check_slots(slots)
        for group, by_page in slots.items():
            for page, slot in by_page.items():
                if not 0 <= page < len(record.keys):
                    raise UsageError(f"save: page {page}: the request has {len(record.keys)} full pages")
                if self._loader.is_target(self._use.slot(group, slot)):
                    raise UsageError(f"save: slot {slot} of group {group} is the target of a load that is not done")
        self._compute(record)
        if self._jobs.has_lost:
            return SlotSave()
        return self._saver.save(record, slots)

    def busy_slots(self, record: SlotRecord | None = None) -> set[EngineSlot]:
        """Slots that copies for the request, or for any, read or write, or are about to write."""
        if record is None:
            return self._use.slots | self._loader.targets
        targets = set[EngineSlot]() if record.load is None else record.load[1]
        return targets.union(*(save.slots for save in record.saves))

    def release(self, record: SlotRecord) -> None:
        """The request needs nothing any more. Copies that are under way end by themselves."""
        self._check_not_released(record)
        record.released = True
        self._loader.forget(record)
        self._loader.conclude(record, pages=0, reason="aborted")
        record.anchor = self.index.anchor(None, instead_of=record.anchor)

    def _compute(self, record: SlotRecord) -> None:
        """The engine goes on with what it has: nothing is kept or brought for it any more."""
        if record.load is None:
            is_late = record.prefetch is not None and not record.prefetch.settled
            self._loader.forget(record)
            self._loader.conclude(record, pages=0, reason="late" if is_late else "not_usable")
            self._loader.count(record, own=record.own_pages, by_source={})

    # -- checks ------------------------------------------------------------------------------------------------------

    def _own_pages(self, record: SlotRecord, own_tokens: int) -> int:
        if not 0 <= own_tokens <= record.token_count:
            raise UsageError(f"beyond = {own_tokens}: the sequence has 0 to {record.token_count} tokens")
        return min(own_tokens // self.spec.page_tokens, record.restorable_pages)

    def _check_length(self, pages: int, token_count: int) -> None:
        if pages != token_count // self.spec.page_tokens:
            raise UsageError(
                f"{pages} page hashes for {token_count} tokens: expected {token_count // self.spec.page_tokens},"
                f" one for each full page of {self.spec.page_tokens} tokens"
            )

    def _check_slots(self, slots: SlotsByPage) -> None:
        for group, by_page in slots.items():
            if not 0 <= group < len(self._l1_slots):
                raise UsageError(f"group {group}: the spec has {len(self._l1_slots)} groups")
            for page, slot in by_page.items():
                if not 0 <= slot < self._l1_slots[group]:
                    raise UsageError(
                        f"slot {slot} of page {page}: group {group} has slots 0 to {self._l1_slots[group] - 1}"
                    )

    def _check_not_released(self, record: SlotRecord) -> None:
        if record.released:
            raise UsageError("the request has been released already")


def _check(config: DirectoryConfig, policy: WritePolicy) -> None:
    if not any(config.l2_slots):
        raise ConfigError("l2_bytes", 0, "more than 0: an engine that owns its slots has its cache in L2")
    if policy.ahead_share:
        raise ConfigError(
            "write_policy",
            "write_back",
            "write_through or write_through_selective: an engine that owns its slots tells nobody before it reuses one",
        )
