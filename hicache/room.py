"""Room in L1 and L2: the slots of every group, and which entries are evicted when they run short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from hicache.node import Entry, Node, Tier
from hicache.policies.eviction import EvictionPolicy
from hicache.slots import SlotPool, Slots
from hicache.spec import CacheSpec

_DEPTH_BITS = 24


class Tree(Protocol):
    """What the pages lie in that are evicted here."""

    def retract(self, entry: Entry) -> None:
        """The copy is no more; its slot is released."""
        ...

    def prune(self, node: Node | None) -> None:
        """Forget ``node`` and its parents as far as nothing of them is left."""
        ...


class Room:
    """Owns the slot pools and the queues of what may be evicted; keeps children from being stranded.

    An entry of a full-attention group is the last one of its kind when the page has no copy in the other tier. It goes
    only after everything below the page has gone, and then the whole page goes: the rest could not be reached. Until
    then it is parked.

    What is pinned or held must not go: ``Index`` says so with ``withdraw`` and ``offer``.
    """

    def __init__(
        self,
        spec: CacheSpec,
        full_mask: int,
        capacities: tuple[tuple[int, ...], tuple[int, ...]],
        *,
        eviction: Callable[[Callable[[Entry], int]], EvictionPolicy[Entry]],
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
        self._full_mask = full_mask
        self._tree = tree
        self._last_uses = tuple(_last_path_use if reach is None else _last_use for reach in spec.reach_pages)
        self._eviction = tuple(tuple(eviction(last_use) for last_use in self._last_uses) for _ in Tier)
        self._parked: tuple[tuple[dict[Entry, None], ...], ...] = tuple(tuple({} for _ in spec.groups) for _ in Tier)

    def is_short(self, tier: Tier, group: int, count: int) -> bool:
        """Whether it depends on what may be evicted how ``count`` slots are acquired."""
        return self.pools[tier][group].free_count < count

    def acquire(self, tier: Tier, group: int, count: int) -> list[int] | None:
        """``count`` slots, after evicting as much as that takes; None, when even that is not enough."""
        pool = self.pools[tier][group]
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
        evictable = len(self._eviction[tier][group]) + len(self._parked[tier][group])
        return self.pools[tier][group].free_count + evictable

    # -- what may be evicted -----------------------------------------------------------------------------------------

    def offer(self, entry: Entry | None) -> None:
        """Let the entry be evicted if nobody keeps it. Does nothing when it is waiting for that already."""
        if entry is None or entry.pins or (entry.node.held and self._is_nearest(entry)):
            return
        self._wait(entry)

    def _wait(self, entry: Entry) -> None:
        self._eviction[entry.tier][entry.group].add(entry)

    def withdraw(self, entry: Entry) -> None:
        """The entry may not be evicted any more."""
        self._eviction[entry.tier][entry.group].remove(entry)
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

    def _is_nearest(self, entry: Entry) -> bool:
        """Whether it is the copy of a full-attention object that a hold on the page protects."""
        is_full = self._full_mask >> entry.group & 1
        return bool(is_full) and (entry.tier is Tier.L1 or entry.node.entries[Tier.L1][entry.group] is None)

    # -- eviction ----------------------------------------------------------------------------------------------------

    def _make_room(self, tier: Tier, group: int) -> bool:
        """Evict what shall go first, so that one slot more is free, or closer to it. False when nothing may go."""
        return self._evict_one(tier, group)

    def _evict_one(self, tier: Tier, group: int) -> bool:
        queue, parked = self._eviction[tier][group], self._parked[tier][group]
        while (entry := queue.pop()) is not None:
            node = entry.node
            if not self._is_last(entry):
                self._evict(entry)
                self._tree.prune(node)
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
        self._tree.retract(entry)

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

    @staticmethod
    def _is_busy(node: Node) -> bool:
        pinned = any(entry is not None and entry.pins for entries in node.entries for entry in entries)
        return pinned or bool(node.held or node.copying or node.storing)

    def _drop(self, subtree: Sequence[Node]) -> None:
        for node in reversed(subtree):
            for entries in node.entries:
                for entry in entries:
                    if entry is not None:
                        self._evict(entry)
            self._tree.prune(node)


def _last_use(entry: Entry) -> int:
    """Within one tick the deeper page is the older one, so that children go before parents."""
    return (entry.used_at << _DEPTH_BITS) - entry.node.page


def _last_path_use(entry: Entry) -> int:
    """The same for an object that is used whenever a path through its page is."""
    return (entry.node.used_at << _DEPTH_BITS) - entry.node.page
