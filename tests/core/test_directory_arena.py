"""An L1 whose groups share their bytes: who gives way to whom, what stays, and that nobody is starved."""

from __future__ import annotations

import pytest

from hicache.arena import Arena
from hicache.directory_config import DirectoryConfig
from hicache.errors import ConfigError
from hicache.jobs import CopyKind
from hicache.node import Tier
from hicache.policies.write import WriteBack
from hicache.slots import slot_of
from tests.core.situations import HYBRID, prompt
from tests.core.world import FULL, PAGE, WINDOW, Live, World, shared

PAGES, STATES = 0, 1


def world_of(units: int, *, pages_per_unit: int = 2, l2: int = 0) -> World:
    return World(HYBRID, l1=0, l2=l2, arena=shared(HYBRID, units=units, slots_per_unit=(pages_per_unit, 1)))


def arena_of(world: World) -> Arena:
    room = world.directory.index.arena
    assert room is not None
    return room.arena


def cached_pages(world: World, tokens: list[int]) -> list[int]:
    nodes = world.directory.index.nodes
    return [page for page, key in enumerate(world.page_keys(tokens)) if key in nodes and nodes[key].masks[Tier.L1] & 1]


def running(world: World, tokens: list[int], *, snapshot: bool = False) -> Live:
    """A request that has computed its prompt and has not ended."""
    live = world.open(tokens)
    world.load_whole(live)
    assert world.compute(live, pages=len(tokens) // PAGE, snapshot=snapshot)
    return live


def cached(world: World, tokens: list[int], *, snapshot: bool = False) -> None:
    world.release(running(world, tokens, snapshot=snapshot))
    world.check()


def test_a_state_takes_the_unit_whose_pages_were_used_least_recently() -> None:
    world = world_of(6)
    for seed in (1, 2):
        cached(world, prompt(4, seed=seed))
    lives = [running(world, prompt(0, seed=seed)) for seed in (3, 4)]
    assert arena_of(world).free_units == 0
    lives.append(running(world, prompt(0, seed=5)))
    assert cached_pages(world, prompt(4, seed=1)) == [0, 1], "the deeper pages of the older prompt have gone"
    assert cached_pages(world, prompt(4, seed=2)) == [0, 1, 2, 3]
    assert arena_of(world).owners == [PAGES, STATES, PAGES, PAGES, STATES, STATES]
    world.wind_up()


def test_a_group_gives_up_its_own_when_that_is_older_than_all_that_others_have() -> None:
    world = world_of(5)
    cached(world, prompt(2, seed=1), snapshot=True)
    cached(world, prompt(4, seed=2))
    live = running(world, prompt(0, seed=3))
    assert arena_of(world).free_units == 0
    second = running(world, prompt(0, seed=4))
    assert cached_pages(world, prompt(2, seed=1)) == [0, 1]
    assert cached_pages(world, prompt(4, seed=2)) == [0, 1, 2, 3]
    assert world.directory.index.evicted[Tier.L1] == [0, 1]
    for request in (live, second):
        world.release(request)
    world.wind_up()


def test_pages_take_the_unit_of_a_snapshot_that_is_older_than_they_are() -> None:
    world = world_of(4)
    cached(world, prompt(2, seed=1), snapshot=True)
    first = running(world, prompt(2, seed=2))
    assert world.directory.extend(first.record, tokens=3 * PAGE)
    assert world.directory.index.evicted[Tier.L1] == [0, 1]
    assert world.directory.extend(first.record, tokens=5 * PAGE)
    assert world.directory.index.evicted[Tier.L1] == [1, 1], "then what pages have of their own"
    assert not world.directory.extend(first.record, tokens=9 * PAGE)
    world.wind_up()


def test_a_unit_with_one_page_in_use_stays_until_its_request_ends() -> None:
    world = world_of(3)
    first = running(world, prompt(3, seed=1))
    second = world.open(prompt(0, seed=2))
    world.load(second)
    assert not second.record.is_loaded
    assert cached_pages(world, prompt(3, seed=1)) == [0, 1, 2]
    assert not world.directory.index.evicted[Tier.L1][PAGES]
    world.release(first)
    world.load_whole(second)
    assert second.record.is_loaded
    world.wind_up()


def test_a_copy_in_flight_keeps_its_unit_from_the_other_group() -> None:
    world = world_of(3, l2=8)
    first = running(world, prompt(2, seed=1))
    world.release(first)
    assert world.executor.waiting_for(CopyKind.BACKUP)
    lives = [world.open(prompt(0, seed=seed)) for seed in (2, 3, 4)]
    for live in lives:
        world.load(live)
        world.executor.run_kind(CopyKind.RESET)
    assert [live.record.is_loaded or live.record.loading for live in lives] == [True, True, False]
    world.check()
    world.run_all()
    world.load_whole(lives[2])
    assert lives[2].record.is_loaded
    assert cached_pages(world, prompt(2, seed=1)) == []
    assert world.directory.index.evicted[Tier.L1][PAGES] == 2
    world.wind_up()


def test_while_units_are_scarce_pages_live_on_what_shares_a_unit_with_pages_in_use() -> None:
    """Else each page that a running request needs would take the unit that the last state gave back."""
    world = world_of(8, pages_per_unit=4)
    grows = running(world, prompt(1, seed=1))
    cached(world, prompt(3, seed=2))
    others = [running(world, prompt(0, seed=seed)) for seed in range(3, 8)]
    assert arena_of(world).free_units == 1
    assert world.directory.extend(grows.record, tokens=2 * PAGE)
    assert arena_of(world).free_units == 1
    assert cached_pages(world, prompt(3, seed=2)) == [0, 1]
    others.append(running(world, prompt(0, seed=8)))
    assert world.directory.extend(grows.record, tokens=4 * PAGE)
    assert not world.directory.extend(grows.record, tokens=5 * PAGE)
    world.wind_up()


def test_slot_counts_that_are_not_the_arena_s_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"l1_slots = \(3, 3\): expected \(8, 4\)"):
        DirectoryConfig((3, 3), (0, 0), l1_arena=shared(HYBRID, units=4, slots_per_unit=(2, 1)))


def test_under_write_back_a_state_that_takes_units_of_pages_waits_until_they_are_written() -> None:
    """Its own group has nothing to write down: what has to be written lies in the way of it."""
    world = World(HYBRID, l1=0, l2=20, arena=shared(HYBRID, units=8, slots_per_unit=(2, 1)), policy=WriteBack)
    cached(world, prompt(7, seed=1))
    cached(world, prompt(6, seed=2))
    world.run_all()
    assert arena_of(world).free_units == 1
    for seed in range(3, 9):
        live = world.open(prompt(0, seed=seed))
        world.load_whole(live, patient=True)
        assert live.record.is_loaded
        world.check()
    assert not world.directory.stats.tokens_lost
    world.wind_up()


def published(world: World, tokens: list[int], tier: Tier, group: int, pages: list[int]) -> None:
    """A copy of each of these pages lies in a tier."""
    index, keys = world.directory.index, world.page_keys(tokens)
    handles = index.acquire(tier, group, len(pages))
    assert handles is not None
    for page, handle in zip(pages, handles, strict=True):
        memory = (world.executor.l1, world.executor.l2)[tier]
        memory[group][slot_of(handle)] = (world.truth[keys[page]], group)
        index.publish(index.obtain(keys, page), tier, group, handle)


def test_a_load_without_room_passes_over_a_prefix_whose_window_went_when_it_tried_a_longer_one() -> None:
    """Six pages of attention are more than L1 has units. Five leave none for their window, and took that of three."""
    groups = (FULL, WINDOW)
    world = World(groups, l1=0, l2=8, arena=shared(groups, units=5, slots_per_unit=(1, 2)), has_l3=False)
    tokens = prompt(6)
    published(world, tokens, Tier.L2, 0, list(range(6)))
    published(world, tokens, Tier.L2, 1, [0, 3, 4, 5])
    published(world, tokens, Tier.L1, 1, [1, 2])
    live = world.open(tokens)
    assert live.record.local_tokens == {"l1": 0, "l2": 6 * PAGE}
    world.load_whole(live)
    assert live.record.loaded_pages == 1
    assert live.record.cut_reason == "no_device_capacity"
    world.check()
    world.wind_up()
