"""Copies pages and states out of slots that the engine names down to L2, ancestors first, and hands them on to L3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hicache.index import Index
from hicache.jobbook import JobBook, Outcomes, batches
from hicache.jobs import CopyItem, CopyJob, CopyKind, LookupItem, LookupJob
from hicache.node import Node, Tier
from hicache.prefetch_record import Part
from hicache.slot_loader import SlotLoader
from hicache.slot_request import SlotRecord, SlotSave, SlotsByPage
from hicache.slot_use import SlotUse
from hicache.slots import slot_of
from hicache.stats import DirectoryStats
from hicache.writer import Writer

_JOB_ITEMS_MAX = 32


@dataclass(frozen=True, slots=True)
class _PageCopy:
    node: Node
    sources: tuple[tuple[int, int], ...]  # (group, slot)
    targets: tuple[int, ...]  # L2 handles, by source

    def items(self) -> Iterator[CopyItem]:
        for (group, slot), handle in zip(self.sources, self.targets, strict=True):
            yield CopyItem(group, slot, slot_of(handle))


class SlotSaver:
    """The groups of a page that are saved together are published together in L2, or not at all; a page only when its
    parent is in L2, on its way there, or in L3. What is below already is not copied."""

    def __init__(
        self,
        index: Index,
        jobs: JobBook,
        writer: Writer,
        loader: SlotLoader,
        use: SlotUse,
        stats: DirectoryStats,
        *,
        has_l3: bool,
    ) -> None:
        self._index = index
        self._jobs = jobs
        self._writer = writer
        self._loader = loader
        self._use = use
        self._stats = stats
        self._has_l3 = has_l3

    # -- what L3 has -------------------------------------------------------------------------------------------------

    def ask(self, record: SlotRecord, own: int) -> None:
        """Ask L3 about those of the engine's ``own`` pages that are not here, so that they need not be copied again."""
        first, record.asked_pages = record.asked_pages, max(record.asked_pages, own)
        if not self._has_l3 or first >= own:
            return
        needed = self._index.rule.needed(own)  # a window further back, or a state before the last, it has no more
        parts = [part for part in needed if part[0] >= first and not self._index.resident(record.keys[part[0]])]
        if parts:
            self._anchor(record, max(page for page, _ in parts))
        if not parts:
            return
        items = tuple(LookupItem(group, record.keys[page]) for page, group in parts)
        self._jobs.emit(
            lambda job_id: LookupJob(job_id, items), lambda outcomes: self._answered(record, parts, outcomes)
        )

    def _answered(self, record: SlotRecord, parts: Sequence[Part], outcomes: Outcomes) -> None:
        self._stats.count("confirm", (group for _, group in parts), outcomes)
        for (page, group), outcome in zip(parts, outcomes, strict=True):
            node = self._index.nodes.get(record.keys[page])
            if outcome.is_ok and node is not None:
                self._index.stored(node, 1 << group)

    def _in_l3(self, record: SlotRecord, page: int) -> int:
        """What L3 has of a page, as a mask, as far as anybody here was told."""
        node = self._index.nodes.get(record.keys[page])
        known = 0 if node is None else node.in_l3
        if record.prefetch is not None and page < len(record.prefetch.remote) and (node is None or not node.resident):
            known |= record.prefetch.remote[page]
        return known

    def _anchor(self, record: SlotRecord, page: int) -> None:
        """Remember what is known of the way to ``page`` as long as the request lives."""
        if self._index.rule.full_mask and (record.anchor is None or record.anchor.page < page):
            record.anchor = self._index.anchor(self._index.obtain(record.keys, page), instead_of=record.anchor)

    # -- L1 to L2 ----------------------------------------------------------------------------------------------------

    def save(self, record: SlotRecord, slots: SlotsByPage) -> SlotSave:
        """See ``SlotDirectory.save``."""
        save = SlotSave()
        by_page: dict[int, dict[int, int]] = {}
        for group, by_group in slots.items():
            for page, slot in by_group.items():
                by_page.setdefault(page, {})[group] = slot
        admitted = self._admitted(record, by_page)
        copies: list[_PageCopy] = []
        stores: list[Node] = []
        for page in sorted(by_page):
            if page >= admitted:
                break
            copy = self._prepare(record, page, by_page[page])
            if copy is not None:
                copies.append(copy)
            if (node := self._index.nodes.get(record.keys[page])) is not None:
                stores.append(node)
        self._writer.note_written(group for copy in copies for group, _ in copy.sources)
        for batch in batches(copies, _JOB_ITEMS_MAX):
            self._emit(record, save, batch)
        self._touch_path(record, by_page)
        self._writer.send_down(stores)
        if not save.done:
            record.saves.append(save)
        return save

    def _admitted(self, record: SlotRecord, by_page: dict[int, dict[int, int]]) -> int:
        """So many leading pages may go down. Pages that are offered for the first time are used now."""
        offered = max(by_page, default=-1) + 1
        request = record.told(self._index.now_s, found_pages=record.own_pages)
        if offered > record.touched_pages:
            self._writer.touch(record.keys[record.touched_pages :], first_page=record.touched_pages, request=request)
            record.touched_pages = len(record.keys)
        first = min(by_page, default=0)
        admitted = first + self._writer.admits(record.keys[first:offered], first_page=first, request=request)
        self._stats.skipped["backup.not_admitted"] += sum(page >= admitted for page in by_page)
        return admitted

    def _prepare(self, record: SlotRecord, page: int, slots: dict[int, int]) -> _PageCopy | None:
        """Room in L2 for what is not below of a page, all or none; None when there is nothing to copy, or it cannot."""
        key, full = record.keys[page], self._index.rule.full_mask
        node = self._index.nodes.get(key)
        here = 0 if node is None else node.masks[Tier.L2] | node.copying
        below = here | self._in_l3(record, page)
        wanted = sum(1 << group for group in slots) & ~below
        if not wanted:
            return None
        if (below | wanted) & full != full or not self._is_parent_below(record, page):
            self._stats.skipped["backup.unreachable"] += 1
            return None
        node = self._obtain(record, page)
        node.copying |= wanted  # which keeps the way to it, too
        copy = self._acquire(node, {group: slot for group, slot in slots.items() if wanted >> group & 1})
        if copy is None:
            node.copying &= ~wanted
            self._index.prune(node)
            self._stats.skipped["backup.no_host_capacity"] += 1
        return copy

    def _is_parent_below(self, record: SlotRecord, page: int) -> bool:
        full = self._index.rule.full_mask
        if not page or not full:
            return True
        parent = self._index.nodes.get(record.keys[page - 1])
        here = 0 if parent is None else parent.masks[Tier.L2] | parent.copying
        return (here | self._in_l3(record, page - 1)) & full == full

    def _obtain(self, record: SlotRecord, page: int) -> Node:
        """The node of a page; what L3 is known to have of it and of its parent is noted there."""
        node = self._index.obtain(record.keys, page)
        self._anchor(record, page)
        for known in filter(None, (node, node.parent)):
            if not known.resident and (groups := self._in_l3(record, known.page)):
                self._index.stored(known, groups)
        return node

    def _acquire(self, node: Node, slots: dict[int, int]) -> _PageCopy | None:
        targets: list[int] = []
        for group in slots:
            handles = self._index.acquire(Tier.L2, group, 1)
            if handles is None:
                for taken, handle in zip(slots, targets, strict=False):
                    self._index.release(Tier.L2, taken, [handle])
                return None
            targets += handles
        return _PageCopy(node, tuple(slots.items()), tuple(targets))

    def _emit(self, record: SlotRecord, save: SlotSave, copies: Sequence[_PageCopy]) -> None:
        sources = {self._use.slot(*source) for copy in copies for source in copy.sources}
        items = tuple(item for copy in copies for item in copy.items())
        job_ids: list[int] = []

        def copied(outcomes: Outcomes) -> None:
            self._use.end(job_ids[0], sources)
            save.slots -= sources
            if save.done and save in record.saves:
                record.saves.remove(save)
            self._copied(copies, outcomes)
            self._loader.go_on()

        save.slots |= sources
        job_ids.append(self._jobs.emit(lambda job_id: CopyJob(job_id, CopyKind.BACKUP, items), copied))
        self._use.begin(job_ids[0], sources, reads=True)

    def _copied(self, copies: Sequence[_PageCopy], outcomes: Outcomes) -> None:
        self._stats.count("backup", (group for copy in copies for group, _ in copy.sources), outcomes)
        position = 0
        stores: list[Node] = []
        for copy in copies:
            page_outcomes = outcomes[position : position + len(copy.sources)]
            position += len(copy.sources)
            if self._land(copy, complete=all(outcome.is_ok for outcome in page_outcomes)):
                stores.append(copy.node)
        self._writer.send_down(stores)

    def _land(self, copy: _PageCopy, *, complete: bool) -> bool:
        node, full = copy.node, self._index.rule.full_mask
        groups = sum(1 << group for group, _ in copy.sources)
        node.copying &= ~groups
        is_whole = complete and (node.masks[Tier.L2] | node.in_l3 | groups) & full == full and self._is_reachable(node)
        for (group, _), target in zip(copy.sources, copy.targets, strict=True):
            if is_whole and node.entries[Tier.L2][group] is None:
                self._index.publish(node, Tier.L2, group, target)
            else:
                self._index.release(Tier.L2, group, [target])
        if not is_whole:
            self._index.prune(node)
        return is_whole

    def _is_reachable(self, node: Node) -> bool:
        """Whether the parent is below by now: its own copy may have failed."""
        parent, full = node.parent, self._index.rule.full_mask
        return parent is None or (parent.masks[Tier.L2] | parent.copying | parent.in_l3) & full == full

    def _touch_path(self, record: SlotRecord, by_page: dict[int, dict[int, int]]) -> None:
        if not by_page:
            return
        node = self._index.nodes.get(record.keys[max(by_page)])
        self._index.touch_path(node)
        self._index.touch(
            entry
            for page in by_page
            if (node := self._index.nodes.get(record.keys[page])) is not None
            for entry in node.entries[Tier.L2]
            if entry is not None
        )
