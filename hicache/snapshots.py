"""Snapshots of states: where requests stop for them, how live states become snapshots, and which ones go again."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.index import Index
from hicache.jobbook import JobBook, Outcomes
from hicache.jobs import CopyItem, CopyJob, CopyKind
from hicache.node import Node, Tier
from hicache.policies.snapshot import SnapshotPolicy, surplus
from hicache.request import RequestRecord
from hicache.slots import slot_of
from hicache.spec import CacheSpec, StateGroup
from hicache.stats import DirectoryStats
from hicache.writer import Writer


class Snapshots:
    """A live state becomes a snapshot in one of three ways, all state groups together:

    - copied: the live slot into another one, the request goes on in its own;
    - handed over (``double_buffering``): the live slot is the snapshot, the request goes on in a spare slot, and its
      next step reads from the snapshot, which is pinned until ``moved``;
    - donated: the live slot is the snapshot, and the request is over.

    A snapshot is never written to again.
    """

    def __init__(
        self,
        spec: CacheSpec,
        index: Index,
        jobs: JobBook,
        writer: Writer,
        policy: SnapshotPolicy,
        stats: DirectoryStats,
        *,
        double_buffering: bool,
    ) -> None:
        self._index = index
        self._jobs = jobs
        self._writer = writer
        self._policy = policy
        self._stats = stats
        self._double_buffering = double_buffering
        self._page_tokens = spec.page_tokens
        states = [(number, group) for number, group in enumerate(spec.groups) if isinstance(group, StateGroup)]
        self._groups = tuple(number for number, _ in states)
        self._mask = sum(1 << number for number in self._groups)
        self._transient_groups = tuple(
            number for number, group in states if any(field.transient for field in group.fields)
        )
        self._claims: dict[bytes, RequestRecord] = {}  # who is going to stop at a branch point

    # -- where to stop -----------------------------------------------------------------------------------------------

    def next_stop(self, record: RequestRecord, *, computed: int, until: int, ends_at: int | None) -> int | None:
        """See ``Directory.next_state_stop``."""
        if not self._groups:
            return None
        branch_at = self._branch_point(record, computed)
        stop: int | None = computed
        while stop is not None:
            stop = self._policy.next_stop(
                computed=stop,
                until=until,
                prompt_tokens=record.prompt_tokens,
                page_tokens=self._page_tokens,
                branch_at=branch_at,
                ends_at=ends_at,
            )
            if stop is not None and not self._has_snapshot(record, stop):
                self._prepare(record)
                break
        return stop

    def _branch_point(self, record: RequestRecord, computed: int) -> int | None:
        """Where the known attention of the prompt ends, unless that is behind or another request will stop there."""
        branch_at = record.shared_pages * self._page_tokens
        if branch_at <= computed:
            self._unclaim(record)
            return None
        key = record.keys[record.shared_pages - 1]
        if self._claims.setdefault(key, record) is not record:
            return None
        record.claim = key
        return branch_at

    def _unclaim(self, record: RequestRecord) -> None:
        if record.claim is not None:
            del self._claims[record.claim]
            record.claim = None

    def _has_snapshot(self, record: RequestRecord, boundary: int) -> bool:
        """Whether the state of a boundary is here, or on its way; of tokens to come nobody knows."""
        page = boundary // self._page_tokens - 1
        node = self._index.nodes.get(record.keys[page]) if page < len(record.keys) else None
        return node is not None and (node.resident | node.copying) & self._mask == self._mask

    def _prepare(self, record: RequestRecord) -> None:
        """With double buffering, get the slots in which the request can go on: their transient fields are empty.

        Without room for them, or when emptying fails, the next snapshot is a copy.
        """
        if not self._double_buffering or record.spares or record.preparing:
            return
        spares = self._acquire(self._groups)
        if spares is None:
            return
        items = tuple(
            CopyItem(group, slot_of(spares[group]), slot_of(spares[group])) for group in self._transient_groups
        )
        if not items:
            record.spares = spares
            return
        record.preparing = True
        self._jobs.emit(
            lambda job_id: CopyJob(job_id, CopyKind.CLEAR, items),
            lambda outcomes: self._prepared(record, spares, outcomes),
        )

    def _prepared(self, record: RequestRecord, spares: dict[int, int], outcomes: Outcomes) -> None:
        self._stats.count("clear", self._transient_groups, outcomes)
        record.preparing = False
        if record.is_over or not all(outcome.is_ok for outcome in outcomes):
            self._release(spares)
        else:
            record.spares = spares

    # -- how a live state becomes a snapshot -------------------------------------------------------------------------

    def take(self, record: RequestRecord, pages: int) -> None:
        """The live states are those after ``pages`` pages, whose attention is published: keep them, and go on."""
        node, missing = self._missing(record, pages)
        if node is not None and missing:
            keep = self._hand_over if record.spares else self._copy
            keep(record, node, missing)

    def donate(self, record: RequestRecord, pages: int) -> None:
        """The same, of a request that does not go on: it has no live states afterwards. Copies nothing."""
        node, missing = self._missing(record, pages)
        if node is not None and missing:
            for group in missing:
                self._index.publish(node, Tier.L1, group, record.live.pop(group))
            self._count("donate", missing)
            self._taken(record, node)
        record.donated = True
        self.let_go(record)

    def moved(self, record: RequestRecord) -> None:
        """The live states are in the request's own slots: the snapshots that they were read from may go."""
        self._index.touch(record.sources.values())
        self._index.unpin_all(list(record.sources.values()))
        record.sources.clear()

    def let_go(self, record: RequestRecord) -> None:
        """The request is over: live and spare slots, sources and claims are given back. Its path is still kept."""
        self.moved(record)
        if record.has_surplus:
            self._thin(record, record.published_pages)
        self._unclaim(record)
        self._release(record.live)
        self._release(record.spares)
        record.live.clear()
        record.spares.clear()

    def _missing(self, record: RequestRecord, pages: int) -> tuple[Node | None, list[int]]:
        """The state groups that L1 neither has after ``pages`` pages nor is getting; none of the empty state."""
        if not pages or not self._groups:
            return None, []
        node = self._index.obtain(record.keys, pages - 1)
        there = node.masks[Tier.L1] | node.copying
        return node, [group for group in self._groups if not there >> group & 1]

    def _hand_over(self, record: RequestRecord, node: Node, missing: Sequence[int]) -> None:
        for group in missing:
            entry = self._index.publish(node, Tier.L1, group, record.live[group])
            record.sources[group] = self._index.pin(entry)
            record.live[group] = record.spares.pop(group)
        record.sources_at = (node.page + 1) * self._page_tokens
        self._release(record.spares)  # of groups that have a snapshot already
        record.spares.clear()
        self._count("hand_over", missing)
        self._taken(record, node)

    def _copy(self, record: RequestRecord, node: Node, missing: Sequence[int]) -> None:
        """Copy the live state into slots of its own, published when every group's copy is complete."""
        targets = self._acquire(missing)
        if targets is None:
            self._index.prune(node)
            self._stats.skipped["snapshot.no_device_capacity"] += 1
            return
        live = {group: self._index.pools[Tier.L1][group].hold(record.live[group]) for group in missing}
        items = tuple(CopyItem(group, slot_of(live[group]), slot_of(target)) for group, target in targets.items())
        node.copying |= sum(1 << group for group in targets)
        self._jobs.emit(
            lambda job_id: CopyJob(job_id, CopyKind.SNAPSHOT, items),
            lambda outcomes: self._copied(record, node, live, targets, outcomes),
        )

    def _copied(
        self, record: RequestRecord, node: Node, live: dict[int, int], targets: dict[int, int], outcomes: Outcomes
    ) -> None:
        self._stats.count("snapshot", targets, outcomes)
        node.copying &= ~sum(1 << group for group in targets)
        self._release(live)
        if not all(outcome.is_ok for outcome in outcomes):
            self._release(targets)
            self._index.prune(node)
            return
        for group, target in targets.items():
            self._index.publish(node, Tier.L1, group, target)
        self._taken(record, node)

    def _count(self, way: str, groups: Sequence[int]) -> None:
        self._stats.objects[f"{way}.ok"] += len(groups)

    def _acquire(self, groups: Sequence[int]) -> dict[int, int] | None:
        """A slot of L1 in each of ``groups``, or in none."""
        taken: dict[int, int] = {}
        for group in groups:
            handles = self._index.acquire(Tier.L1, group, 1)
            if handles is None:
                self._release(taken)
                return None
            taken[group] = handles[0]
        return taken

    def _release(self, handles: dict[int, int]) -> None:
        for group, handle in handles.items():
            self._index.release(Tier.L1, group, [handle])

    # -- which snapshots go ------------------------------------------------------------------------------------------

    def _taken(self, record: RequestRecord, node: Node) -> None:
        """One snapshot more on the path to ``node``: write it down, and let another one go when there are too many."""
        self._writer.write([node.key], first_page=node.page, request=record.facts)
        self._thin(record, node.page + 1)

    def _thin(self, record: RequestRecord, pages: int) -> None:
        """What was in use and should have gone goes at the end of the request."""
        cap = self._policy.cap_per_path
        if cap is None:
            return
        path = self._index.path(record.keys, pages)
        there = {node.page + 1: node for node in path if node.resident & self._mask}
        in_use = {pages for pages, node in there.items() if self._is_in_use(node)}
        branches = {pages for pages, node in there.items() if len(node.children) > 1}
        gone = surplus(sorted(there), cap=cap, in_use=in_use, branches=branches)
        for pages in gone:
            self._drop(there[pages])
        record.has_surplus = len(there) - len(gone) > cap

    def _is_in_use(self, node: Node) -> bool:
        entries = (copies[group] for copies in node.entries for group in self._groups)
        return bool((node.copying | node.storing) & self._mask) or any(
            entry is not None and entry.pins for entry in entries
        )

    def _drop(self, node: Node) -> None:
        """The state groups of a page leave L1 and L2; L3 keeps what it has."""
        for copies in node.entries:
            for group in self._groups:
                if (entry := copies[group]) is not None:
                    self._index.retract(entry)
        self._stats.snapshots_thinned += 1
        self._index.prune(node)
