"""The writer: copies what L1 publishes down to L2, and from there to L3, ancestors first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hicache.index import Index
from hicache.jobbook import JobBook, Outcomes, batches
from hicache.jobs import CopyItem, CopyJob, CopyKind, LookupItem, LookupJob, StoreJob, TransferItem
from hicache.node import Entry, Node, Tier
from hicache.outcome import Outcome
from hicache.policies.facts import RequestFacts, SuffixFacts
from hicache.policies.write import WritePolicy
from hicache.slots import slot_of
from hicache.stats import DirectoryStats


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """Bounds of the way down. ``store_share`` is the part of each L2 pool that may be on its way to L3 at a time.

    ``retry_interval_s`` is how long nothing is written ahead of need over a leg on which something has failed.
    """

    has_l2: bool
    has_l3: bool
    job_items_max: int = 32
    store_share: float = 0.5
    confirm_interval_s: float = 60.0
    retry_interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class _PageCopy:
    node: Node
    sources: tuple[Entry, ...]  # pinned until the copy ends
    targets: tuple[int, ...]  # L2 handles


class Writer:
    """All groups of a page go down together: the page is published in L2 when each of them has arrived, or not at all.

    A page goes to L3 only after its parent (or with it, in order), so that L3 holds no page that cannot be reached.
    """

    def __init__(
        self, index: Index, jobs: JobBook, policy: WritePolicy, limits: WriterLimits, stats: DirectoryStats
    ) -> None:
        self._index = index
        self._jobs = jobs
        self._policy = policy
        self._limits = limits
        self._stats = stats
        capacities = [pool.capacity for pool in index.pools[Tier.L2]]
        self._storing_max = [max(1, int(limits.store_share * capacity)) for capacity in capacities]
        self._storing = [0] * len(capacities)  # L2 slots on their way to L3, by group
        self._is_write_back = policy.ahead_share > 0
        self._copying = [0] * len(capacities)  # under write-back: L1 slots on their way to L2, by group
        self._bound: set[Node] = set()  # under write-back: pages that shall go to L3, and have not been sent there
        self._paused_until_s = [0.0, 0.0]  # the leg below each tier
        self._queue: OrderedDict[Node, None] = OrderedDict()  # pages that wait for their turn to L3, ancestors first
        self._queue_max = 2 * sum(capacities)  # at most half of it has something in L2

    # -- what goes down ----------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes], *, first_page: int, request: RequestFacts | None) -> bool:
        """A request uses these pages for the first time. Returns whether more may go down because of that."""
        return self._policy.touch(keys, self._facts(first_page, request))

    def admits(self, keys: Sequence[bytes], *, first_page: int, request: RequestFacts | None) -> int:
        """How many of these consecutive pages the policy lets down, of which the first is number ``first_page``."""
        return self._policy.admits(keys, self._facts(first_page, request)) if keys else 0

    def _facts(self, first_page: int, request: RequestFacts | None) -> SuffixFacts:
        index = self._index
        return SuffixFacts(index.now_s, first_page, index.page_tokens, index.page_bytes, index.victim, request)

    def write(self, keys: Sequence[bytes], *, first_page: int, request: RequestFacts | None) -> int:
        """Send down what of these consecutive pages is not below yet, as far as the policy admits them.

        Returns how many need no more looking at: see ``send_down``.
        """
        if not self._limits.has_l2:
            return 0
        nodes = self._index.nodes
        here = next((page for page, key in enumerate(keys) if self._lacks_below(nodes.get(key))), len(keys))
        admitted = here + self.admits(keys[here:], first_page=first_page + here, request=request)
        return self.send_down(node for node in map(nodes.get, keys[:admitted]) if node is not None)

    def note_written(self, groups: Iterable[int]) -> None:
        """An object of each of these groups is being copied down, which counts for the policy."""
        self._policy.wrote(sum(self._stats.object_bytes[group] for group in groups))

    @staticmethod
    def _lacks_below(node: Node | None) -> bool:
        return node is None or bool(node.masks[Tier.L1] & ~(node.masks[Tier.L2] | node.copying | node.in_l3))

    def send_down(self, path: Iterable[Node]) -> int:
        """Send down what of these pages, each after its parent, is not below yet. Returns how many have been seen to.

        Stops at the first page that finds no room, or whose parent is not below: a later call tries again.
        """
        copies: list[_PageCopy] = []
        stores: list[Node] = []
        done = 0
        full = self._index.rule.full_mask
        for node in path:
            parent = node.parent
            if parent is not None and (parent.masks[Tier.L2] | parent.copying | parent.in_l3) & full != full:
                break
            wanted = node.masks[Tier.L1] & ~(node.masks[Tier.L2] | node.copying | node.in_l3)
            if wanted:
                copy = self._prepare(node, wanted)
                if copy is None:
                    self._stats.skipped["backup.no_host_capacity"] += 1
                    break
                copies.append(copy)
            unstored = node.masks[Tier.L2] & ~(node.in_l3 | node.storing)
            if unstored:
                stores.append(node)
            if self._is_write_back and (unstored or node.copying):
                self._bound.add(node)
            done += 1
        self._copy_down(copies)
        self._store(stores)
        return done

    def demote(self, node: Node) -> bool:
        """Copy to L2, and no further, what of a page that is to be evicted from L1 is not below. False without room."""
        wanted = node.masks[Tier.L1] & ~(node.masks[Tier.L2] | node.copying | node.in_l3)
        copy = self._prepare(node, wanted)
        if copy is not None:
            self._copy_down([copy])
        return copy is not None

    def under_way(self, tier: Tier) -> Sequence[int]:
        """Slots of ``tier`` whose bytes are being copied to the tier below, by group."""
        return self._copying if tier is Tier.L1 else self._storing

    @property
    def objects_stored(self) -> int:
        """Objects that L3 has taken since start."""
        return self._stats.objects["store.ok"] + self._stats.objects["store.exists"]

    @property
    def is_storing(self) -> bool:
        """Whether something is on its way to L3."""
        return any(self._storing) or (bool(self._bound) and any(self._copying))

    def is_paused(self, tier: Tier) -> bool:
        """Whether something has just failed on the way down from ``tier``."""
        return self._index.now_s < self._paused_until_s[tier]

    def forget_stranded(self) -> None:
        """With nothing under way, what was to follow something that failed is not waited for."""
        if not (any(self._copying) or any(self._storing)):
            self._bound.clear()

    def resume(self) -> None:
        """Try again whatever has failed."""
        self._paused_until_s = [0.0, 0.0]

    def lacks_in_l3(self, node: Node) -> bool:
        """Whether L3 neither has, nor is about to get, what a page after ``node`` needs of it."""
        full = self._index.rule.full_mask
        return (node.in_l3 | node.storing) & full != full

    # -- L1 to L2 ----------------------------------------------------------------------------------------------------

    def _prepare(self, node: Node, wanted: int) -> _PageCopy | None:
        """Room in L2 for the groups in ``wanted``, all or none, with their sources pinned."""
        sources = tuple(
            self._index.pin(entry) for entry in node.entries[Tier.L1] if entry is not None and wanted >> entry.group & 1
        )
        targets: list[int] = []
        for entry in sources:
            handles = self._index.acquire(Tier.L2, entry.group, 1, patient=True)
            if handles is None:
                for source, handle in zip(sources, targets, strict=False):
                    self._index.release(Tier.L2, source.group, [handle])
                self._index.unpin_all(list(sources))
                return None
            targets += handles
        node.copying |= wanted
        if self._is_write_back:
            self._count_copying(sources, 1)
        return _PageCopy(node, sources, tuple(targets))

    def _copy_down(self, copies: Sequence[_PageCopy]) -> None:
        self.note_written(source.group for copy in copies for source in copy.sources)
        for batch in batches(copies, self._limits.job_items_max):
            self._emit_backup(batch)

    def _emit_backup(self, copies: Sequence[_PageCopy]) -> None:
        items = tuple(
            CopyItem(source.group, slot_of(source.handle), slot_of(target))
            for copy in copies
            for source, target in zip(copy.sources, copy.targets, strict=True)
        )
        self._jobs.emit(
            lambda job_id: CopyJob(job_id, CopyKind.BACKUP, items), lambda outcomes: self._copied(copies, outcomes)
        )

    def _copied(self, copies: Sequence[_PageCopy], outcomes: Outcomes) -> None:
        self._stats.count("backup", (source.group for copy in copies for source in copy.sources), outcomes)
        position = 0
        stores: list[Node] = []
        for copy in copies:
            page_outcomes = outcomes[position : position + len(copy.sources)]
            position += len(copy.sources)
            if not self._land(copy, complete=all(outcome.is_ok for outcome in page_outcomes)):
                self._pause(Tier.L1)
                self._bound.discard(copy.node)
            elif not self._is_write_back or copy.node in self._bound:
                stores.append(copy.node)
        self._store(stores)

    def _land(self, copy: _PageCopy, *, complete: bool) -> bool:
        for source, target in zip(copy.sources, copy.targets, strict=True):
            copy.node.copying &= ~(1 << source.group)
            if complete and copy.node.entries[Tier.L2][source.group] is None:
                self._index.publish(copy.node, Tier.L2, source.group, target)
            else:
                self._index.release(Tier.L2, source.group, [target])
        if self._is_write_back:
            self._count_copying(copy.sources, -1)
        self._index.unpin_all(list(copy.sources))
        return complete

    def _count_copying(self, sources: Sequence[Entry], change: int) -> None:
        for source in sources:
            self._copying[source.group] += change

    # -- L2 to L3 ----------------------------------------------------------------------------------------------------

    def _store(self, nodes: Sequence[Node]) -> None:
        """Queue for L3 what L2 has of ``nodes``, and send what the share of L2 allows."""
        if not self._limits.has_l3:
            return
        self._queue.update(dict.fromkeys(nodes))
        if len(self._queue) > self._queue_max:
            self._queue = OrderedDict.fromkeys(filter(self._unstored, self._queue))
        self._send_queued()

    def _send_queued(self) -> None:
        """First come, first served: a page waits until there is room for all of it, and so do those behind it."""
        entries: list[Entry] = []
        while self._queue:
            node = next(iter(self._queue))
            wanted = self._unstored(node)
            if not self._has_share(wanted):
                break
            del self._queue[node]
            if not wanted:
                continue
            if not self._is_reachable_in_l3(node, wanted):  # its parent will queue it again
                self._stats.skipped["store.unreachable_in_l3"] += 1
                continue
            entries += self._reserve(node, wanted)
            followers = filter(self._unstored, node.children)
            if self._is_write_back:
                if not node.copying:  # what is still on its way to L2 follows
                    self._bound.discard(node)
                followers = filter(self._bound.__contains__, followers)
            self._queue.update(dict.fromkeys(followers))
        for batch in batches(entries, self._limits.job_items_max):
            self._send(batch)

    @staticmethod
    def _unstored(node: Node) -> int:
        """The groups of ``node`` that are in L2, and neither in L3 nor on their way there."""
        return node.masks[Tier.L2] & ~(node.in_l3 | node.storing)

    def _has_share(self, wanted: int) -> bool:
        return not any(
            wanted >> group & 1 and storing >= limit
            for group, (storing, limit) in enumerate(zip(self._storing, self._storing_max, strict=True))
        )

    def _is_reachable_in_l3(self, node: Node, wanted: int) -> bool:
        """Whether L3 has, or is about to get, the parent of ``node``, and all of the page that a prefix needs."""
        full, parent = self._index.rule.full_mask, node.parent
        itself = (node.in_l3 | node.storing | wanted) & full == full
        return itself and (parent is None or (parent.in_l3 | parent.storing) & full == full)

    def _reserve(self, node: Node, wanted: int) -> list[Entry]:
        """The copies in L2 of the groups in ``wanted``, pinned, and counted against the share."""
        entries = [entry for entry in node.entries[Tier.L2] if entry is not None and wanted >> entry.group & 1]
        for entry in entries:
            self._storing[entry.group] += 1
            node.storing |= 1 << entry.group
            self._index.pin(entry)
        return entries

    def _send(self, entries: Sequence[Entry]) -> None:
        items = tuple(TransferItem(entry.group, entry.node.key, slot_of(entry.handle)) for entry in entries)
        self._jobs.emit(lambda job_id: StoreJob(job_id, items), lambda outcomes: self._stored(entries, outcomes))

    def _stored(self, entries: Sequence[Entry], outcomes: Outcomes) -> None:
        self._stats.count("store", (entry.group for entry in entries), outcomes)
        for entry, outcome in zip(entries, outcomes, strict=True):
            node, bit = entry.node, 1 << entry.group
            self._storing[entry.group] -= 1
            node.storing &= ~bit
            if outcome.is_ok:
                self._index.stored(node, bit)
            elif self._is_write_back:
                self._pause(Tier.L2)
            self._index.unpin(entry)
        self._send_queued()

    def _pause(self, tier: Tier) -> None:
        self._paused_until_s[tier] = self._index.now_s + self._limits.retry_interval_s

    # -- what L3 still has -------------------------------------------------------------------------------------------

    def is_under_way(self, node: Node) -> bool:
        """Whether something of ``node`` is being copied, being stored, or waits for its turn to be."""
        return bool(node.copying or node.storing or node in self._queue)

    def confirm(
        self,
        path_backwards: Iterable[Node],
        *,
        interval_s: float | None = None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> bool:
        """Ask L3 whether it still has what it once acknowledged of a path that is used again, and store what is gone.

        Without this L3 would evict what is always found in L1, since it never hears of it, and keep pages below that
        nobody can reach. Asking counts as use there; it is done once per node and ``interval_s``, by default that of
        the limits. Returns whether L3 is asked; then ``on_answer`` is called when it has answered, or could not.
        """
        if not self._limits.has_l3:
            return False
        now_s = self._index.now_s
        latest_s = now_s - (self._limits.confirm_interval_s if interval_s is None else interval_s)
        path = list(path_backwards)
        due = [node for node in path if node.in_l3 and node.confirmed_at_s <= latest_s]
        if not due:
            return False
        path.reverse()
        due.reverse()
        parts = [(node, group) for node in due for group in range(len(self._storing)) if node.in_l3 >> group & 1]
        for node in due:
            node.confirmed_at_s = now_s
        items = tuple(LookupItem(group, node.key) for node, group in parts)
        self._jobs.emit(
            lambda job_id: LookupJob(job_id, items),
            lambda outcomes: self._confirmed(path, parts, outcomes, on_answer),
        )
        return True

    def _confirmed(
        self,
        path: Sequence[Node],
        parts: Sequence[tuple[Node, int]],
        outcomes: Outcomes,
        on_answer: Callable[[], None],
    ) -> None:
        self._stats.count("confirm", (group for _, group in parts), outcomes)
        gone = [part for part, outcome in zip(parts, outcomes, strict=True) if outcome is Outcome.ABSENT]
        for node, group in gone:
            self._index.gone_from_l3(node, 1 << group)
        if gone:
            last = max(node.page for node, _ in parts)
            here = (node for node in path if node.page <= last and self._index.nodes.get(node.key) is node)
            self.send_down(here)
        on_answer()
