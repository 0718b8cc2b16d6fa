"""The arena's arithmetic and bookkeeping: units are of one group at a time, and no byte is of two."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache.arena import ALIGNMENT_BYTES, PADDING_SHARE_MAX, Arena, ArenaLayout, arena_layout, slot_bytes
from hicache.errors import ConfigError, HandleError
from hicache.slots import slot_of
from hicache.spec import CacheSpec, Group, PagedGroup, StateField, StateGroup

GIB = 1 << 30


def paged(name: str, row_bytes: int, *, layers: int = 1) -> PagedGroup:
    return PagedGroup(name, tuple(range(layers)), heads=1, head_dim=row_bytes, dtype="uint8", planes=1)


def state(name: str, *shapes: tuple[int, ...], layers: int = 1) -> StateGroup:
    fields = tuple(StateField(f"f{index}", shape, "uint8") for index, shape in enumerate(shapes))
    return StateGroup(name, tuple(range(layers)), fields)


QWEN3_NEXT: tuple[Group, ...] = (
    PagedGroup("attn", tuple(range(12)), heads=2, head_dim=256, dtype="bfloat16"),
    StateGroup(
        "gdn",
        tuple(range(36)),
        (StateField("conv", (3, 8192), "bfloat16"), StateField("temporal", (32, 128, 128), "float32")),
    ),
)
MLA_WITH_INDEX: tuple[Group, ...] = (
    PagedGroup.mla("mla", layers=tuple(range(61)), latent_dim=512, rope_dim=64, dtype="bfloat16"),
    PagedGroup("index", tuple(range(61)), heads=1, head_dim=132, dtype="uint8", planes=1),
)
WINDOWED: tuple[Group, ...] = (
    PagedGroup("full", tuple(range(8)), heads=8, head_dim=128, dtype="bfloat16"),
    PagedGroup("swa", tuple(range(40)), heads=8, head_dim=128, dtype="bfloat16", window_tokens=1024),
)


@pytest.mark.parametrize("groups", [QWEN3_NEXT, MLA_WITH_INDEX, WINDOWED], ids=["qwen3-next", "mla", "windowed"])
def test_a_unit_of_a_real_model_pads_little_and_is_hardly_larger_than_its_largest_slot(
    groups: tuple[Group, ...],
) -> None:
    spec = CacheSpec("m", "r", groups)
    sizes, layout = slot_bytes(spec), arena_layout(spec, 40 * GIB)
    assert layout.unit_bytes < 1.05 * max(sizes)
    assert 40 * GIB - layout.unit_bytes < layout.size_bytes <= 40 * GIB
    for group, size in enumerate(sizes):
        assert layout.stride_bytes(group) * layout.slots_per_unit[group] == layout.unit_bytes
        assert size <= layout.stride_bytes(group) <= 1.05 * size
        assert layout.stride_bytes(group) % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize(
    ("tp_size", "pp_layers"), [(2, None), (8, None), (4, (25, 23)), (1, (13, 11, 12, 12)), (2, (3, 45))]
)
def test_slots_and_units_are_the_same_on_all_stages_and_fit_into_each(
    tp_size: int, pp_layers: tuple[int, ...] | None
) -> None:
    attention, states = QWEN3_NEXT
    attention = dataclasses.replace(attention, layers=tuple(range(3, 48, 4)))
    states = dataclasses.replace(states, layers=tuple(layer for layer in range(48) if layer % 4 != 3))
    spec = CacheSpec("m", "r", (attention, states), tp_size=tp_size, pp_layers=pp_layers)
    layouts = [arena_layout(spec, 8 * GIB, stage=stage) for stage in range(spec.pp_size)]
    assert len({(layout.unit_count, layout.slots_per_unit) for layout in layouts}) == 1
    assert max(layout.size_bytes for layout in layouts) > 8 * GIB - max(layout.unit_bytes for layout in layouts)
    for stage, layout in enumerate(layouts):
        assert layout.size_bytes <= 8 * GIB
        for group, size in enumerate(slot_bytes(spec, stage=stage)):
            assert size <= layout.stride_bytes(group)
            assert layout.stride_bytes(group) % ALIGNMENT_BYTES == 0
            assert layout.stride_bytes(group) * layout.slots_per_unit[group] == layout.unit_bytes
            if not spec.rank(stage * tp_size).lacks(group):
                assert size >= (1 - PADDING_SHARE_MAX) * layout.stride_bytes(group)


def test_a_stage_whose_mixture_wastes_much_is_named() -> None:
    groups = (PagedGroup("a", (0, 1, 2), 1, 16, "int8"), PagedGroup("b", (3, 4, 5), 1, 16, "int8"))
    spec = CacheSpec("m", "r", (*groups, PagedGroup("c", (6, 7, 8, 9), 1, 16, "int8")), page_tokens=1, pp_layers=(4, 6))
    with pytest.raises(ConfigError, match=r"'b' \(\d+ bytes\) in a unit of \d+ bytes of stage 0 waste 50%"):
        arena_layout(spec, GIB)


def test_groups_that_cannot_share_units_without_much_waste_are_refused_by_name_and_waste() -> None:
    # A unit is a multiple of one slot, up to four of the largest: primes of like size leave up to half of it.
    groups = (paged("a", 16 * 1009), paged("b", 16 * 1511), paged("c", 16 * 1999))
    spec = CacheSpec("m", "r", groups, page_tokens=1)
    with pytest.raises(ConfigError, match=r"'[abc]' \(\d+ bytes\) in a unit of \d+ bytes waste \d+%, more than 25%"):
        arena_layout(spec, GIB)


def test_an_arena_without_a_unit_for_each_group_is_refused_with_what_would_do() -> None:
    spec = CacheSpec("m", "r", QWEN3_NEXT)
    needed = 2 * arena_layout(spec, GIB).unit_bytes
    with pytest.raises(ConfigError, match=f"l1_bytes = {needed - 1}: expected at least {needed}"):
        arena_layout(spec, needed - 1)
    assert arena_layout(spec, needed).unit_count == 2


def arena_of(*slots_per_unit: int, units: int = 6, states: int = 1) -> Arena:
    far = tuple(group >= len(slots_per_unit) - states for group in range(len(slots_per_unit)))
    layout = ArenaLayout(840, units, slots_per_unit, far)
    return Arena(layout, [f"g{group}" for group in range(len(slots_per_unit))])


def slots(handles: list[int] | None) -> set[int]:
    assert handles is not None
    return set(map(slot_of, handles))


def test_pages_grow_from_one_end_and_states_from_the_other() -> None:
    pages, states = arena_of(4, 2).pools
    assert slots(pages.acquire(6)) == {0, 1, 2, 3, 4, 5}
    assert slots(states.acquire(3)) == {11, 10, 8}
    assert (pages.free_count, states.free_count) == (2 + 2 * 4, 1 + 2 * 2)
    assert slots(pages.acquire(10)) == set(range(6, 16))
    assert (pages.free_count, states.free_count) == (0, 1)
    assert pages.acquire(1) is None
    assert slots(states.acquire(1)) == {9}


def test_a_unit_is_anybodys_when_the_last_slot_in_it_is_released_wherever_it_lies() -> None:
    arena = arena_of(4, 2, 3, units=3, states=1)
    attention, window, states = arena.pools
    first = attention.acquire(12) or []
    assert window.acquire(1) is states.acquire(1) is None
    middle = [handle for handle in first if slot_of(handle) // 4 == 1]
    for handle in middle[:3]:
        attention.release(handle)
        assert window.acquire(1) is states.acquire(1) is None
    assert arena.stranded_bytes == 3 * 210
    attention.release(middle[3])
    assert arena.stranded_bytes == 0
    assert slots(states.acquire(2)) == {3, 4}
    assert arena.stranded_bytes == 280
    assert attention.acquire(1) is window.acquire(1) is None
    with pytest.raises(HandleError):
        attention.release(middle[0])


def test_what_a_group_gave_back_is_taken_again_from_its_end() -> None:
    arena = arena_of(1, 1)
    pages, states = arena.pools
    held = pages.acquire(4) or []
    for handle in held:
        if slot_of(handle) in (1, 2):
            pages.release(handle)
    assert slots(pages.acquire(1)) == {1}
    assert slots(states.acquire(3)) == {5, 4, 2}


class ArenaMachine(RuleBasedStateMachine):
    """Against plain sets of held slots: every byte is of one slot, or free, or stranded, and idle units are told."""

    @initialize(
        per_unit=st.lists(st.integers(1, 4), min_size=1, max_size=3), units=st.integers(1, 5), states=st.integers(0, 2)
    )
    def start(self, per_unit: list[int], units: int, states: int) -> None:
        self.arena = arena_of(*per_unit, units=units, states=states)
        self.busy: list[dict[int, int]] = [{} for _ in per_unit]  # by group: handle by slot
        self.idle: list[dict[int, int]] = [{} for _ in per_unit]

    @rule(group=st.integers(0, 2), count=st.integers(0, 9))
    def acquire(self, group: int, count: int) -> None:
        group %= len(self.busy)
        pool = self.arena.pools[group]
        free = pool.free_count
        handles = pool.acquire(count)
        assert (handles is None) == (count > free)
        taken = {slot_of(handle): handle for handle in handles or []}
        assert not taken.keys() & (self.busy[group].keys() | self.idle[group].keys())
        self.busy[group] |= taken

    @rule(group=st.integers(0, 2), choice=st.integers(0, 99))
    def release(self, group: int, choice: int) -> None:
        group %= len(self.busy)
        if (slot := self.pick(self.busy[group], choice)) is not None:
            self.arena.pools[group].release(self.busy[group].pop(slot))

    @rule(group=st.integers(0, 2), choice=st.integers(0, 99), to_idle=st.booleans())
    def mark(self, group: int, choice: int, to_idle: bool) -> None:
        group %= len(self.busy)
        source, target = (self.busy, self.idle) if to_idle else (self.idle, self.busy)
        if (slot := self.pick(source[group], choice)) is not None:
            target[group][slot] = source[group].pop(slot)
            (self.arena.pools[group].mark_idle if to_idle else self.arena.pools[group].mark_busy)(slot)

    @staticmethod
    def pick(slots: dict[int, int], choice: int) -> int | None:
        return sorted(slots)[choice % len(slots)] if slots else None

    @invariant()
    def bytes_are_conserved(self) -> None:
        if not hasattr(self, "arena"):
            return
        layout, used_bytes, owners = self.arena.layout, 0, dict[int, int]()
        for group, pool in enumerate(self.arena.pools):
            held = self.busy[group].keys() | self.idle[group].keys()
            assert pool.used_count == len(held)
            used_bytes += len(held) * layout.stride_bytes(group)
            for slot in held:
                assert owners.setdefault(self.arena.unit_of(group, slot), group) == group
            units = set(pool.units())
            idle = {unit for unit in units if not self.busy[group].keys() & set(pool.slots_of(unit))}
            assert pool.idle_units == len(idle)
            assert idle == {unit for unit in range(layout.unit_count) if pool.is_idle(unit)}
        assert owners == {unit: owner for unit, owner in enumerate(self.arena.owners) if owner is not None}
        free_bytes = self.arena.free_units * layout.unit_bytes
        assert used_bytes + self.arena.stranded_bytes + free_bytes == layout.size_bytes


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArenaMachine = ArenaMachine.TestCase
