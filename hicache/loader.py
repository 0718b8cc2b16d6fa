"""The loader: chooses the usable prefix over all groups and tiers, and brings it into L1 as one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from hicache.index import Entry, Index, Tier
from hicache.jobbook import JobBook, Outcomes
from hicache.jobs import CopyItem, CopyJob, CopyKind
from hicache.prefetch import Part, Prefetcher
from hicache.request import RequestRecord
from hicache.slots import slot_of
from hicache.spec import CacheSpec, StateGroup
from hicache.stats import DirectoryStats, sources_of_pages

Copies = dict[CopyKind, list[tuple[Part, CopyItem]]]


class Load(Enum):
    """What became of a request to load."""

    BUSY = "busy"  # no room in L1 for even an empty start: try again when another request has ended
    STARTED = "started"  # copies are under way; ask again when they are done
    DONE = "done"  # the page tables cover the restored prefix


@dataclass(slots=True, eq=False)
class _LoadUnderWay:
    """The copies of one load own their slots until they end, whatever becomes of the request."""

    record: RequestRecord
    pages: int
    jobs_left: int
    holds: list[tuple[int, int]]  # (group, L1 handle)
    sources: list[Entry]  # pinned
    failed: list[Part] = field(default_factory=list)


class Loader:
    """One prefix is chosen, secured with slots and pins, copied, and only then published. A copy that fails cuts the
    prefix back to an earlier legal stop: the caller asks again, and what failed is left out for this request."""

    def __init__(
        self, spec: CacheSpec, index: Index, jobs: JobBook, prefetcher: Prefetcher, stats: DirectoryStats
    ) -> None:
        self._index = index
        self._jobs = jobs
        self._prefetcher = prefetcher
        self._stats = stats
        self._page_tokens = spec.page_tokens
        self._state_groups = tuple(g for g, group in enumerate(spec.groups) if isinstance(group, StateGroup))
        self._paged_groups = tuple(g for g in range(len(spec.groups)) if g not in self._state_groups)

    def load(self, record: RequestRecord) -> Load:
        """See ``Directory.load``."""
        if (progress := self._progress(record)) is not None:
            return progress
        if record.reset_failed or not self._acquire_live(record):
            record.reset_failed = False
            return Load.BUSY
        stops, on_device = self._stops(record)
        longest = stops[-1]
        room = [
            self._index.room(Tier.L1, group) if group in self._paged_groups else record.prompt_pages
            for group in range(len(record.tables))
        ]
        stops = self._index.rule.fitting(stops, on_device, room)
        if record.prefetch is not None and not record.prefetch.settled:
            record.cut_reason = "late"
        while stops:
            stop = stops.pop()
            if stop < longest:
                record.cut_reason = "no_device_capacity"
            if self._start(record, stop):
                break
            del stops[max(1, len(stops) * 3 // 4) :]
        return self._progress(record) or Load.STARTED

    @staticmethod
    def _progress(record: RequestRecord) -> Load | None:
        if record.is_loaded:
            return Load.DONE
        return Load.STARTED if record.loading else None

    def _stops(self, record: RequestRecord) -> tuple[list[int], list[int]]:
        """Legal stops, from 0 on, and the masks of what is in L1."""
        lost = [0] * record.prompt_pages
        for page, group in record.lost:
            lost[page] |= 1 << group
        usable, on_device = [], []
        for page in range(record.prompt_pages):
            node = self._index.nodes.get(record.keys[page])
            usable.append(0 if node is None else node.resident & ~lost[page])
            on_device.append(0 if node is None else node.masks[Tier.L1])
        return [0, *self._index.rule.legal_stops(usable)], on_device

    def _acquire_live(self, record: RequestRecord) -> bool:
        """A live slot in every state group, or none."""
        if record.live:
            return True
        for group in self._state_groups:
            handles = self._index.acquire(Tier.L1, group, 1)
            if handles is None:
                self._release_live(record)
                return False
            record.live[group] = handles[0]
        return True

    def _release_live(self, record: RequestRecord) -> None:
        for group, handle in record.live.items():
            self._index.release(Tier.L1, group, [handle])
        record.live.clear()

    def _start(self, record: RequestRecord, pages: int) -> bool:
        """Secure a prefix of ``pages`` pages and emit its copies; False, and nothing changed, when L1 has no room."""
        needed = self._index.rule.needed(pages)
        sources = [self._index.pin(self._index.nearest(record.keys[page], group)) for page, group in needed]
        targets = self._acquire_targets(needed, sources)
        if targets is None:
            self._index.unpin_all(sources)
            return False
        for group in self._paged_groups:
            record.tables[group] = [None] * pages
        copies: Copies = {}
        for part, source in zip(needed, sources, strict=True):
            self._take(record, part, source, targets, copies)
        if pages == 0 and record.live:
            copies[CopyKind.RESET] = [
                ((0, group), CopyItem(group, slot_of(live), slot_of(live))) for group, live in record.live.items()
            ]
        self._index.unpin_all(record.pins)
        record.pins = sources
        self._emit(record, pages, copies)
        return True

    def _take(self, record: RequestRecord, part: Part, source: Entry, targets: dict[Part, int], copies: Copies) -> None:
        """Enter one object into the page table, with the copy that it takes, if any."""
        page, group = part
        on_device = source.tier is Tier.L1
        if group in record.live:
            kind = CopyKind.RESTORE if on_device else CopyKind.LOAD
            target = record.live[group]
        elif on_device:
            record.tables[group][page] = self._index.pools[Tier.L1][group].hold(source.handle)
            return
        else:
            kind = CopyKind.LOAD
            target = record.tables[group][page] = targets[part]
        copies.setdefault(kind, []).append((part, CopyItem(group, slot_of(source.handle), slot_of(target))))

    def _acquire_targets(self, needed: Sequence[Part], sources: Sequence[Entry]) -> dict[Part, int] | None:
        """L1 slots for the pages that lie in L2, or None."""
        targets: dict[Part, int] = {}
        for group in self._paged_groups:
            parts = [
                part
                for part, source in zip(needed, sources, strict=True)
                if part[1] == group and source.tier is Tier.L2
            ]
            handles = self._index.acquire(Tier.L1, group, len(parts))
            if handles is None:
                for (_, other), handle in targets.items():
                    self._index.release(Tier.L1, other, [handle])
                return None
            targets.update(zip(parts, handles, strict=True))
        return targets

    def _emit(self, record: RequestRecord, pages: int, copies: Copies) -> None:
        if not copies:
            self._loaded(record, pages)
            return
        record.loading = True
        held = list(record.live.items())
        held += [(group, handle) for group, table in enumerate(record.tables) for handle in table if handle is not None]
        load = _LoadUnderWay(
            record,
            pages,
            len(copies),
            holds=[(group, self._index.pools[Tier.L1][group].hold(handle)) for group, handle in held],
            sources=[self._index.pin(source) for source in record.pins],
        )
        for kind, pairs in copies.items():
            self._emit_copy(kind, load, [part for part, _ in pairs], tuple(item for _, item in pairs))

    def _emit_copy(self, kind: CopyKind, load: _LoadUnderWay, parts: list[Part], items: tuple[CopyItem, ...]) -> None:
        self._jobs.emit(
            lambda job_id: CopyJob(job_id, kind, items), lambda outcomes: self._copied(kind, load, parts, outcomes)
        )

    def _copied(self, kind: CopyKind, load: _LoadUnderWay, parts: Sequence[Part], outcomes: Outcomes) -> None:
        self._stats.count(kind.value, (group for _, group in parts), outcomes)
        load.failed += [part for part, outcome in zip(parts, outcomes, strict=True) if not outcome.is_ok]
        load.jobs_left -= 1
        if load.jobs_left:
            return
        load.record.loading = False
        if load.record.released:
            pass
        elif load.failed:
            self._cut_back(load.record, load.failed, is_reset=kind is CopyKind.RESET)
        else:
            self._loaded(load.record, load.pages)
        for group, handle in load.holds:
            self._index.release(Tier.L1, group, [handle])
        self._index.unpin_all(load.sources)

    def _cut_back(self, record: RequestRecord, failed: Sequence[Part], *, is_reset: bool) -> None:
        """Give back what the failed load took; the next one does without what failed."""
        record.cut_reason = "load_failed"
        for group in self._paged_groups:
            self._index.release(Tier.L1, group, record.tables[group])
            record.tables[group] = []
        if is_reset:
            record.reset_failed = True
            self._release_live(record)
        else:
            record.lost.update(failed)

    def _loaded(self, record: RequestRecord, pages: int) -> None:
        """Every copy has arrived: publish the pages in L1 and keep them pinned; let go of L2 and of the snapshots."""
        self._account(record, pages)
        pins: list[Entry] = []
        for source in record.pins:
            node, group = source.node, source.group
            if group in record.live:
                continue
            entry = node.entries[Tier.L1][group]
            if entry is None:
                handle = record.tables[group][node.page]
                assert handle is not None, "a loaded page has a slot"
                entry = self._index.publish(node, Tier.L1, group, self._index.pools[Tier.L1][group].hold(handle))
            pins.append(self._index.pin(entry))
        self._index.unpin_all(record.pins)
        record.pins = pins
        record.loaded_pages = record.published_pages = pages
        if record.prefetch is not None:
            self._prefetcher.conclude(record.prefetch, used_pages=pages, reason=record.cut_reason)

    def _account(self, record: RequestRecord, pages: int) -> None:
        """Each restored page counts for the farthest tier that something of it came from."""
        fetched = set() if record.prefetch is None else record.prefetch.fetched
        farthest: dict[int, str] = {}
        for entry in record.pins:
            page = entry.node.page
            is_fetched = entry.tier is Tier.L2 and (page, entry.group) in fetched
            farthest[page] = max(farthest.get(page, "l1"), "l3" if is_fetched else entry.tier.name.lower())
        sources = sources_of_pages(pages, farthest)
        tokens = {source: sources.count(source) * self._page_tokens for source in ("l1", "l2", "l3")}
        tokens["computed"] = record.token_count - pages * self._page_tokens
        record.by_source = tokens
        self._stats.tokens_by_source.update(tokens)
        self._stats.tokens_requested += record.token_count
        attention = self._index.rule.attention_pages(self._index.masks(record.keys[: record.prompt_pages]))
        self._stats.tokens_attention_only += max(0, attention - pages) * self._page_tokens
