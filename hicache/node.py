"""One page in the tree of the index, with its copies, and what a holder keeps of a path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from hicache.policies.facts import RequestFacts


class Tier(IntEnum):
    """Where a copy lies inside this engine."""

    L1 = 0
    L2 = 1


class Entry:
    """The published copy of one object (page, group) in one tier. The entry holds its slot; a pin forbids eviction."""

    __slots__ = ("born_at", "group", "handle", "last", "node", "pins", "tier", "used_at", "used_s", "uses")

    def __init__(self, node: Node, tier: Tier, group: int, handle: int, *, born_at: int, now_s: float) -> None:
        self.node = node
        self.tier = tier
        self.group = group
        self.handle = handle
        self.pins = 0
        self.used_at = 0  # the tick of its last use; of full-attention groups that of the page counts instead
        self.born_at = born_at  # how many had been published when it was
        self.used_s = now_s  # when it was last used, likewise; what follows only where the eviction policy watches use
        self.uses = 1  # requests that found it, and the one that made it
        self.last: RequestFacts | None = None  # the one of them that came last


class Node:
    """One page of tokens, known by its block key. Exists as long as something of it, or below it, is here."""

    __slots__ = (
        "anchors",
        "children",
        "confirmed_at_s",
        "copying",
        "entries",
        "has_parked",
        "held",
        "in_l3",
        "key",
        "masks",
        "page",
        "parent",
        "resident",
        "storing",
        "used_at",
        "used_s",
    )

    def __init__(
        self, key: bytes, parent: Node | None, page: int, group_count: int, *, used_at: int, now_s: float
    ) -> None:
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
        self.anchors = 0  # holders that want what is known of its path to stay known, whatever is here of it
        self.held = 0  # holds on paths that end here, and children that are held themselves
        self.used_at = used_at  # the tick when a path through it was last used
        self.used_s = now_s  # the time of that

    def nearest(self, group: int) -> Entry | None:
        """The copy of an object that takes the least to use, if it is here."""
        return self.entries[Tier.L1][group] or self.entries[Tier.L2][group]


@dataclass(slots=True, eq=False)
class Keep:
    """What one holder keeps from eviction: of a path, by its deepest page, the nearest copies of all full-attention
    objects; anything else entry by entry."""

    path: Node | None = None
    entries: list[Entry] = field(default_factory=list)  # each pinned once


def path_from(end: Node | None) -> Iterator[Node]:
    """The pages of the path that ends at ``end``, from there to its first one."""
    while end is not None:
        yield end
        end = end.parent
