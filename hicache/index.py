"""The index: a tree of pages by block key, and what of each page lies in which tier of this engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from hicache.node import Entry, Keep, Node, Tier
from hicache.policies.eviction import EvictionPolicy, Lru
from hicache.prefix import PrefixRule
from hicache.slots import SlotPool
from hicache.spec import CacheSpec

_DEPTH_BITS = 24


class Index:
    """Owns nodes, entries and slot pools; keeps children from being stranded.

    An entry of a full-attention group is the last one of its kind when the page has no copy in the other tier. It goes
    only after everything below the page has gone, and then the whole page goes: the rest could not be reached.

    So whoever keeps a page keeps the way to it: a hold on the deepest page of a path protects the path. Holds are
    noted, and go up the tree only when somebody asks what may be evicted; each page counts its held children, and a
    hold stops at the first page that was held before.
    """

    def __init__(
        self,
        spec: CacheSpec,
        capacities: tuple[tuple[int, ...], tuple[int, ...]],
        *,
        eviction: Callable[[Callable[[Entry], int]], EvictionPolicy[Entry]] = Lru,
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
        self._full_groups = tuple(group for group, reach in enumerate(spec.reach_pages) if reach is None)
        orders = [_last_path_use if reach is None else _last_use for reach in spec.reach_pages]
        self._eviction = tuple(tuple(eviction(order) for order in orders) for _ in Tier)
        self._parked: tuple[tuple[dict[Entry, None], ...], ...] = tuple(tuple({} for _ in spec.groups) for _ in Tier)
        self._pending: dict[Node, int] = {}  # holds that have come and gone and are not yet counted in ``Node.held``
        self._group_count = len(spec.groups)
        self._tick = 0

    # -- nodes -------------------------------------------------------------------------------------------------------

    def attention_pages(self, keys: Sequence[bytes]) -> int:
        """Leading pages that have all full-attention objects here; 0 without such groups. O(log n) look-ups.

        No page is here without all pages before it, so the last one can be searched for by halves.
        """
        full = self.rule.full_mask
        if not full or not keys:
            return 0
        if self.resident(keys[-1]) & full == full:
            return len(keys)
        return bisect_left(keys, x=True, key=lambda key: self.resident(key) & full != full)

    def resident(self, key: bytes) -> int:
        """The groups that are here of a page, in whichever tier, as a mask."""
        node = self.nodes.get(key)
        return 0 if node is None else node.resident

    def match(self, keys: Sequence[bytes]) -> int:
        """The longest usable prefix, in pages."""
        pages = self.attention_pages(keys) if self.rule.full_mask else len(keys)
        if not self.rule.partial:
            return pages
        if self.rule.full_mask:
            return self.rule.longest(pages, (node.resident for node in self.path(keys, pages)))
        return self.rule.longest(pages, map(self.resident, reversed(keys)))

    def path(self, keys: Sequence[bytes], pages: int) -> Iterator[Node]:
        """What is here of the pages of a usable prefix, from its end to its first page."""
        if not self.rule.full_mask:
            return filter(None, map(self.nodes.get, reversed(keys[:pages])))
        return path_from(self.nodes[keys[pages - 1]] if pages else None)

    def off_device_pages(self, end: Node | None) -> int:
        """Pages of the path that ends at ``end`` whose full-attention objects are not all in L1."""
        full = self.rule.full_mask
        count = 0
        while end is not None:
            if end.masks[0] & full != full:
                count += 1
            end = end.parent
        return count

    def obtain(self, keys: Sequence[bytes], page: int) -> Node:
        """The node of ``keys[page]``, made when there is none; ``keys`` are a sequence's, from its first page on.

        Its parent is here when the spec has full-attention groups. Without them pages stand alone.
        """
        node = self.nodes.get(keys[page])
        if node is None:
            parent = self.nodes[keys[page - 1]] if page and self.rule.full_mask else None
            node = self.nodes[keys[page]] = Node(keys[page], parent, page, self._group_count, self._tick)
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
        entry.used_at = self._tick
        node.entries[tier][group] = entry
        node.masks[tier] |= 1 << group
        node.resident |= 1 << group
        self._wake(node)
        for copies in node.entries:  # the copy in the other tier may not be the nearest one any more
            self._offer(copies[group])
        return entry

    def retract(self, entry: Entry) -> None:
        """The copy is no more; its slot is released (it is reused when nothing else holds it)."""
        node, bit = entry.node, 1 << entry.group
        self._withdraw(entry)
        node.entries[entry.tier][entry.group] = None
        node.masks[entry.tier] &= ~bit
        node.resident = node.masks[Tier.L1] | node.masks[Tier.L2]
        self.pools[entry.tier][entry.group].release(entry.handle)

    def pin(self, entry: Entry) -> Entry:
        """Keep the entry from eviction until as many ``unpin``."""
        if entry.pins == 0:
            self._withdraw(entry)
        entry.pins += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        """The reverse of ``pin``."""
        assert entry.pins > 0, "an entry is unpinned as often as it was pinned"
        entry.pins -= 1
        if entry.pins == 0:
            self._offer(entry)
            self._wake(entry.node)

    def _offer(self, entry: Entry | None) -> None:
        """Let the entry be evicted if nobody keeps it. Does nothing when it is waiting for that already."""
        if entry is None or entry.pins or (entry.node.held and self._is_nearest(entry)):
            return
        self._eviction[entry.tier][entry.group].add(entry)

    def _is_nearest(self, entry: Entry) -> bool:
        """Whether it is the copy of a full-attention object that a hold on the page protects."""
        is_full = self.rule.full_mask >> entry.group & 1
        return bool(is_full) and (entry.tier is Tier.L1 or entry.node.entries[Tier.L1][entry.group] is None)

    def unpin_all(self, entries: list[Entry]) -> None:
        """Unpin every entry of a list and empty it."""
        for entry in entries:
            self.unpin(entry)
        entries.clear()

    def touch(self, entries: Iterable[Entry]) -> None:
        """The objects behind these entries are in use now, in whichever tiers they are."""
        self._tick += 1
        for used in entries:
            for copies in used.node.entries:
                if (entry := copies[used.group]) is not None:
                    entry.used_at = self._tick

    def touch_path(self, node: Node | None) -> None:
        """The full-attention objects of the path that ends at ``node`` are in use now, in whichever tiers they are."""
        self._tick += 1
        while node is not None:  # written out, as in off_device_pages: it is done for every page of every request
            node.used_at = self._tick
            node = node.parent

    # -- paths -------------------------------------------------------------------------------------------------------

    def keep(self, keys: Sequence[bytes], pages: int) -> Keep:
        """Keep what is here of all that a prefix of ``pages`` pages needs, until ``let_go``."""
        parts = ((self.nodes.get(keys[page]), group) for page, group in self.rule.needed_partial(pages))
        entries = (node.nearest(group) for node, group in parts if node is not None)
        keep = Keep(entries=[self.pin(entry) for entry in entries if entry is not None])
        if reached := self.attention_pages(keys[:pages]):
            self.hold(keep, self.nodes[keys[reached - 1]])
        return keep

    def hold(self, keep: Keep, node: Node | None) -> None:
        """Keep the path that ends at ``node``, and no longer the one that ``keep`` held."""
        for end, change in ((node, 1), (keep.path, -1)):
            if end is not None:
                self._pending[end] = self._pending.get(end, 0) + change
                if not self._pending[end]:
                    del self._pending[end]
        keep.path = node

    def let_go(self, keep: Keep) -> None:
        """Everything in it may be evicted again, as far as nobody else keeps it."""
        self.hold(keep, None)
        self.unpin_all(keep.entries)

    def settle(self) -> None:
        """Count the holds that have come and gone, so that the queues hold exactly what may be evicted.

        O(pages that are held now and were not before, or the reverse).
        """
        pending, self._pending = self._pending, {}
        for node, change in sorted(pending.items(), key=lambda item: -item[1]):  # what comes first, what goes after
            self._count_hold(node, change)

    def _count_hold(self, end: Node, change: int) -> None:
        node: Node | None = end
        while node is not None:
            was_held = node.held
            node.held += change
            assert node.held >= 0, "a path is let go as often as it was kept"
            if bool(was_held) == bool(node.held):
                return
            for group in self._full_groups:
                entry = node.nearest(group)
                assert entry is not None, "what is held is here"
                self._withdraw(entry) if node.held else self._offer(entry)
            if node.held:
                node.used_at = self._tick
                change = 1
            else:
                self._wake(node)
                change = -1
            node = node.parent

    def _withdraw(self, entry: Entry) -> None:
        self._eviction[entry.tier][entry.group].remove(entry)
        self._parked[entry.tier][entry.group].pop(entry, None)

    # -- space -------------------------------------------------------------------------------------------------------

    def acquire(self, tier: Tier, group: int, count: int) -> list[int] | None:
        """``count`` slots, after evicting as much as that takes; None, when even that is not enough."""
        pool = self.pools[tier][group]
        if pool.free_count < count:
            self.settle()
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
        self.settle()
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
        return pinned or bool(node.held or node.copying or node.storing)

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
                    self._offer(entry)


def path_from(end: Node | None) -> Iterator[Node]:
    """The pages of the path that ends at ``end``, from there to its first one."""
    while end is not None:
        yield end
        end = end.parent


def _last_use(entry: Entry) -> int:
    """Within one tick the deeper page is the older one, so that children go before parents."""
    return (entry.used_at << _DEPTH_BITS) - entry.node.page


def _last_path_use(entry: Entry) -> int:
    """The same for an object that is used whenever a path through its page is."""
    return (entry.node.used_at << _DEPTH_BITS) - entry.node.page
