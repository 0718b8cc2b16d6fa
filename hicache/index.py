"""The index: a tree of pages by block key, and what of each page lies in which tier of this engine."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from hicache.arena import ArenaLayout
from hicache.arena_room import ArenaRoom
from hicache.node import Entry, Keep, Node, Tier, path_from
from hicache.page_changes import PageChange, PageChanges, Place
from hicache.policies.eviction import EvictionFactory
from hicache.policies.eviction_choice import lru
from hicache.policies.facts import EvictionFacts, RequestFacts
from hicache.prefix import PrefixRule
from hicache.room import Room, WrittenRule
from hicache.spec import CacheSpec, StateGroup


class WriteAhead(Protocol):
    """Writes down what would be evicted."""

    def make_room(self, tier: Tier, group: int, count: int) -> bool:
        """Write down so much that ``count`` slots come free. Whether something that helps is under way."""
        ...


class Index:
    """Owns nodes, entries and holds; what may be evicted to make room, and goes then, is up to ``Room``.

    Nothing below a page is kept without the page, so whoever keeps a page keeps the way to it: a hold on the deepest
    page of a path protects the path. Holds are noted, and go up the tree only when somebody asks what may be evicted;
    each page counts its held children, and a hold stops at the first page that was held before.

    With ``has_gaps`` a page may be here whose ancestors are not: the engine has them itself, or L3 has. Their nodes
    then stand in the tree with nothing in them.
    """

    def __init__(
        self,
        spec: CacheSpec,
        capacities: tuple[tuple[int, ...], tuple[int, ...]],
        *,
        l1_arena: ArenaLayout | None = None,
        has_l3: bool = False,
        has_gaps: bool = False,
        spares_unwritten: bool = False,
        lost: Counter[str] | None = None,
        eviction: EvictionFactory = lru,
    ) -> None:
        self.rule = PrefixRule(spec)
        self.nodes: dict[bytes, Node] = {}
        self.now_s = 0.0  # as the last caller told
        written = WrittenRule(has_l3, spares_unwritten, Counter() if lost is None else lost)
        self._room = (
            Room(spec, self.rule.full_mask, capacities, written, eviction=eviction, tree=self)
            if l1_arena is None
            else ArenaRoom(
                spec, self.rule.full_mask, capacities[Tier.L2], l1_arena, written, eviction=eviction, tree=self
            )
        )
        self.arena = self._room if isinstance(self._room, ArenaRoom) else None  # L1, if its groups share it
        self.is_making_room = False  # whether ``make_room`` has last found something that is worth waiting for
        self.write_ahead: WriteAhead | None = None  # asked for room where what is unwritten is spared
        self.pools = self._room.pools
        self.evicted = self._room.evicted
        self.published = 0  # entries so far
        self.changes: PageChanges | None = None  # of L2 and L3, where somebody asks for them
        self._has_gaps = has_gaps
        self._full_groups = tuple(group for group, reach in enumerate(spec.reach_pages) if reach is None)
        self._pending: dict[Node, int] = {}  # holds that have come and gone and are not yet counted in ``Node.held``
        self.group_count = len(spec.groups)
        self.page_tokens = spec.page_tokens
        paged = (g for g, group in enumerate(spec.groups) if not isinstance(group, StateGroup))
        self.page_bytes = sum(spec.object_bytes[group] for group in paged) or sum(spec.object_bytes)
        self._tick = 0

    # -- nodes -------------------------------------------------------------------------------------------------------

    def attention_pages(self, keys: Sequence[bytes], *, own: int = 0) -> int:
        """Leading pages that have all full-attention objects here; 0 without such groups. O(log n) look-ups.

        No page is here without all pages before it, so the last one can be searched for by halves. With gaps it cannot:
        O(n) then. The engine has the first ``own`` pages itself.
        """
        full = self.rule.full_mask
        if not full or not keys:
            return 0
        if self._has_gaps:
            return next((page for page in range(own, len(keys)) if self.resident(keys[page]) & full != full), len(keys))
        if self.resident(keys[-1]) & full == full:
            return len(keys)
        return bisect_left(keys, x=True, key=lambda key: self.resident(key) & full != full)

    def resident(self, key: bytes) -> int:
        """The groups that are here of a page, in whichever tier, as a mask."""
        node = self.nodes.get(key)
        return 0 if node is None else node.resident

    def match(self, keys: Sequence[bytes], *, own: int = 0) -> int:
        """The longest usable prefix, in pages. The engine has all of the first ``own`` pages itself."""
        pages = self.attention_pages(keys, own=own) if self.rule.full_mask else len(keys)
        if not self.rule.partial:
            return pages
        if self.rule.full_mask and not self._has_gaps:
            return self.rule.longest(pages, (node.resident for node in self.path(keys, pages)))
        masks = (self.available(keys, page, own=own) for page in range(pages - 1, -1, -1))
        return self.rule.longest(pages, masks)

    def available(self, keys: Sequence[bytes], page: int, *, own: int) -> int:
        """The groups of a page that are here, or that the engine has itself, as a mask."""
        return self.rule.all_mask if page < own else self.resident(keys[page])

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

        Its parent is here when the spec has full-attention groups, but for gaps. Without such groups pages stand alone.
        """
        if (node := self.nodes.get(keys[page])) is not None:
            return node
        first = page
        while self.rule.full_mask and first and keys[first - 1] not in self.nodes:
            assert self._has_gaps, "the parent of a page is here"
            first -= 1
        parent = self.nodes[keys[first - 1]] if first and self.rule.full_mask else None
        for number in range(first, page + 1):
            node = self.nodes[keys[number]] = Node(
                keys[number], parent, number, self.group_count, used_at=self._tick, now_s=self.now_s
            )
            if parent is not None:
                parent.children.add(node)
            parent = node
        assert node is not None
        return node

    def prune(self, node: Node | None) -> None:
        """Forget ``node`` when nothing of it is here, under way or below it; then its parents likewise."""
        while node is not None and not (node.resident or node.children or node.copying or node.storing or node.anchors):
            del self.nodes[node.key]
            parent = node.parent
            if parent is not None:
                parent.children.discard(node)
                self._room.wake(parent)
            node = parent

    def anchor(self, node: Node | None, *, instead_of: Node | None) -> Node | None:
        """Know the path to ``node``, and what L3 has of it, even when nothing of it is here. Returns ``node``."""
        if node is not None:
            node.anchors += 1
        if instead_of is not None:
            instead_of.anchors -= 1
            self.prune(instead_of)
        return node

    # -- entries -----------------------------------------------------------------------------------------------------

    def publish(self, node: Node, tier: Tier, group: int, handle: int, *, request: RequestFacts | None = None) -> Entry:
        """A complete copy lies in ``handle``, which the entry takes over from the caller. There was none before.

        ``request`` has computed it; None for a copy of what is in the other tier, or has come from L3.
        """
        assert node.entries[tier][group] is None, "an object is published once in a tier"
        self.published += 1
        entry = Entry(node, tier, group, handle, born_at=self.published, now_s=self.now_s)
        source = node.entries[1 - tier][group]
        entry.last = source.last if request is None and source is not None else request
        entry.used_at = self._tick
        node.entries[tier][group] = entry
        node.masks[tier] |= 1 << group
        node.resident |= 1 << group
        if self.changes is not None and tier is Tier.L2:
            self.changes.add(PageChange(node.key, Place.L2, node.masks[tier], is_there=True))
        self._room.wake(node)
        self._room.offer(entry)
        if source is not None:  # it may not be the nearest copy any more
            self._room.offer(source)
        return entry

    def retract(self, entry: Entry) -> None:
        """The copy is no more; its slot is released (it is reused when nothing else holds it)."""
        node, bit = entry.node, 1 << entry.group
        self._room.withdraw(entry)
        node.entries[entry.tier][entry.group] = None
        node.masks[entry.tier] &= ~bit
        node.resident = node.masks[Tier.L1] | node.masks[Tier.L2]
        if self.changes is not None and entry.tier is Tier.L2:
            self.changes.add(PageChange(node.key, Place.L2, bit, is_there=False))
        self.pools[entry.tier][entry.group].release(entry.handle)
        if self._room.spares_unwritten:
            self._room.resort(node)

    def stored(self, node: Node, groups: int) -> None:
        """L3 has these groups of ``node``, as a mask."""
        if self.changes is not None and groups & ~node.in_l3:
            self.changes.add(PageChange(node.key, Place.L3, node.in_l3 | groups, is_there=True))
        node.in_l3 |= groups
        node.confirmed_at_s = self.now_s
        if self._room.spares_unwritten:
            self._room.resort(node)

    def gone_from_l3(self, node: Node, groups: int) -> None:
        """L3 does not have these groups of ``node``, as a mask."""
        if self.changes is not None and groups & node.in_l3:
            self.changes.add(PageChange(node.key, Place.L3, groups & node.in_l3, is_there=False))
        node.in_l3 &= ~groups
        if self._room.spares_unwritten:
            self._room.resort(node)

    def pin(self, entry: Entry) -> Entry:
        """Keep the entry from eviction until as many ``unpin``."""
        if entry.pins == 0:
            self._room.withdraw(entry)
        entry.pins += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        """The reverse of ``pin``."""
        assert entry.pins > 0, "an entry is unpinned as often as it was pinned"
        entry.pins -= 1
        if entry.pins == 0:
            self._room.offer(entry)
            self._room.wake(entry.node)

    def unpin_all(self, entries: list[Entry]) -> None:
        """Unpin every entry of a list and empty it."""
        for entry in entries:
            self.unpin(entry)
        entries.clear()

    def tell_time(self, now_s: float) -> None:
        """Time never goes back here: what has ended is told of after what has begun since."""
        self.now_s = max(self.now_s, now_s)

    def touch(self, entries: Iterable[Entry]) -> None:
        """The objects behind these entries are in use now, in whichever tiers they are."""
        self._tick += 1
        for used in entries:
            for copies in used.node.entries:
                if (entry := copies[used.group]) is not None:
                    entry.used_at, entry.used_s = self._tick, self.now_s

    def note_use(self, keep: Keep, request: RequestFacts) -> None:
        """A request has found what it keeps. Free, unless the eviction policy watches use: then O(pages)."""
        if not self._room.watches_use:
            return
        for node in path_from(keep.path):
            for group in self._full_groups:
                for copies in node.entries:
                    if (entry := copies[group]) is not None:
                        self._room.note_use(entry, request)
        for entry in keep.entries:
            self._room.note_use(entry, request)

    def touch_path(self, node: Node | None) -> None:
        """The full-attention objects of the path that ends at ``node`` are in use now, in whichever tiers they are."""
        self._tick += 1
        now_s = self.now_s
        while node is not None:  # written out, as in off_device_pages: it is done for every page of every request
            node.used_at = self._tick
            node.used_s = now_s
            node = node.parent

    # -- paths -------------------------------------------------------------------------------------------------------

    def keep(self, keys: Sequence[bytes], pages: int) -> Keep:
        """Keep what is here of all that a prefix of ``pages`` pages needs, until ``let_go``."""
        parts = ((self.nodes.get(keys[page]), group) for page, group in self.rule.needed_partial(pages))
        entries = (node.nearest(group) for node, group in parts if node is not None)
        keep = Keep(entries=[self.pin(entry) for entry in entries if entry is not None])
        self.hold(keep, self._deepest(keys, pages))
        return keep

    def _deepest(self, keys: Sequence[bytes], pages: int) -> Node | None:
        """The last of ``pages`` pages that has its full-attention objects here. O(pages after it)."""
        full = self.rule.full_mask
        here = (self.nodes.get(keys[page]) for page in range(pages - 1 if full else -1, -1, -1))
        return next((node for node in here if node is not None and node.resident & full == full), None)

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
        if not self._pending:
            return
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
                if entry is None:
                    assert self._has_gaps, "what is held is here"
                    continue
                self._room.withdraw(entry) if node.held else self._room.offer(entry)
            if node.held:
                node.used_at = self._tick
                change = 1
            else:
                self._room.wake(node)
                change = -1
            node = node.parent

    # -- space -------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Evict what the policy does not want to keep for so long, though there is room."""
        if self._room.watches_use:
            self.settle()
            self._room.expire()

    def victim(self) -> EvictionFacts | None:
        """The object that would be evicted from L2 for another one; None while there is room, or nothing may go."""
        self.settle()
        return self._room.victim(Tier.L2, self._full_groups[0] if self._full_groups else 0)

    def acquire(self, tier: Tier, group: int, count: int, *, patient: bool = False) -> list[int] | None:
        """``count`` slots, after evicting as much as that takes; None, when even that is not enough.

        ``patient``: nor while what is being written down will make room, rather than lose what is unwritten.
        """
        if self._room.is_short(tier, group, count):
            self.settle()
        if patient and self.write_ahead is not None:
            handles = self._room.acquire(tier, group, count, may_lose=False)
            if handles is not None or self.make_room(tier, group, count):
                return handles
        return self._room.acquire(tier, group, count)

    def make_room(self, tier: Tier, group: int, count: int) -> bool:
        """Write down what is in the way of ``count`` slots. Whether something that helps is under way."""
        self.is_making_room = self.write_ahead is not None and self.write_ahead.make_room(tier, group, count)
        return self.is_making_room

    def release(self, tier: Tier, group: int, handles: Iterable[int | None]) -> None:
        """Give up slots, those that are None excepted."""
        self._room.release(tier, group, handles)

    def room(self, tier: Tier, group: int) -> int:
        """At most so many slots can be acquired now."""
        self.settle()
        return self._room.available(tier, group)

    def written(self, tier: Tier, group: int) -> int:
        """So many of them without losing what is unwritten, where that is spared."""
        self.settle()
        return self._room.written(tier, group)

    @contextmanager
    def next_unwritten(self, tier: Tier, group: int) -> Iterator[Entry | None]:
        """The unwritten entry that would be evicted first, pinned while the context lasts; None without one."""
        entry = self._room.next_unwritten(tier, group)
        if entry is not None:
            self.pin(entry)
        try:
            yield entry
        finally:
            if entry is not None:
                self.unpin(entry)
