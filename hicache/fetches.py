"""Fetches from L3: their room in L2, their jobs, and the publishing of what arrives, page by page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hicache.index import Index
from hicache.jobbook import JobBook, Outcomes, batches
from hicache.jobs import FetchJob, TransferItem
from hicache.node import Node, Tier
from hicache.prefetch_record import Part, Prefetch
from hicache.read_admission import ReadAdmission
from hicache.slots import slot_of
from hicache.stats import DirectoryStats

JOB_ITEMS_MAX = 16  # few enough that the first pages of a long prompt can be used while the last are on their way


class Fetches:
    """Brings parts into L2 within ``l2_share`` of each pool: of what is arriving, and what has arrived and waits for
    its request to load it.

    A page is published in L2 when every object of it that was asked for is settled and its full-attention objects are
    there; a page after one that failed is not published, since it could not be reached.

    What is on its way is not fetched twice: whoever else plans with it waits for it.
    """

    def __init__(
        self,
        index: Index,
        jobs: JobBook,
        stats: DirectoryStats,
        admission: ReadAdmission,
        *,
        l2_share: float,
        on_arrival: Callable[[Prefetch], None],
    ) -> None:
        """``on_arrival``: some of a prefetch has arrived, or has failed to."""
        self._index = index
        self._jobs = jobs
        self._stats = stats
        self._admission = admission
        self._l2_share = l2_share
        self._on_arrival = on_arrival
        self.job_items_max = JOB_ITEMS_MAX
        self.held = [0] * len(index.pools[Tier.L2])  # L2 slots that prefetches hold, by group
        self._coming: dict[tuple[bytes, int], list[Prefetch]] = {}  # (key, group) being fetched: who else waits for it

    def room(self, group: int) -> int:
        """Slots of L2 that one more plan may take."""
        capacity = self._index.pools[Tier.L2][group].capacity
        share = max(1, int(self._l2_share * capacity)) - self.held[group]
        return min(share, self._index.room(Tier.L2, group))

    def has_room(self, parts: Sequence[Part]) -> bool:
        """Whether all of them have room together."""
        return all(sum(g == group for _, g in parts) <= self.room(group) for group in range(len(self.held)))

    def acquire(self, prefetch: Prefetch, parts: Sequence[Part]) -> bool:
        """Take slots for all of them, or none."""
        taken: dict[Part, int] = {}
        for group in range(len(self.held)):
            wanted = [part for part in parts if part[1] == group]
            handles = self._index.acquire(Tier.L2, group, len(wanted), patient=True)
            if handles is None:
                for (_, taken_group), handle in taken.items():
                    self._index.release(Tier.L2, taken_group, [handle])
                return False
            taken.update(zip(wanted, handles, strict=True))
        prefetch.handles |= taken
        for _, group in parts:
            self.held[group] += 1
        return True

    def is_coming(self, prefetch: Prefetch, part: Part) -> bool:
        """Whether somebody fetches it."""
        return (prefetch.keys[part[0]], part[1]) in self._coming

    def coming_mask(self, key: bytes) -> int:
        """The groups of which somebody fetches the object of this page."""
        if not self._coming:
            return 0
        return sum(1 << group for group in range(len(self.held)) if (key, group) in self._coming)

    def wait_for(self, prefetch: Prefetch, parts: Sequence[Part]) -> None:
        """Somebody fetches them for this one too."""
        prefetch.awaited.update(parts)
        for page, group in parts:
            self._coming[prefetch.keys[page], group].append(prefetch)

    def size_bytes(self, parts: Sequence[Part]) -> int:
        """What they are together, over all shards."""
        return sum(self._stats.object_bytes[group] for _, group in parts)

    def begin(self, prefetch: Prefetch, parts: Sequence[Part]) -> None:
        """Fetch into the slots that were acquired, in this order."""
        if not parts:
            return
        prefetch.fetching = self._admission.begin(self.size_bytes(parts))
        for batch in batches(parts, self.job_items_max):
            self._fetch(prefetch, batch)

    def let_go(self, prefetch: Prefetch) -> None:
        """The request takes what it can: what has arrived for it is kept for it no longer."""
        for _, group in prefetch.fetched:
            self.held[group] -= 1
        for keep in prefetch.keeps:
            self._index.let_go(keep)

    def _fetch(self, prefetch: Prefetch, parts: Sequence[Part]) -> None:
        items = tuple(
            TransferItem(group, prefetch.keys[page], slot_of(prefetch.handles[page, group])) for page, group in parts
        )
        self._coming.update(((prefetch.keys[page], group), []) for page, group in parts)
        self._jobs.emit(
            lambda job_id: FetchJob(job_id, items), lambda outcomes: self._fetched(prefetch, parts, outcomes)
        )

    def _fetched(self, prefetch: Prefetch, parts: Sequence[Part], outcomes: Outcomes) -> None:
        self._stats.count("fetch", (group for _, group in parts), outcomes)
        for part, outcome in zip(parts, outcomes, strict=True):
            prefetch.arrived[part] = outcome
            if not outcome.is_ok:
                prefetch.fault = prefetch.fault or outcome
                prefetch.remote[part[0]] &= ~(1 << part[1])
        self._admission.arrived(self.size_bytes(parts))
        if len(prefetch.arrived) == len(prefetch.handles) and prefetch.fetching is not None:
            self._admission.end(prefetch.fetching, set(prefetch.arrived.values()))
            prefetch.fetching = None
            if prefetch.is_probe:
                self._admission.end_probe()
        self._on_arrival(prefetch)

    def publish_in_order(self, prefetch: Prefetch) -> list[Prefetch]:
        """Publish the pages that are settled. Returns those that have waited for something of them."""
        told: list[Prefetch] = []
        while prefetch.next_page < prefetch.target_pages:
            page = prefetch.next_page
            all_parts = [(page, group) for group in range(len(self.held))]
            parts = [part for part in all_parts if part in prefetch.handles]
            if any(part not in prefetch.arrived for part in parts) or not prefetch.awaited.isdisjoint(all_parts):
                break
            if parts:
                self._publish_page(prefetch, page, parts)
                told += [waiting for part in parts for waiting in self._share(prefetch, part)]
            prefetch.next_page += 1
        return told

    def _share(self, prefetch: Prefetch, part: Part) -> list[Prefetch]:
        """A part that was being fetched is here, or has failed: give it to those that wait for it."""
        page, group = part
        key = prefetch.keys[page]
        node = self._index.nodes.get(key)
        entry = None if node is None else node.nearest(group)
        waiting = self._coming.pop((key, group))
        for other in waiting:
            other.awaited.discard(part)
            if entry is None:
                other.has_missed = True
            elif not other.concluded:
                other.shared.add(part)
                other.keeps[-1].entries.append(self._index.pin(entry))
        return waiting

    def _publish_page(self, prefetch: Prefetch, page: int, parts: Sequence[Part]) -> None:
        good = [part for part in parts if prefetch.arrived[part].is_ok]
        node = self._reachable_node(prefetch, page, good)
        for part in parts:
            group, handle = part[1], prefetch.handles[part]
            if node is None or part not in good or node.entries[Tier.L2][group] is not None:
                self.held[group] -= 1
                self._index.release(Tier.L2, group, [handle])
                continue
            entry = self._index.publish(node, Tier.L2, group, handle)
            self._index.stored(node, 1 << group)
            if prefetch.concluded:
                self.held[group] -= 1
            else:
                prefetch.fetched.add(part)
                prefetch.keeps[-1].entries.append(self._index.pin(entry))

    def _reachable_node(self, prefetch: Prefetch, page: int, good: Sequence[Part]) -> Node | None:
        """The node to publish under; None when its parent, or a full-attention object of its own, is not here."""
        nodes, full = self._index.nodes, self._index.rule.full_mask
        if page > prefetch.own_pages and full:
            parent = nodes.get(prefetch.keys[page - 1])
            if parent is None or parent.resident & full != full:
                return None
        present = self._index.resident(prefetch.keys[page]) | sum(1 << group for _, group in good)
        if not good or present & full != full:
            return None
        return self._index.obtain(prefetch.keys, page)
