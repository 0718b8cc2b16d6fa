"""A hand-over: what a request has published, on its way to L3, where another engine finds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hicache.index import Index
from hicache.node import Node, Tier
from hicache.writer import Writer


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What another engine finds in L3, and what it could find."""

    pages_in_l3: int  # the longest usable prefix that L3 has acknowledged
    pages_here: int  # the longest usable prefix in this engine
    objects_in_l3: int

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing there that would make the prefix longer."""
        return self.pages_in_l3 >= self.pages_here


class Handover:
    """Of the pages with these keys, a sequence's from its first page on, which a request holds meanwhile.

    Begins with asking L3 for what it once acknowledged of them: it may have lost that since, and what it still has it
    keeps from eviction for a short lease.
    """

    def __init__(self, index: Index, writer: Writer, keys: Sequence[bytes]) -> None:
        self._index = index
        self._writer = writer
        self._keys = keys
        self._is_held_up = False  # for want of room in L2
        self._stored_before: int | None = None  # objects that L3 had taken when everything was last sent down
        self._is_asking = writer.confirm(reversed(list(self._nodes())), interval_s=0.0, on_answer=self._answered)

    def write(self) -> None:
        """Send down what is here and not below: by the write policy, for want of room, or since something failed."""
        nodes = list(self._nodes())
        self._is_held_up = self._writer.send_down(nodes) < len(nodes)

    def go_on(self) -> bool:
        """Write as long as L3 takes anything, which makes room. Whether it is over: nothing is on its way any more."""
        if self._is_held_up:
            self.write()
        while not self.is_under_way:
            if self._writer.objects_stored == self._stored_before:
                return True
            self._stored_before = self._writer.objects_stored
            self.write()
        return False

    @property
    def is_under_way(self) -> bool:
        """Whether L3 has not answered yet, something is on its way down, or waits for room that others are about to
        leave in L2."""
        if self._is_asking or (self._is_held_up and any(self._writer.under_way(Tier.L2))):
            return True
        return any(map(self._writer.is_under_way, self._nodes()))

    @property
    def result(self) -> HandedOver:
        """As far as L3 has acknowledged anything."""
        nodes = map(self._index.nodes.get, self._keys)
        masks = [0 if node is None else node.in_l3 for node in nodes]
        objects = sum(mask.bit_count() for mask in masks)
        return HandedOver(self._index.rule.usable(masks), self._index.match(self._keys), objects)

    def _answered(self) -> None:
        self._is_asking = False

    def _nodes(self) -> Iterator[Node]:
        return (node for node in map(self._index.nodes.get, self._keys) if node is not None)
