"""The arena: one run of bytes in L1 that the slots of all groups share, page units from one end, state units from the
other. Arithmetic and bookkeeping only."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hicache.errors import ConfigError
from hicache.slots import SLOT_BITS, Slots
from hicache.spec import CacheSpec, Group, StateGroup

ALIGNMENT_BYTES = 16  # of slots and of the fields in them: what vectorised loads and TMA want
PADDING_SHARE_MAX = 0.25  # above this a unified arena would waste more than it could win
_PADDING_SHARE_GOOD = 0.02  # the smallest unit that pads no group by more is taken
_UNIT_SLOTS_MAX = 4  # largest slots in a unit: larger units pad less, and come free as a whole less often
_CANDIDATES_MAX = 64  # unit sizes looked at for each size of slot


@dataclass(frozen=True)
class ArenaLayout:
    """``unit_count`` equal units, each of one group at a time, or of none.

        unit   0     1     2     3     4     5     6     7
              [pages|pages|swa  |     |     |     |state|state]      states come from the far end

    Slot ``s`` of group ``g`` lies at byte ``s * stride_bytes(g)``, in unit ``s // slots_per_unit[g]``: slots of two
    groups share bytes exactly when they share a unit.
    """

    unit_bytes: int
    unit_count: int
    slots_per_unit: tuple[int, ...]  # by group
    from_far_end: tuple[bool, ...]  # by group: states do

    @property
    def size_bytes(self) -> int:
        """Bytes of all units."""
        return self.unit_bytes * self.unit_count

    @cached_property
    def slot_counts(self) -> tuple[int, ...]:
        """By group, the slots that there are numbers for: as if every unit were the group's."""
        return tuple(self.unit_count * slots for slots in self.slots_per_unit)

    def stride_bytes(self, group: int) -> int:
        """Bytes from one slot of the group to the next."""
        return self.unit_bytes // self.slots_per_unit[group]


def field_offsets(group: StateGroup) -> tuple[tuple[int, ...], int]:
    """Where each field begins within a slot, which has it for all layers in a row, and the bytes of the slot."""
    offsets: list[int] = []
    end = 0
    for field in group.fields:
        offsets.append(end)
        end += _aligned(len(group.layers) * field.bytes_per_layer)
    return tuple(offsets), end


def slot_bytes(spec: CacheSpec, *, stage: int = 0) -> tuple[int, ...]:
    """Bytes of one slot by group, on each rank of a stage, aligned: a page, or a state with its transient fields; 0 for
    a group that the stage lacks.
    """
    return tuple(_slot_bytes(group, spec.page_tokens) for group in spec.rank(stage * spec.tp_size).groups)


def arena_layout(spec: CacheSpec, l1_bytes: int, *, stage: int = 0) -> ArenaLayout:
    """The units that ``l1_bytes`` hold on each rank of a stage, padding as little as can be.

    There are as many units on every rank, with as many slots in each, as one directory gives them out: in proportion to
    what a slot takes in the stage that has most of its group, and as many as fit where a unit takes most. Their bytes
    are the stage's own.

    Raises ConfigError when a group would lose more than PADDING_SHARE_MAX of its bytes in some stage, and when not
    every group can have a unit at a time.
    """
    by_stage = [slot_bytes(spec, stage=number) for number in range(spec.pp_size)]
    largest = [max(sizes) for sizes in zip(*by_stage, strict=True)]
    largest_unit_bytes = _unit_bytes(largest)
    slots_per_unit = tuple(_slots_in(largest_unit_bytes, size) for size in largest)
    units = [_fitting_unit_bytes(sizes, slots_per_unit) for sizes in by_stage]
    for number, (sizes, unit_bytes) in enumerate(zip(by_stage, units, strict=True)):
        for group, size, slots in zip(spec.groups, sizes, slots_per_unit, strict=True):
            share = 1 - slots * size / unit_bytes
            if size and share > PADDING_SHARE_MAX:
                where = f" of stage {number}" if spec.pp_size > 1 else ""
                raise ConfigError(
                    "l1_bytes",
                    l1_bytes,
                    f"groups that fill units: {slots} of {group.name!r} ({size} bytes) in a unit of {unit_bytes} bytes"
                    f"{where} waste {share:.0%}, more than {PADDING_SHARE_MAX:.0%}; set l1_pages and l1_state_slots"
                    " instead",
                )
    bytes_min = max(units) * len(spec.groups)
    if l1_bytes < bytes_min:
        expected = f"at least {bytes_min}: a unit of {max(units)} bytes for each of {len(spec.groups)} groups"
        raise ConfigError("l1_bytes", l1_bytes, expected)
    far = tuple(isinstance(group, StateGroup) for group in spec.groups)
    return ArenaLayout(units[stage], l1_bytes // max(units), slots_per_unit, far)


class Arena:
    """Which unit is whose. A unit is taken when a slot in it is, and given back when none is held any more."""

    def __init__(self, layout: ArenaLayout, names: Sequence[str]) -> None:
        self.layout = layout
        self.owners: list[int | None] = [None] * layout.unit_count  # by unit: its group
        self.free_units = layout.unit_count
        self._ends = (_Units(layout.unit_count, sign=1), _Units(layout.unit_count, sign=-1))
        self.pools = tuple(ArenaSlots(self, group, name=name) for group, name in enumerate(names))

    @property
    def stranded_bytes(self) -> int:
        """Bytes of free slots in units that have slots in use: no other group can have them now."""
        return sum(pool.own_free_count * self.layout.stride_bytes(group) for group, pool in enumerate(self.pools))

    def unit_of(self, group: int, slot: int) -> int:
        """The unit that a slot lies in."""
        return slot // self.layout.slots_per_unit[group]

    def take(self, group: int) -> int:
        """A free unit for ``group``, from its end of the arena. There is one."""
        assert self.free_units, "a unit is taken when there is one"
        free = self._ends[self.layout.from_far_end[group]]
        while self.owners[unit := free.pop()] is not None:  # taken from the other end
            pass
        self.owners[unit] = group
        self.free_units -= 1
        return unit

    def give_back(self, unit: int) -> None:
        """The unit is nobody's."""
        assert self.owners[unit] is not None, "a unit is given back by whoever took it"
        self.owners[unit] = None
        self.free_units += 1
        for free in self._ends:
            free.push(unit)


class ArenaSlots(Slots):
    """The slots of one group of an arena: in the units that it has, and in all that are free.

    A held slot is busy, or idle where ``mark_idle`` said that its content may go; a unit is idle when it has held slots
    and all of them are.
    """

    def __init__(self, arena: Arena, group: int, *, name: str) -> None:
        super().__init__(arena.layout.slot_counts[group], name=name)
        self.own_free_count = 0  # free slots in units that the group has
        self.idle_units = 0
        self._arena = arena
        self._group = group
        self._per_unit = arena.layout.slots_per_unit[group]
        self._used = 0
        self._free: dict[int, list[int]] = {}  # by unit of the group: its free slots
        self._busy: dict[int, int] = {}  # by unit of the group: how many slots are held and not idle
        self._open = _Units(0, sign=-1 if arena.layout.from_far_end[group] else 1)  # all with free slots, and others

    @property
    def free_count(self) -> int:
        """Slots that can be taken now."""
        return self.own_free_count + self._arena.free_units * self._per_unit

    @property
    def used_count(self) -> int:
        """Slots with at least one holder."""
        return self._used

    def units(self) -> Iterable[int]:
        """The units that are the group's."""
        return self._free.keys()

    def is_idle(self, unit: int) -> bool:
        """Whether the unit is the group's, and all that is held of it is idle."""
        return self._busy.get(unit) == 0

    def slots_of(self, unit: int) -> range:
        """The slots in a unit."""
        return range(unit * self._per_unit, (unit + 1) * self._per_unit)

    def mark_idle(self, slot: int) -> None:
        """The content of a held slot may go."""
        unit = slot // self._per_unit
        self._busy[unit] -= 1
        self.idle_units += not self._busy[unit]

    def mark_busy(self, slot: int) -> None:
        """The reverse of ``mark_idle``."""
        unit = slot // self._per_unit
        self.idle_units -= not self._busy[unit]
        self._busy[unit] += 1

    def acquire(self, count: int) -> list[int] | None:
        """See Slots. Units of the group come first, then free ones; of either the one nearest to its end."""
        if count > self.free_count:
            return None
        taken: list[int] = []
        while len(taken) < count:
            unit = self._open_unit()
            free = self._free[unit]
            first = max(0, len(free) - (count - len(taken)))
            if not self._busy[unit] and len(free) < self._per_unit:
                self.idle_units -= 1
            self._busy[unit] += len(free) - first
            self.own_free_count -= len(free) - first
            taken += free[first:]
            del free[first:]
        self._used += count
        for slot in taken:
            self._holders[slot] = 1
        return [self._generations[slot] << SLOT_BITS | slot for slot in taken]

    def _open_unit(self) -> int:
        """A unit of the group with a free slot, taken from the arena when there is none."""
        while (unit := self._open.first()) is not None:
            if self._free.get(unit):
                return unit
            self._open.pop()
        unit = self._arena.take(self._group)
        self._free[unit] = list(reversed(self.slots_of(unit)))
        self._busy[unit] = 0
        self.own_free_count += self._per_unit
        self._open.push(unit)
        return unit

    def _freed(self, slot: int) -> None:
        unit = slot // self._per_unit
        free = self._free[unit]
        free.append(slot)
        self._used -= 1
        self.own_free_count += 1
        self._busy[unit] -= 1
        if len(free) == self._per_unit:
            self._give_back(unit)
            return
        self.idle_units += not self._busy[unit]
        if len(free) == 1:
            self._open.push(unit)

    def _give_back(self, unit: int) -> None:
        assert self._busy[unit] == 0, "a slot is busy when it is released"
        del self._free[unit], self._busy[unit]
        self.own_free_count -= self._per_unit
        self._arena.give_back(unit)


class _Units:
    """Units by their number, from the lowest (``sign`` 1) or from the highest on (-1); each is in it once at most."""

    def __init__(self, unit_count: int, *, sign: int) -> None:
        self._sign = sign
        self._members = set(range(unit_count))
        self._heap = sorted(sign * unit for unit in range(unit_count))

    def first(self) -> int | None:
        return self._sign * self._heap[0] if self._heap else None

    def push(self, unit: int) -> None:
        if unit not in self._members:
            self._members.add(unit)
            heapq.heappush(self._heap, self._sign * unit)

    def pop(self) -> int:
        unit = self._sign * heapq.heappop(self._heap)
        self._members.remove(unit)
        return unit


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _slot_bytes(group: Group | None, page_tokens: int) -> int:
    if group is None:
        return 0
    return field_offsets(group)[1] if isinstance(group, StateGroup) else _aligned(group.page_bytes(page_tokens))


def _fitting_unit_bytes(sizes: Sequence[int], slots_per_unit: Sequence[int]) -> int:
    """The smallest unit that so many slots of these sizes fit in, each at an aligned stride."""
    step = ALIGNMENT_BYTES * math.lcm(*slots_per_unit)
    needed = max(size * slots for size, slots in zip(sizes, slots_per_unit, strict=True))
    return -(-needed // step) * step


def _unit_bytes(sizes: Sequence[int]) -> int:
    """The smallest unit that pads every group little, among multiples of a slot of one of them; else the best one."""
    largest = max(sizes)
    candidates = sorted(
        count * size
        for size in set(sizes)
        for count in range(-(-largest // size), _UNIT_SLOTS_MAX * largest // size + 1)[:_CANDIDATES_MAX]
    )
    worst = {unit: max(_padding_share(unit, size) for size in sizes) for unit in candidates}
    good = (unit for unit in candidates if worst[unit] <= _PADDING_SHARE_GOOD)
    return next(good, None) or min(candidates, key=lambda unit: worst[unit])


def _slots_in(unit_bytes: int, size_bytes: int) -> int:
    """As many slots as a unit holds at one aligned stride."""
    count = unit_bytes // size_bytes
    while unit_bytes % (count * ALIGNMENT_BYTES):
        count -= 1
    return count


def _padding_share(unit_bytes: int, size_bytes: int) -> float:
    return 1 - _slots_in(unit_bytes, size_bytes) * size_bytes / unit_bytes
