"""Brings a prefix, beyond what the engine has of it, into slots that the engine names: as one unit, or not at all."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from hicache.errors import UsageError
from hicache.index import Index
from hicache.jobbook import JobBook, Outcomes
from hicache.jobs import CopyItem, CopyJob, CopyKind
from hicache.node import Entry, Keep, Tier
from hicache.prefetch import Prefetcher
from hicache.prefetch_record import Part
from hicache.slot_request import EngineSlot, Promise, SlotLoad, SlotRecord, SlotsByPage
from hicache.slot_use import SlotUse
from hicache.slots import slot_of
from hicache.stats import DirectoryStats, pages_by_source


@dataclass(slots=True, eq=False)
class _LoadUnderWay:
    """The copies of one load own their sources until they end, whatever becomes of the request."""

    record: SlotRecord
    load: SlotLoad
    own_pages: int
    pages: int
    keep: Keep
    parts: list[Part]
    items: tuple[CopyItem, ...]
    targets: set[EngineSlot]
    job_id: int | None = None  # None: it waits until nobody reads its targets any more


class SlotLoader:
    """A prefix is loaded as a whole or not at all. What failed is left out for the request from then on."""

    def __init__(
        self,
        index: Index,
        jobs: JobBook,
        prefetcher: Prefetcher,
        use: SlotUse,
        stats: DirectoryStats,
        *,
        page_tokens: int,
        promise_s: float,
    ) -> None:
        self._index = index
        self._jobs = jobs
        self._prefetcher = prefetcher
        self._use = use
        self._stats = stats
        self._page_tokens = page_tokens
        self._promise_s = promise_s
        self._promised: OrderedDict[SlotRecord, None] = OrderedDict()  # by when the promise ends, the first one first
        self._waiting: list[_LoadUnderWay] = []
        self._targets: dict[EngineSlot, _LoadUnderWay] = {}

    # -- what can be restored ----------------------------------------------------------------------------------------

    def usable_pages(self, record: SlotRecord, own: int) -> int:
        """The longest legal prefix, in pages, that is longer than the ``own`` pages that the engine has; else ``own``.

        What it takes is kept for the request until ``forget``, or until it was not asked for in ``promise_s``.
        """
        self.expire()
        if self._jobs.has_lost:
            self.forget(record)
            return own
        promise = record.promise
        if promise is None or promise.own_pages != own or promise.published != self._index.published:
            promise = self._promise(record, own)
        if promise.pages <= own:
            self.forget(record)
            return own
        promise.until_s = self._index.now_s + self._promise_s
        self._promised[record] = None
        self._promised.move_to_end(record)
        return promise.pages

    def _promise(self, record: SlotRecord, own: int) -> Promise:
        pages = max(own, self._longest(record, own))
        keep = Keep() if pages <= own else self._index.keep(record.keys, pages)
        self.forget(record)
        record.promise = Promise(own, pages, keep, 0.0, self._index.published)
        return record.promise

    def _longest(self, record: SlotRecord, own: int) -> int:
        keys = record.keys[: record.restorable_pages]
        if not record.lost:
            return self._index.match(keys, own=own)
        masks = [self._index.available(keys, page, own=own) for page in range(len(keys))]
        for page, group in record.lost:
            if own <= page < len(masks):
                masks[page] &= ~(1 << group)
        return self._index.rule.usable(masks)

    def forget(self, record: SlotRecord) -> None:
        """Keep nothing for the request any more."""
        if record.promise is not None:
            self._index.let_go(record.promise.keep)
            record.promise = None
            self._promised.pop(record, None)

    def expire(self) -> None:
        """Give up promises that nobody has come back for."""
        while self._promised:
            record = next(iter(self._promised))
            assert record.promise is not None, "what is promised is on the record"
            if record.promise.until_s > self._index.now_s:
                return
            self._stats.skipped["promise.expired"] += 1
            self.forget(record)
            self.conclude(record, pages=0, reason="late")

    def conclude(self, record: SlotRecord, *, pages: int, reason: str) -> None:
        """The request waits for its prefetch no longer, and uses a prefix of ``pages`` pages."""
        if record.prefetch is not None:
            self._prefetcher.conclude(record.prefetch, used_pages=pages, reason=reason)

    # -- copies ------------------------------------------------------------------------------------------------------

    def load(self, record: SlotRecord, own: int, pages: int, slots: SlotsByPage) -> SlotLoad:
        """See ``SlotDirectory.load``."""
        parts = self._parts(own, pages)
        targets = self._targets_of(parts, slots)
        load = SlotLoad(pages * self._page_tokens)
        entries = [self._source(record, part) for part in parts]
        if self._jobs.has_lost or pages > record.restorable_pages or not all(entries):
            self._stats.skipped["load.gone"] += 1
            load.done = load.failed = True
            self._end(record, pages=0, reason="load_failed")
            return load
        sources = [entry for entry in entries if entry is not None]
        keep = self._index.keep(record.keys, pages)
        self._index.touch(keep.entries)
        self._index.touch_path(keep.path)
        self._index.note_use(keep, record.told(self._index.now_s, found_pages=pages))
        self.forget(record)
        items = tuple(
            CopyItem(entry.group, slot_of(entry.handle), slot)
            for entry, (_, slot) in zip(sources, targets, strict=True)
        )
        load.by_source = self._by_source(record, parts, own, pages)
        under_way = _LoadUnderWay(record, load, own, pages, keep, parts, items, set(targets))
        record.load = load, under_way.targets
        self._targets |= dict.fromkeys(under_way.targets, under_way)
        self._waiting.append(under_way)
        self.go_on()
        return load

    def go_on(self) -> None:
        """Begin the loads whose targets nobody reads any more."""
        waiting, self._waiting = self._waiting, []
        for under_way in waiting:
            if self._use.touching(under_way.targets):
                self._waiting.append(under_way)
            else:
                self._emit(under_way)

    @property
    def targets(self) -> set[EngineSlot]:
        """Slots that loads write to, or are going to."""
        return set(self._targets)

    def is_target(self, slot: EngineSlot) -> bool:
        """Whether a load is going to write to this slot."""
        return slot in self._targets

    def _emit(self, under_way: _LoadUnderWay) -> None:
        job_id = self._jobs.emit(
            lambda job_id: CopyJob(job_id, CopyKind.LOAD, under_way.items, beside_compute=True),
            lambda outcomes: self._copied(under_way, outcomes),
        )
        under_way.job_id = job_id
        self._use.begin(job_id, under_way.targets, reads=False)

    def _copied(self, under_way: _LoadUnderWay, outcomes: Outcomes) -> None:
        assert under_way.job_id is not None
        record, load = under_way.record, under_way.load
        self._use.end(under_way.job_id, under_way.targets)
        for target in under_way.targets:
            del self._targets[target]
        self._index.let_go(under_way.keep)
        self._stats.count("load", (group for _, group in under_way.parts), outcomes)
        failed = [part for part, outcome in zip(under_way.parts, outcomes, strict=True) if not outcome.is_ok]
        record.lost.update(failed)
        record.load = None
        load.failed = bool(failed)
        load.done = True
        if failed:
            self._end(record, pages=0, reason="load_failed")
        else:
            self._end(record, pages=under_way.pages, reason="not_usable")
            self.count(record, own=under_way.own_pages, by_source=load.by_source)

    def _end(self, record: SlotRecord, *, pages: int, reason: str) -> None:
        self.forget(record)
        self.conclude(record, pages=pages, reason=reason)

    def _parts(self, own: int, pages: int) -> list[Part]:
        rule = self._index.rule
        groups = range(self._index.group_count)
        firsts = [max(own, rule.first_needed(group, pages)) for group in groups]
        return [(page, group) for group in groups for page in range(firsts[group], pages)]

    def _targets_of(self, parts: list[Part], slots: SlotsByPage) -> list[EngineSlot]:
        """The slot of each part. Raises UsageError for one that is not named, or not free to be written to."""
        targets = []
        for page, group in parts:
            slot = slots.get(group, {}).get(page)
            if slot is None:
                raise UsageError(f"load: no slot is named for page {page} of group {group}, which the prefix needs")
            targets.append(self._use.slot(group, slot))
        if len(set(targets)) < len(targets) or any(map(self._targets.__contains__, targets)):
            raise UsageError("load: a slot is named for two pages, or is the target of another load that is not done")
        return targets

    def _source(self, record: SlotRecord, part: Part) -> Entry | None:
        page, group = part
        node = None if part in record.lost or page >= len(record.keys) else self._index.nodes.get(record.keys[page])
        return None if node is None else node.entries[Tier.L2][group]

    # -- accounts ----------------------------------------------------------------------------------------------------

    def _by_source(self, record: SlotRecord, parts: list[Part], own: int, pages: int) -> dict[str, int]:
        prefetch = record.prefetch
        fetched = set() if prefetch is None or prefetch.concluded else prefetch.fetched | prefetch.shared
        farther: dict[int, str] = {}
        for part in parts:
            if farther.get(part[0]) != "l3":
                farther[part[0]] = "l3" if part in fetched else "l2"
        rest = (
            farther[min(farther)] if farther else "l2"
        )  # of pages of which nothing was needed: before a window, or a state
        for page in range(own, pages):
            farther.setdefault(page, rest)
        counts = pages_by_source(pages - own, farther, first=0)
        return {source: counts[source] * self._page_tokens for source in ("l2", "l3")}

    def count(self, record: SlotRecord, *, own: int, by_source: dict[str, int]) -> None:
        """The request goes on to compute: where its tokens have come from, once."""
        if record.is_counted:
            return
        record.is_counted = True
        tokens = {"l1": own * self._page_tokens, **by_source}
        tokens["computed"] = record.token_count - sum(tokens.values())
        keys = record.keys[: record.restorable_pages]
        attention = self._index.attention_pages(keys, own=own)
        restored = own + sum(by_source.values()) // self._page_tokens
        self._stats.serve(keys, restored, tokens)
        self._stats.tokens_attention_only += max(0, attention - restored) * self._page_tokens
