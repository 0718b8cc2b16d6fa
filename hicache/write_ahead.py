"""Write-back ahead of need: keeps a share of L1 and L2 free or written down, least recently used pages first."""

from __future__ import annotations

from hicache.arena import ArenaLayout
from hicache.index import Index
from hicache.node import Node, Tier
from hicache.writer import Writer

_FLUSH_PAGES = 64  # sent down at a time


class WriteAhead:
    """Eviction cannot wait for a copy, so what would be evicted is written before.

    ::

        L1    page by page, as it would be evicted: children before their parents, which stay above them
        L2    with all pages before it that L3 lacks, first page first: L3 gets nothing that it could not reach

    Bounded: between two calls of ``keep_up`` no more is sent down than both tiers hold, whatever becomes of it.
    """

    def __init__(self, index: Index, writer: Writer, *, share: float) -> None:
        self._index = index
        self._writer = writer
        self._ahead = [[max(1, int(share * pool.capacity)) for pool in pools] for pools in index.pools]
        self._pages_max = sum(pool.capacity for pools in index.pools for pool in pools)
        self._allowance = 0  # pages that may still be sent down
        self._is_storing = False  # guards against asking L2 for room on behalf of L2
        self._rest: list[Node] = []  # of a flush, first pages last

    def keep_up(self) -> None:
        """Something has changed through a request: send down what the shares ask for."""
        self._allowance = self._pages_max
        self.go_on()

    def go_on(self) -> None:
        """A copy has ended: send down what may follow."""
        self._writer.forget_stranded()
        self._go_on_flushing()
        for tier in reversed(Tier):
            for group, count in enumerate(self._ahead[tier]):
                self._write(tier, group, count)

    def make_room(self, tier: Tier, group: int, count: int) -> bool:
        """Write down so much that ``count`` slots come free. Whether something that helps is under way."""
        self._write(tier, group, count)
        if tier is Tier.L1 and (arena := self._index.arena) is not None:
            self._write_units(arena.arena.layout, group, count)
        if tier is Tier.L1 and any(self._writer.under_way(Tier.L1)):
            return True
        return self._writer.is_storing and not self._writer.is_paused(Tier.L2)

    def flush(self) -> None:
        """Begin to send everything that is unwritten to L3, from the first pages on, whatever has failed before."""
        self._writer.resume()
        self._rest = sorted(self._index.nodes.values(), key=lambda node: -node.page)
        self.keep_up()

    @property
    def is_all_written(self) -> bool:
        """Whether L3 has acknowledged all that is here, or about to be, as a snapshot that is being taken."""
        return not any((node.resident | node.copying) & ~node.in_l3 for node in self._index.nodes.values())

    def _go_on_flushing(self) -> None:
        awaited: list[Node] = []  # a snapshot of them is still being taken
        while self._rest and not any(map(self._writer.is_paused, Tier)):
            pages = [self._rest.pop() for _ in range(min(_FLUSH_PAGES, len(self._rest)))]
            pages = [node for node in pages if self._index.nodes.get(node.key) is node]
            done = self._writer.send_down(pages)
            awaited += (node for node in pages[:done] if node.copying & ~node.masks[Tier.L1])
            if done < len(pages):
                self._rest += reversed(pages[done:])
                break
        self._rest += reversed(awaited)

    def _write(self, tier: Tier, group: int, count: int) -> None:
        under_way = self._writer.under_way(tier)
        while self._allowance > 0 and not self._writer.is_paused(tier):
            if self._index.written(tier, group) + under_way[group] >= count:
                return
            with self._index.next_unwritten(tier, group) as entry:
                if entry is None:
                    return
                is_sent = self._copy_to_l2(entry.node) if tier is Tier.L1 else self._store_path(entry.node)
                if not is_sent:
                    return

    def _write_units(self, layout: ArenaLayout, group: int, count: int) -> None:
        """What the group cannot have of its own, others pass on to it in whole units: write down as much of theirs."""
        missing = count - self._index.written(Tier.L1, group) - self._writer.under_way(Tier.L1)[group]
        units = -(-missing // layout.slots_per_unit[group])
        for other, slots in enumerate(layout.slots_per_unit):
            if units > 0 and other != group:
                self._write(Tier.L1, other, self._index.written(Tier.L1, other) + units * slots)

    def _copy_to_l2(self, node: Node) -> bool:
        """Whether it is on its way. The last slots of L2 are for the way to L3, as long as that is open."""
        for group, count in enumerate(self._ahead[Tier.L2]):
            if self._index.written(Tier.L2, group) <= 1:
                self._write(Tier.L2, group, count)
                if self._writer.is_storing and not self._writer.is_paused(Tier.L2):
                    return False
        self._allowance -= 1
        return self._writer.demote(node)

    def _store_path(self, end: Node) -> bool:
        """Send ``end`` to L3 with all that it needs there. Whether it is on its way."""
        if self._is_storing:
            return False
        self._is_storing = True
        path = [end]
        while (parent := path[-1].parent) is not None and self._writer.lacks_in_l3(parent):
            path.append(parent)
        self._allowance -= len(path)
        self._writer.send_down(reversed(path))
        self._is_storing = False
        return bool(end.storing)
