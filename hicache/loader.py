"""The loader: chooses the usable prefix over all groups and tiers, and brings it into L1 as one unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hicache.index import Index
from hicache.jobbook import JobBook, Outcomes
from hicache.jobs import CopyItem, CopyJob, CopyKind
from hicache.node import Entry, Node, Tier
from hicache.prefetch import Prefetcher
from hicache.prefetch_record import Part
from hicache.request import RequestRecord
from hicache.slots import slot_of
from hicache.spec import CacheSpec, StateGroup
from hicache.stats import DirectoryStats, pages_by_source

Tables = dict[int, list[int | None]]  # by paged group: handles of L1 slots


class Load(Enum):
    """What became of a request to load."""

    BUSY = "busy"  # no room in L1 for even an empty start: try again when another request has ended
    STARTED = "started"  # copies are under way; ask again when they are done
    DONE = "done"  # the page tables cover the restored prefix


@dataclass(frozen=True, slots=True)
class _Copy:
    """One object on its way into L1."""

    part: Part
    source: Entry  # pinned until the load ends
    target: int  # L1 handle, held until then


@dataclass(slots=True, eq=False)
class _LoadUnderWay:
    """The copies of one load own their slots until they end, whatever becomes of the request."""

    record: RequestRecord
    pages: int
    copies: list[_Copy]
    sources: dict[int, Entry]  # snapshots that are read where they are, by group
    lives: list[tuple[int, int]]  # (group, L1 handle), held
    jobs_left: int = 0
    in_flight: tuple[CopyItem, ...] = ()  # copied by layer: may be so when the jobs are done
    failed: list[Part] = field(default_factory=list)


class Loader:
    """One prefix is chosen, secured with slots and pins, copied, and only then published. A copy that fails cuts the
    prefix back to an earlier legal stop: the caller asks again, and what failed is left out for this request."""

    def __init__(
        self,
        spec: CacheSpec,
        index: Index,
        jobs: JobBook,
        prefetcher: Prefetcher,
        stats: DirectoryStats,
        *,
        double_buffering: bool,
        by_layer: bool,
    ) -> None:
        self._index = index
        self._jobs = jobs
        self._prefetcher = prefetcher
        self._stats = stats
        self._page_tokens = spec.page_tokens
        self._double_buffering = double_buffering
        self._by_layer = by_layer
        states = [(number, group) for number, group in enumerate(spec.groups) if isinstance(group, StateGroup)]
        self._state_groups = tuple(number for number, _ in states)
        self._transient_groups = tuple(
            number for number, group in states if any(field.transient for field in group.fields)
        )
        self._paged_groups = tuple(g for g in range(len(spec.groups)) if g not in self._state_groups)

    def load(self, record: RequestRecord, *, patient: bool = False) -> Load:
        """See ``Directory.load``."""
        if (progress := self._progress(record)) is not None:
            return progress
        if record.reset_failed or not self._acquire_live(record, patient=patient):
            record.reset_failed = False
            return Load.BUSY
        if record.prefetch is not None and not record.prefetch.settled:
            record.cut_reason = "late"
        keys = record.keys[: record.prompt_pages]
        self._index.is_making_room = False
        longest = self._stops(record, keys)[-1] if record.lost else self._index.match(keys)
        if not self._start(record, longest, patient=patient):
            if patient and self._index.is_making_room:
                return Load.BUSY
            record.cut_reason = "no_device_capacity"
            self._start_shorter(record, self._stops(record, keys[:longest]))
        return self._progress(record) or Load.STARTED

    def _start_shorter(self, record: RequestRecord, stops: list[int]) -> None:
        """Start with the longest of ``stops`` that L1 has room for: 0 needs none."""
        keys = record.keys[: stops[-1]]
        on_device = [0 if node is None else node.masks[Tier.L1] for node in map(self._index.nodes.get, keys)]
        room = [
            self._index.room(Tier.L1, group) if group in self._paged_groups else record.prompt_pages
            for group in range(len(record.tables))
        ]
        stops = self._index.rule.fitting(stops, on_device, room)
        while not self._start(record, stops.pop()):
            del stops[max(1, len(stops) * 3 // 4) :]  # few attempts, and no more than a quarter too short
            still_legal = set(self._stops(record, keys))  # the attempt may have evicted what a shorter one needs
            stops = [stop for stop in stops if stop in still_legal]

    @staticmethod
    def _progress(record: RequestRecord) -> Load | None:
        if record.is_loaded:
            return Load.DONE
        return Load.STARTED if record.loading else None

    def _stops(self, record: RequestRecord, keys: Sequence[bytes]) -> list[int]:
        """Legal stops, from 0 on, without what was lost."""
        masks = [self._index.resident(key) for key in keys]
        for page, group in record.lost:
            if page < len(masks):
                masks[page] &= ~(1 << group)
        return [0, *self._index.rule.legal_stops(masks)]

    def _acquire_live(self, record: RequestRecord, *, patient: bool) -> bool:
        """A live slot in every state group, or none."""
        if record.live:
            return True
        for group in self._state_groups:
            handles = self._index.acquire(Tier.L1, group, 1, patient=patient)
            if handles is None:
                self._release_live(record)
                return False
            record.live[group] = handles[0]
        return True

    def _release_live(self, record: RequestRecord) -> None:
        for group, handle in record.live.items():
            self._index.release(Tier.L1, group, [handle])
        record.live.clear()

    def _start(self, record: RequestRecord, pages: int, *, patient: bool = False) -> bool:
        """Secure a prefix of ``pages`` pages and emit its copies; False, and nothing changed, when L1 has no room."""
        keep = self._index.keep(record.keys, pages)
        path = [self._index.nodes.get(key) for key in record.keys[:pages]]
        tables = {group: self._on_device(path, group) for group in self._paged_groups}
        copies = self._acquire_targets(path, tables, patient=patient)
        if copies is None:
            self._index.let_go(keep)
            return False
        for group, table in tables.items():
            pool = self._index.pools[Tier.L1][group]
            for handle in table:
                if handle is not None:
                    pool.hold(handle)
            record.tables[group] = table
        for copy in copies:
            page, group = copy.part
            record.tables[group][page] = copy.target
        states = {} if not path else {group: self._entry(path[-1], group) for group in record.live}
        sources = {g: entry for g, entry in states.items() if self._double_buffering and entry.tier is Tier.L1}
        copies += [_Copy((pages - 1, g), entry, record.live[g]) for g, entry in states.items() if g not in sources]
        self._index.let_go(record.keep)
        record.keep = keep
        self._emit(record, pages, copies, sources)
        return True

    def _on_device(self, path: Sequence[Node | None], group: int) -> list[int | None]:
        """The page table of a prefix as far as it is in L1: None for what is not, or not needed."""
        first = self._index.rule.first_needed(group, len(path))
        entries = [node.entries[0][group] if node is not None else None for node in path[first:]]
        return [None] * first + [None if entry is None else entry.handle for entry in entries]

    def _acquire_targets(self, path: Sequence[Node | None], tables: Tables, *, patient: bool) -> list[_Copy] | None:
        """L1 slots for the pages that lie in L2, with what is copied there; or None, and nothing taken."""
        absent: list[tuple[int, list[int]]] = []
        for group, table in tables.items():
            first = self._index.rule.first_needed(group, len(path))
            pages = [page for page, handle in enumerate(table[first:], first) if handle is None]
            if not pages:
                continue
            if len(pages) > self._index.room(Tier.L1, group):
                if patient:
                    self._index.make_room(Tier.L1, group, len(pages))  # what is being written down keeps its slot
                return None
            absent.append((group, pages))
        copies: list[_Copy] = []
        for group, pages in absent:
            handles = self._index.acquire(Tier.L1, group, len(pages), patient=patient)
            if handles is None:
                for copy in copies:
                    self._index.release(Tier.L1, copy.part[1], [copy.target])
                return None
            copies += [
                _Copy((page, group), self._entry(path[page], group, Tier.L2), handle)
                for page, handle in zip(pages, handles, strict=True)
            ]
        return copies

    @staticmethod
    def _entry(node: Node | None, group: int, tier: Tier | None = None) -> Entry:
        entry = None if node is None else node.nearest(group)
        assert entry is not None, "what a legal prefix needs is here"
        assert tier in (None, entry.tier), "what is not in L1 is in L2"
        return entry

    def _emit(self, record: RequestRecord, pages: int, copies: list[_Copy], sources: dict[int, Entry]) -> None:
        emptied = {
            g: live for g, live in record.live.items() if not pages or (g in sources and g in self._transient_groups)
        }
        if not copies and not emptied:
            self._loaded(record, pages, copies, sources)
            return
        record.loading = True
        pools = self._index.pools[Tier.L1]
        for copy in copies:
            self._index.pin(copy.source)
            pools[copy.part[1]].hold(copy.target)
        lives = [(group, pools[group].hold(handle)) for group, handle in record.live.items()]
        load = _LoadUnderWay(record, pages, copies, sources, lives)
        items: dict[CopyKind, list[tuple[Part, CopyItem]]] = {}
        for copy in copies:
            kind = CopyKind.LOAD if copy.source.tier is Tier.L2 else CopyKind.RESTORE
            item = CopyItem(copy.part[1], slot_of(copy.source.handle), slot_of(copy.target))
            items.setdefault(kind, []).append((copy.part, item))
        if emptied:
            kind, page = (CopyKind.CLEAR, pages - 1) if pages else (CopyKind.RESET, 0)
            items[kind] = [((page, g), CopyItem(g, slot_of(live), slot_of(live))) for g, live in emptied.items()]
        load.jobs_left = len(items)
        for kind in sorted(items, key=lambda kind: kind is CopyKind.LOAD):  # last: copies within L1 may wait for loads
            pairs = items[kind]
            self._emit_copy(kind, load, [part for part, _ in pairs], tuple(item for _, item in pairs))

    def _emit_copy(self, kind: CopyKind, load: _LoadUnderWay, parts: list[Part], items: tuple[CopyItem, ...]) -> None:
        by_layer = self._by_layer and kind is CopyKind.LOAD
        if by_layer:
            load.in_flight = items
        self._jobs.emit(
            lambda job_id: CopyJob(job_id, kind, items, by_layer=by_layer),
            lambda outcomes: self._copied(kind, load, parts, outcomes),
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
            self._cut_back(load, is_reset=kind is CopyKind.RESET)
        else:
            self._loaded(load.record, load.pages, load.copies, load.sources)
        if load.in_flight:
            self._jobs.emit(
                lambda job_id: CopyJob(job_id, CopyKind.ARRIVE, load.in_flight), lambda outcomes: self._end(load)
            )
        else:
            self._end(load)

    def _end(self, load: _LoadUnderWay) -> None:
        """No copy of the load touches anything any more, whatever has become of it."""
        for copy in load.copies:
            self._index.unpin(copy.source)
            self._index.release(Tier.L1, copy.part[1], [copy.target])
        for group, handle in load.lives:
            self._index.release(Tier.L1, group, [handle])

    def _cut_back(self, load: _LoadUnderWay, *, is_reset: bool) -> None:
        """Give back what the failed load took; the next one does without what failed, and, while that load is still in
        flight on some rank, without its live slots."""
        record = load.record
        record.cut_reason = "load_failed"
        for group in self._paged_groups:
            self._index.release(Tier.L1, group, record.tables[group])
            record.tables[group] = []
        if is_reset:
            record.reset_failed = True
        else:
            record.lost.update(load.failed)
        if is_reset or load.in_flight:
            self._release_live(record)

    def _loaded(self, record: RequestRecord, pages: int, copies: Sequence[_Copy], sources: Mapping[int, Entry]) -> None:
        """Every copy has arrived, or will before compute reads it: publish the pages in L1 and keep them."""
        record.sources = {group: self._index.pin(entry) for group, entry in sources.items()}
        self._account(record, pages, copies)
        for copy in copies:
            node, group = copy.source.node, copy.part[1]
            if group not in record.live and node.entries[Tier.L1][group] is None:
                self._index.publish(node, Tier.L1, group, self._index.pools[Tier.L1][group].hold(copy.target))
        used = self._index.keep(record.keys, pages)
        self._index.let_go(record.keep)
        record.keep = used
        for entry in [entry for entry in used.entries if entry.group in record.live]:
            self._index.unpin(entry)
            used.entries.remove(entry)
        record.loaded_pages = record.published_pages = pages
        record.computed = record.sources_at = pages * self._page_tokens
        if record.prefetch is not None:
            self._prefetcher.conclude(record.prefetch, used_pages=pages, reason=record.cut_reason)

    def _account(self, record: RequestRecord, pages: int, copies: Sequence[_Copy]) -> None:
        """Each restored page counts for the farthest tier that something of it came from."""
        fetched = set() if record.prefetch is None else record.prefetch.fetched | record.prefetch.shared
        farther: dict[int, str] = {}
        for copy in copies:
            if copy.source.tier is Tier.L2:
                page = copy.part[0]
                farther[page] = "l3" if copy.part in fetched or farther.get(page) == "l3" else "l2"
        sources = pages_by_source(pages, farther, first=self._index.rule.first_page(pages))
        tokens = {source: sources[source] * self._page_tokens for source in ("l1", "l2", "l3")}
        tokens["computed"] = record.token_count - pages * self._page_tokens
        record.by_source = tokens
        keys = record.keys[: record.prompt_pages]
        self._stats.serve(keys, pages, tokens)
        attention = self._index.attention_pages(keys)
        self._stats.tokens_attention_only += max(0, attention - pages) * self._page_tokens
        record.shared_pages = (
            attention if record.prefetch is None else self._prefetcher.known_pages(record.prefetch, attention)
        )
