"""Room in L1 and L2: the slots of every group, and which entries are evicted when they run short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hicache.entry_facts import EntryFacts
from hicache.node import Entry, Node, Tier
from hicache.policies.eviction import EvictionFactory, EvictionPolicy
from hicache.policies.facts import EvictionFacts, RequestFacts
from hicache.slots import SlotPool, Slots
from hicache.spec import CacheSpec


class Tree(Protocol):
    """What the pages lie in that are evicted here."""

    now_s: float

    def retract(self, entry: Entry) -> None:
        """The copy is no more; its slot is released."""
        ...

    def prune(self, node: Node | None) -> None:
        """Forget ``node`` and its parents as far as nothing of them is left."""
        ...


@dataclass(frozen=True, slots=True)
class WrittenRule:
    """Where objects are written to below L2, whether what is not yet written is spared, and what is counted."""

    has_l3: bool
    spares_unwritten: bool
    lost: Counter[str]  # tokens that were evicted unwritten, by "<tier>.<group>"


class Room:
    """Owns the slot pools and the queues of what may be evicted; keeps children from being stranded.

    An entry of a full-attention group is the last one of its kind when the page has no copy in the other tier. It goes
    only after everything below the page has gone, and then the whole page goes: the rest could not be reached. Until
    then it is parked.

    What is pinned or held must not go: ``Index`` says so with ``withdraw`` and ``offer``. When it spares what has not
    been written to a lower tier, such entries wait in queues of their own, and go only when the caller may lose them.
    """

    def __init__(
        self,
        spec: CacheSpec,
        full_mask: int,
        capacities: tuple[tuple[int, ...], tuple[int, ...]],
        written: WrittenRule,
        *,
        eviction: EvictionFactory,
        tree: Tree,
    ) -> None:
        self.pools: tuple[tuple[Slots, ...], ...] = tuple(
            tuple(
                SlotPool(capacity, name=f"{tier.name}.{group.name}")
                for group, capacity in zip(spec.groups, capacities[tier], strict=True)
            )
            for tier in Tier
        )
        self.evicted = [[0] * len(spec.groups) for _ in Tier]  # entries evicted so far, by tier and group
        self._lost = written.lost
        self._lost_names = [[f"{tier.name.lower()}.{group.name}" for group in spec.groups] for tier in Tier]
        self._page_tokens = spec.page_tokens
        self.spares_unwritten = written.spares_unwritten
        self._may_lose = True  # whether the ``acquire`` under way may evict what is unwritten
        self._has_below = (any(capacities[Tier.L2]), written.has_l3)
        self._full_mask = full_mask
        self._tree = tree
        entries = tuple(EntryFacts(spec, group, tree) for group in range(len(spec.groups)))
        self._facts = entries
        self._last_uses = tuple(facts.last_use for facts in entries)
        self._eviction = tuple(tuple[EvictionPolicy[Entry], ...](map(eviction, entries)) for _ in Tier)
        self._unwritten = tuple(tuple[EvictionPolicy[Entry], ...](map(eviction, entries)) for _ in Tier)
        self.watches_use = any(policy.watches_use for policy in self._eviction[Tier.L1])
        self._parked: tuple[tuple[dict[Entry, None], ...], ...] = tuple(tuple({} for _ in spec.groups) for _ in Tier)

    def is_short(self, tier: Tier, group: int, count: int) -> bool:
        """Whether it depends on what may be evicted how ``count`` slots are acquired."""
        return self.pools[tier][group].free_count < count

    def acquire(self, tier: Tier, group: int, count: int, *, may_lose: bool = True) -> list[int] | None:
        """``count`` slots, after evicting as much as that takes; None, when even that is not enough.

        What has been written goes first; what has not goes only when it ``may_lose`` that.
        """
        pool = self.pools[tier][group]
        self._may_lose = may_lose or not self.spares_unwritten
        while pool.free_count < count:
            if not self._make_room(tier, group):
                return None
        return pool.acquire(count)

    def release(self, tier: Tier, group: int, handles: Iterable[int | None]) -> None:
        """Give up slots, those that are None excepted."""
        pool = self.pools[tier][group]
        for handle in handles:
            if handle is not None:
                pool.release(handle)

    def available(self, tier: Tier, group: int) -> int:
        """At most so many slots can be acquired."""
        return self.written(tier, group) + len(self._unwritten[tier][group]) + len(self._parked[tier][group])

    def written(self, tier: Tier, group: int) -> int:
        """Slots that are free, or whose entry may be evicted and is not spared."""
        return self.pools[tier][group].free_count + len(self._eviction[tier][group])

    def victim(self, tier: Tier, group: int) -> EvictionFacts | None:
        """What would be evicted for one more slot; None while there is room, or nothing may go alone."""
        if self.pools[tier][group].free_count:
            return None
        entry = self._eviction[tier][group].first() or self._unwritten[tier][group].first()
        return None if entry is None else self._facts[group].facts(entry)

    def note_use(self, entry: Entry, request: RequestFacts) -> None:
        """A request has found ``entry``. To be called where ``watches_use``."""
        for queues in (self._eviction, self._unwritten):
            queues[entry.tier][entry.group].used(entry)
        entry.uses += 1
        entry.used_s = request.at_s
        entry.last = request

    # -- what may be evicted -----------------------------------------------------------------------------------------

    def offer(self, entry: Entry | None) -> None:
        """Let the entry be evicted if nobody keeps it. Does nothing when it is waiting for that already."""
        if entry is None or entry.pins or (entry.node.held and self._is_nearest(entry)):
            return
        self._wait(entry)

    def _wait(self, entry: Entry) -> None:
        queue = self._eviction[entry.tier][entry.group]
        if self.spares_unwritten:
            other = self._unwritten[entry.tier][entry.group]
            if self.is_unwritten(entry):
                queue, other = other, queue
            other.remove(entry)
        queue.add(entry)

    def withdraw(self, entry: Entry) -> None:
        """The entry may not be evicted any more."""
        self._eviction[entry.tier][entry.group].remove(entry)
        if self.spares_unwritten:
            self._unwritten[entry.tier][entry.group].remove(entry)
        self._parked[entry.tier][entry.group].pop(entry, None)

    def wake(self, node: Node) -> None:
        """Something about ``node`` changed: what was parked may be evictable now."""
        if not node.has_parked:
            return
        node.has_parked = False
        for tier in Tier:
            for group, entry in enumerate(node.entries[tier]):
                if entry is not None and entry in self._parked[tier][group]:
                    del self._parked[tier][group][entry]
                    self.offer(entry)

    def is_unwritten(self, entry: Entry) -> bool:
        """Whether the object would not be in any lower tier without this copy, where there is a lower one."""
        node = entry.node
        below = node.in_l3 | (node.masks[Tier.L2] if entry.tier is Tier.L1 else 0)
        return self._has_below[entry.tier] and not below >> entry.group & 1

    def resort(self, node: Node) -> None:
        """What lower tiers have of ``node`` has changed: its entries may have to wait in other queues.

        To be called where what is unwritten is spared.
        """
        for entries in node.entries:
            for entry in entries:
                if entry is not None and entry not in self._parked[entry.tier][entry.group]:
                    self.offer(entry)
        self.wake(node)

    def next_unwritten(self, tier: Tier, group: int) -> Entry | None:
        """Take the unwritten entry out that would be evicted first. The caller pins it, and unpins it when it likes."""
        if (entry := self._unwritten[tier][group].first()) is not None:
            self._unwritten[tier][group].remove(entry)
            return entry
        parked = self._parked[tier][group]
        for entry in parked:
            if any(copy is not None and self._is_left_to_write(copy) for copy in entry.node.entries[tier]):
                del parked[entry]
                return entry
        return None

    def _is_left_to_write(self, entry: Entry) -> bool:
        node = entry.node
        under_way = node.copying if entry.tier is Tier.L1 else node.storing
        return self.is_unwritten(entry) and not under_way >> entry.group & 1

    def _is_nearest(self, entry: Entry) -> bool:
        """Whether it is the copy of a full-attention object that a hold on the page protects."""
        is_full = self._full_mask >> entry.group & 1
        return bool(is_full) and (entry.tier is Tier.L1 or entry.node.entries[Tier.L1][entry.group] is None)

    # -- eviction ----------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Evict what the policy does not want to keep, though there is room."""
        queues = [queue for kind in (self._eviction, self._unwritten) for tier in kind for queue in tier]
        while any(self._expire(queue) for queue in queues):  # what has gone may have been in the way of something
            pass

    def _expire(self, queue: EvictionPolicy[Entry]) -> bool:
        has_evicted = False
        while (entry := queue.expired(self._tree.now_s)) is not None:
            has_evicted |= self._evict_or_park(queue, entry)
        return has_evicted

    def _make_room(self, tier: Tier, group: int) -> bool:
        """Evict what shall go first, so that one slot more is free, or closer to it. False when nothing may go."""
        return self._evict_one(tier, group)

    def _evict_one(self, tier: Tier, group: int) -> bool:
        return (
            self._evict_oldest(self._eviction[tier][group])
            or (self._may_lose and self._evict_oldest(self._unwritten[tier][group]))
            or self._evict_subtree(self._parked[tier][group])
        )

    def _evict_oldest(self, queue: EvictionPolicy[Entry]) -> bool:
        """Evict the first one of a queue that can go without anything below its page; park those before it."""
        while (entry := queue.first()) is not None:
            if self._evict_or_park(queue, entry):
                return True
        return False

    def _evict_or_park(self, queue: EvictionPolicy[Entry], first: Entry) -> bool:
        """The first one of a queue goes, or is parked."""
        node = first.node
        is_last = self._is_last(first)
        if is_last and (node.children or self._is_kept(node)):
            queue.remove(first)
            self._parked[first.tier][first.group][first] = None
            node.has_parked = True
            return False
        queue.pop()
        if is_last:
            self._drop([node])
        else:
            self._evict(first)
            self._tree.prune(node)
        return True

    def _evict_subtree(self, parked: Iterable[Entry]) -> bool:
        """Evict a page with all that is below it: only such pages are parked."""
        idle: dict[Node, bool] = {}
        for entry in parked:
            if self._is_idle(entry.node, idle):
                self._drop(self._subtree(entry.node))
                return True
        return False

    def _is_idle(self, top: Node, known: dict[Node, bool]) -> bool:
        """Whether neither ``top`` nor anything below it is kept. ``known`` keeps answers, so that many calls together
        look at each node once."""
        stack = [top]
        while stack:
            node = stack[-1]
            if unknown := [child for child in node.children if child not in known]:
                stack += unknown
                continue
            known[node] = not self._is_kept(node) and all(known[child] for child in node.children)
            stack.pop()
        return known[top]

    def _evict(self, entry: Entry) -> None:
        self.evicted[entry.tier][entry.group] += 1
        if not entry.node.in_l3 >> entry.group & 1:
            self._count_lost(entry)
        self._tree.retract(entry)

    def _count_lost(self, entry: Entry) -> None:
        is_in_l1 = entry.tier is Tier.L2 and entry.node.masks[Tier.L1] >> entry.group & 1
        if self.is_unwritten(entry) and not is_in_l1:
            self._lost[self._lost_names[entry.tier][entry.group]] += self._page_tokens

    @staticmethod
    def _subtree(node: Node) -> list[Node]:
        """``node`` and all below it, parents before children."""
        nodes = [node]
        for visited in nodes:
            nodes += visited.children
        return nodes

    def _is_last(self, entry: Entry) -> bool:
        bit = 1 << entry.group
        other = entry.node.masks[1 - entry.tier]
        return bool(self._full_mask & bit) and not other & bit

    def _is_evictable(self, entry: Entry, known: dict[Node, bool]) -> bool:
        """Whether the entry, with all that would be stranded by that, may be evicted by the ``acquire`` under way."""
        if self._is_last(entry):
            return self._is_idle(entry.node, known)
        return self._may_lose or not self.is_unwritten(entry)

    def _is_kept(self, node: Node) -> bool:
        """Whether something of it is in use, or spared."""
        if self._may_lose:
            return self._is_busy(node)
        return self._is_busy(node) or any(
            self.is_unwritten(entry) for entries in node.entries for entry in entries if entry is not None
        )

    @staticmethod
    def _is_busy(node: Node) -> bool:
        if node.held or node.copying or node.storing:
            return True
        for entries in node.entries:  # written out: it is asked for each page that goes
            for entry in entries:
                if entry is not None and entry.pins:
                    return True
        return False

    def _drop(self, subtree: Sequence[Node]) -> None:
        for node in reversed(subtree):
            copies = [entry for entries in node.entries for entry in entries if entry is not None]
            for entry in copies:
                self._evict(entry)
            if copies:  # else it has gone with the last page below it, or is none of those that go
                self._tree.prune(node)
