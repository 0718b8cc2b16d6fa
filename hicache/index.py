"""The index: a tree of pages by block key, and what of each page lies in which tier of this engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum

from hicache.policies.eviction import EvictionPolicy, Lru
from hicache.prefix import PrefixRule
from hicache.slots import SlotPool
from hicache.spec import CacheSpec

_DEPTH_BITS = 24


class Tier(IntEnum):
    """Where a copy lies inside this engine."""

    L1 = 0
    L2 = 1


class Entry:
    """The published copy of one object (page, group) in one tier. The entry holds its slot; a pin forbids eviction."""

    __slots__ = ("group", "handle", "node", "pins", "stamp", "tier")

    def __init__(self, node: Node, tier: Tier, group: int, handle: int) -> None:
        self.node = node
        self.tier = tier
        self.group = group
        self.handle = handle
        self.pins = 0
        self.stamp = 0


class Node:
    """One page of tokens, known by its block key. Exists as long as something of it, or below it, is here."""

    __slots__ = (
        "children",
        "confirmed_at_s",
        "copying",
        "entries",
        "has_parked",
        "in_l3",
        "key",
        "masks",
        "page",
        "parent",
        "resident",
        "storing",
    )

    def __init__(self, key: bytes, parent: Node | None, page: int, group_count: int) -> None:
        self.key = key
        self.parent = parent
        self.page = page
        self.children: set[Node] = set()
        self.entries: tuple[list[Entry | None], list[Entry | None]] = ([None] * group_count, [None] * group_count)
        self.masks = [0, 0]  # by tier: groups that are published there
        self.resident = 0  # masks[L1] | masks[L2]
        self.copying = 0  # groups whose copy to L2, or whose snapshot, is under way
        self.storing = 0  # groups whose copy to L3 is under way
        self.in_l3 = 0  # groups that L3 has acknowledged, as far as we have heard
        self.confirmed_at_s = 0.0  # when L3 last said so, or was asked
        self.has_parked = False  # entries of it would be evictable but for what is below or under way


class Index:
    """Owns nodes, entries and slot pools; keeps children from being stranded.

    An entry of a full-attention group is the last one of its kind when the page has no copy in the other tier. It goes
    only after everything below the page has gone, and then the whole page goes: the rest could not be reached.
    """

    def __init__(
        self,
        spec: CacheSpec,
        capacities: tuple[tuple[int, ...], tuple[int, ...]],
        *,
        eviction: Callable[[], EvictionPolicy[Entry]] = Lru,
    ) -> None:
        self.rule = PrefixRule(spec)
        self.nodes: dict[bytes, Node] = {}
        self.pools = tuple(
            tuple(
                SlotPool(capacity, name=f"{tier.name}.{group.name}")
                for group, capacity in zip(spec.groups, capacities[tier], strict=True)
            )
            for tier in Tier
        )
        self.now_s = 0.0  # as the last caller told
        self.evicted = [[0] * len(spec.groups) for _ in Tier]  # entries evicted so far, by tier and group
        self._eviction = tuple(tuple(eviction() for _ in spec.groups) for _ in Tier)
        self._parked: tuple[tuple[dict[Entry, None], ...], ...] = tuple(tuple({} for _ in spec.groups) for _ in Tier)
        self._group_count = len(spec.groups)
        self._tick = 0

    # -- nodes -------------------------------------------------------------------------------------------------------

    def masks(self, keys: Sequence[bytes]) -> Iterator[int]:
        """What is resident of each page, up to the first page after which no prefix can be legal."""
        get, full = self.nodes.get, self.rule.full_mask
        for key in keys:
            node = get(key)
            if node is None and full:
                return
            yield 0 if node is None else node.resident

    def obtain(self, keys: Sequence[bytes], page: int) -> Node:
        """The node of ``keys[page]``, made when there is none; ``keys`` are a sequence's, from its first page on.

        Its parent is here when the spec has full-attention groups. Without them pages stand alone.
        """
        node = self.nodes.get(keys[page])
        if node is None:
            parent = self.nodes[keys[page - 1]] if page and self.rule.full_mask else None
            node = self.nodes[keys[page]] = Node(keys[page], parent, page, self._group_count)
            if parent is not None:
                parent.children.add(node)
        return node

    def prune(self, node: Node | None) -> None:
        """Forget ``node`` when nothing of it is here, under way or below it; then its parents likewise."""
        while node is not None and not (node.resident or node.children or node.copying or node.storing):
            del self.nodes[node.key]
            parent = node.parent
            if parent is not None:
                parent.children.discard(node)
                self._wake(parent)
            node = parent

    # -- entries -----------------------------------------------------------------------------------------------------

    def publish(self, node: Node, tier: Tier, group: int, handle: int) -> Entry:
        """A complete copy lies in ``handle``, which the entry takes over from the caller. There was none before."""
        assert node.entries[tier][group] is None, "an object is published once in a tier"
        entry = Entry(node, tier, group, handle)
        entry.stamp = self.stamp(node)
        node.entries[tier][group] = entry
        node.masks[tier] |= 1 << group
        node.resident |= 1 << group
        self._eviction[tier][group].add(entry, entry.stamp)
        self._wake(node)
        return entry

    def retract(self, entry: Entry) -> None:
        """The copy is no more; its slot is released (it is reused when nothing else holds it)."""
        node, bit = entry.node, 1 << entry.group
        self._eviction[entry.tier][entry.group].remove(entry)
        self._parked[entry.tier][entry.group].pop(entry, None)
        node.entries[entry.tier][entry.group] = None
        node.masks[entry.tier] &= ~bit
        node.resident = node.masks[Tier.L1] | node.masks[Tier.L2]
        self.pools[entry.tier][entry.group].release(entry.handle)

    def pin(self, entry: Entry) -> Entry:
        """Keep the entry from eviction until as many ``unpin``."""
        if entry.pins == 0:
            self._eviction[entry.tier][entry.group].remove(entry)
            self._parked[entry.tier][entry.group].pop(entry, None)
        entry.pins += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        """The reverse of ``pin``."""
        assert entry.pins > 0, "an entry is unpinned as often as it was pinned"
        entry.pins -= 1
        if entry.pins == 0:
            self._eviction[entry.tier][entry.group].add(entry, entry.stamp)
            self._wake(entry.node)

    def nearest(self, key: bytes, group: int) -> Entry:
        """The copy of a resident object that takes the least to use."""
        node = self.nodes[key]
        entry = node.entries[Tier.L1][group] or node.entries[Tier.L2][group]
        assert entry is not None, "the object is resident"
        return entry

    def unpin_all(self, entries: list[Entry]) -> None:
        """Unpin every entry of a list and empty it."""
        for entry in entries:
            self.unpin(entry)
        entries.clear()

    def touch(self, entries: Iterable[Entry]) -> None:
        """The objects behind these entries, all of one path, are in use now, in whichever tiers they are."""
        self._tick += 1
        for used in entries:
            for copies in used.node.entries:
                entry = copies[used.group]
                if entry is None:
                    continue
                entry.stamp = self.stamp(entry.node)
                if entry.pins == 0:
                    self._eviction[entry.tier][entry.group].add(entry, entry.stamp)

    def stamp(self, node: Node) -> int:
        """A time of last use. Within one tick the deeper page is the older one, so that children go before parents."""
        return (self._tick << _DEPTH_BITS) - node.page

    # -- space -------------------------------------------------------------------------------------------------------

    def acquire(self, tier: Tier, group: int, count: int) -> list[int] | None:
        """``count`` slots, after evicting as much as that takes; None, when even that is not enough."""
        pool = self.pools[tier][group]
        while pool.free_count < count:
            if not self._evict_one(tier, group):
                return None
        return pool.acquire(count)

    def release(self, tier: Tier, group: int, handles: Iterable[int | None]) -> None:
        """Give up slots, those that are None excepted."""
        pool = self.pools[tier][group]
        for handle in handles:
            if handle is not None:
                pool.release(handle)

    def room(self, tier: Tier, group: int) -> int:
        """At most so many slots can be acquired now."""
        evictable = len(self._eviction[tier][group]) + len(self._parked[tier][group])
        return self.pools[tier][group].free_count + evictable

    def _evict_one(self, tier: Tier, group: int) -> bool:
        queue, parked = self._eviction[tier][group], self._parked[tier][group]
        while (entry := queue.pop()) is not None:
            node = entry.node
            if not self._is_last(entry):
                self._evict(entry)
                self.prune(node)
                return True
            if not node.children and not self._is_busy(node):
                self._drop([node])
                return True
            parked[entry] = None
            node.has_parked = True
        idle: dict[Node, bool] = {}
        for entry in parked:  # only pages with something below them are left: they go with all of it
            if self._is_idle(entry.node, idle):
                self._drop(self._subtree(entry.node))
                return True
        return False

    def _is_idle(self, top: Node, known: dict[Node, bool]) -> bool:
        """Whether neither ``top`` nor anything below it is busy. ``known`` keeps answers, so that many calls together
        look at each node once."""
        stack = [top]
        while stack:
            node = stack[-1]
            if unknown := [child for child in node.children if child not in known]:
                stack += unknown
                continue
            known[node] = not self._is_busy(node) and all(known[child] for child in node.children)
            stack.pop()
        return known[top]

    def _evict(self, entry: Entry) -> None:
        self.evicted[entry.tier][entry.group] += 1
        self.retract(entry)

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
        return bool(self.rule.full_mask & bit) and not other & bit

    @staticmethod
    def _is_busy(node: Node) -> bool:
        pinned = any(entry is not None and entry.pins for entries in node.entries for entry in entries)
        return pinned or bool(node.copying or node.storing)

    def _drop(self, subtree: Sequence[Node]) -> None:
        for node in reversed(subtree):
            for entries in node.entries:
                for entry in entries:
                    if entry is not None:
                        self._evict(entry)
            self.prune(node)

    def _wake(self, node: Node) -> None:
        """Something about ``node`` changed: what was parked may be evictable now."""
        if not node.has_parked:
            return
        node.has_parked = False
        for tier in Tier:
            for group, entry in enumerate(node.entries[tier]):
                if entry is not None and entry in self._parked[tier][group]:
                    del self._parked[tier][group][entry]
                    if entry.pins == 0:
                        self._eviction[tier][group].add(entry, entry.stamp)
