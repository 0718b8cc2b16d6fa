"""Room in an arena: what is evicted of L1 when the slots of one group may take the bytes of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hicache.arena import Arena, ArenaLayout
from hicache.node import Entry, Node, Tier
from hicache.policies.eviction import EvictionFactory, Lru
from hicache.room import Room, Tree, WrittenRule
from hicache.slots import slot_of
from hicache.spec import CacheSpec

IN_REACH_SHARE = 8  # one in so many units


class _Coldest(NamedTuple):
    """A unit that may go, in the order of its last use."""

    last_use: int
    group: int
    unit: int


class ArenaRoom(Room):
    """Room whose L1 is an arena. Each group can be given the bytes of another one, in whole units.

    *Which goes first.* A group that runs short evicts its own least recently used entry, or a whole unit of another
    group when everything in that was used less recently still. So bytes pass to another group only when they are worth
    less where they are, by the one clock of all groups, and go back only when what took them has become the older part:
    two groups that are both in use do not take units from each other in turns.

    *What is in nobody's reach.* A unit in which one slot is in use stays, and what is idle beside it is of use to its
    own group alone. While few units are free or wholly idle, a group lives on that first, so that what is in use
    gathers in few units, and what one request gives back is there for the next one, whatever it needs.
    """

    def __init__(
        self,
        spec: CacheSpec,
        full_mask: int,
        l2_capacities: tuple[int, ...],
        layout: ArenaLayout,
        written: WrittenRule,
        *,
        eviction: EvictionFactory,
        tree: Tree,
    ) -> None:
        groups = range(len(spec.groups))
        super().__init__(
            spec, full_mask, (tuple(0 for _ in groups), l2_capacities), written, eviction=eviction, tree=tree
        )
        self.arena = Arena(layout, [f"{Tier.L1.name}.{group.name}" for group in spec.groups])
        self.pools = (self.arena.pools, self.pools[Tier.L2])
        self._idle: tuple[dict[int, Entry], ...] = tuple({} for _ in groups)  # by slot: what waits for eviction
        self._units = tuple(Lru(self._unit_use(group)) for group in groups)  # by group: units with something idle
        self._mixed = tuple(Lru(self._oldest_use(group)) for group in groups)  # the same, by what is oldest in them
        self.units_passed = 0  # units that were evicted so that another group could have them
        self._latest_use = 0

    def available(self, tier: Tier, group: int) -> int:
        """See Room."""
        count = super().available(tier, group)
        if tier is Tier.L1:
            others = sum(pool.idle_units for other, pool in enumerate(self.arena.pools) if other != group)
            count += others * self.arena.layout.slots_per_unit[group]
        return count

    def withdraw(self, entry: Entry) -> None:
        """See Room."""
        super().withdraw(entry)
        if entry.tier is Tier.L1 and self._idle[entry.group].pop(slot_of(entry.handle), None) is not None:
            self.arena.pools[entry.group].mark_busy(slot_of(entry.handle))

    def _wait(self, entry: Entry) -> None:
        super()._wait(entry)
        if entry.tier is Tier.L1 and (slot := slot_of(entry.handle)) not in self._idle[entry.group]:
            self._idle[entry.group][slot] = entry
            self.arena.pools[entry.group].mark_idle(slot)
            unit = self.arena.unit_of(entry.group, slot)
            self._units[entry.group].add(unit)
            self._mixed[entry.group].add(unit)
            self._latest_use = max(self._latest_use, self._last_uses[entry.group](entry))

    def is_short(self, tier: Tier, group: int, count: int) -> bool:
        """See Room."""
        if tier is not Tier.L1:
            return super().is_short(tier, group, count)
        return self.arena.pools[group].own_free_count < count

    def acquire(self, tier: Tier, group: int, count: int, *, may_lose: bool = True) -> list[int] | None:
        """See Room."""
        self._may_lose = may_lose or not self.spares_unwritten
        if tier is Tier.L1:
            pool = self.arena.pools[group]
            while pool.own_free_count < count and self._is_scarce() and self._evict_mixed(group):
                pass
        return super().acquire(tier, group, count, may_lose=may_lose)

    def _is_scarce(self) -> bool:
        """Whether few units are in everybody's reach: free, or with nothing in use in them."""
        in_reach = self.arena.free_units + sum(pool.idle_units for pool in self.arena.pools)
        return in_reach <= self.arena.layout.unit_count // IN_REACH_SHARE

    def _evict_mixed(self, group: int) -> bool:
        """Evict the least recently used entry of those that share their unit with something in use."""
        pool, units = self.arena.pools[group], self._mixed[group]
        seen: list[int] = []
        victim: Entry | None = None
        while victim is None and (unit := units.pop()) is not None:
            idle = self._idle_in(group, unit) if self.arena.owners[unit] == group else []
            if not idle:
                continue  # until something in it is
            seen.append(unit)
            if not pool.is_idle(unit):
                known = dict[Node, bool]()
                oldest = sorted(idle, key=self._last_uses[group])
                victim = next((e for e in oldest if self._is_evictable(e, known)), None)
        for unit in seen:
            units.add(unit)
        if victim is not None:
            self._evict_whole(victim)
        return victim is not None

    def _evict_whole(self, entry: Entry) -> None:
        if self._is_last(entry):
            self._drop(self._subtree(entry.node))
        else:
            self._evict(entry)
            self._tree.prune(entry.node)

    def _make_room(self, tier: Tier, group: int) -> bool:
        if tier is not Tier.L1:
            return super()._make_room(tier, group)
        own = self._eviction[tier][group].first()
        if own is None and self._may_lose:
            own = self._unwritten[tier][group].first()
        own_use = None if own is None else self._last_uses[group](own)
        if own_use is not None and self._is_coldest(group, own_use) and self._evict_one(tier, group):
            return True
        coldest = min(filter(None, map(self._coldest_unit, self._others(group))), default=None)
        if coldest is None:
            return self._evict_one(tier, group)
        if own_use is None or coldest.last_use < own_use or not self._evict_one(tier, group):
            self._evict_unit(coldest)
        return True

    def _others(self, group: int) -> list[int]:
        return [other for other in range(len(self._units)) if other != group]

    def _is_coldest(self, group: int, use: int) -> bool:
        """Whether no unit of another group can be older than ``use``: told without looking into any."""
        bounds = (self._units[other].first_use_min() for other in self._others(group))
        return all(bound is None or use <= bound for bound in bounds)

    def _coldest_unit(self, group: int) -> _Coldest | None:
        """The unit of ``group`` that was used least recently among those in which everything may go."""
        pool, units = self.arena.pools[group], self._units[group]
        found: _Coldest | None = None
        seen: list[int] = []
        while pool.idle_units and found is None and (unit := units.pop()) is not None:
            if self.arena.owners[unit] != group:
                continue
            seen.append(unit)
            if pool.is_idle(unit) and self._may_go(group, unit):
                found = _Coldest(self._unit_use(group)(unit), group, unit)
        for unit in seen:
            units.add(unit)
        return found

    def _may_go(self, group: int, unit: int) -> bool:
        """Whether evicting all of an idle unit strands nothing that is in use, and leaves nobody holding a slot."""
        pool, known = self.arena.pools[group], dict[Node, bool]()
        return all(
            pool.holders(entry.handle) == 1 and self._is_evictable(entry, known) for entry in self._idle_in(group, unit)
        )

    def _evict_unit(self, coldest: _Coldest) -> None:
        for entry in self._idle_in(coldest.group, coldest.unit):
            if entry.node.entries[Tier.L1][entry.group] is not entry:
                continue  # gone, with a page above it
            self._evict_whole(entry)
        self.units_passed += 1
        assert self.arena.owners[coldest.unit] is None, "a unit in which nothing was in use is free"

    def _oldest_use(self, group: int) -> Callable[[int], int]:
        """When the oldest idle slot of a unit was last used, if another one of it is in use."""
        pool, last_use = self.arena.pools[group], self._last_uses[group]

        def use(unit: int) -> int:
            idle = () if pool.is_idle(unit) else self._idle_in(group, unit)
            return min(map(last_use, idle), default=self._latest_use)

        return use

    def _idle_in(self, group: int, unit: int) -> list[Entry]:
        idle = self._idle[group]
        return [idle[slot] for slot in self.arena.pools[group].slots_of(unit) if slot in idle]

    def _unit_use(self, group: int) -> Callable[[int], int]:
        """When a unit was last used: now, if something in it is in use."""
        pool, last_use = self.arena.pools[group], self._last_uses[group]

        def use(unit: int) -> int:
            if not pool.is_idle(unit):
                return self._latest_use
            return max(map(last_use, self._idle_in(group, unit)))

        return use
