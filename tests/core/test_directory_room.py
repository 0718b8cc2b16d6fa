"""The directory when room is scarce: who waits, who is cut short, and who has to go."""

from __future__ import annotations

import pytest

from hicache.index import Index
from hicache.node import Node, Tier
from hicache.room import Room
from hicache.spec import CacheSpec, Group
from tests.core.situations import HYBRID, evict_all, loaded_pages, prefetching, prompt, restore, slots_free
from tests.core.world import FULL, MODELS, PAGE, STATE, WINDOW, World


@pytest.mark.parametrize(("groups", "expected"), [((FULL,), 5), (HYBRID, 3)], ids=["attention", "hybrid"])
def test_a_load_without_room_for_all_takes_the_longest_prefix_that_fits(
    groups: tuple[Group, ...], expected: int
) -> None:
    world = World(groups, l1=10, l2=20, prefetch_l2_share=1.0)
    writer = world.open(prompt(8))
    world.load_whole(writer)
    for page in range(8):
        world.compute(writer, pages=1, snapshot=page in (0, 2, 5, 7))
    world.release(writer)
    world.run_all()
    evict_all(world, Tier.L1)
    hog = world.open(prompt(5, seed=1))
    world.load_whole(hog)
    world.compute(hog, pages=5, snapshot=False)
    live = world.open(prompt(8))
    world.load_whole(live)
    assert loaded_pages(live) == expected
    assert live.record.cut_reason == "no_device_capacity"
    world.check()
    world.wind_up()


def test_what_a_prefetch_brought_and_l1_has_no_room_for_is_counted_by_that_reason() -> None:
    world = World((FULL,), l1=5, l2=20, prefetch_l2_share=1.0)
    live = prefetching(world, prompt(8))
    restore(world, live)
    assert loaded_pages(live) == 5
    assert world.directory.stats.prefetch_dropped == {"no_device_capacity": 3 * PAGE}
    assert world.directory.stats.prefetch_used == 5 * PAGE
    world.wind_up()


def chain_in_l2(world: World, pages: int) -> list[Node]:
    """Pages that lie in L2 only."""
    world.serve(prompt(pages))
    evict_all(world, Tier.L1)
    nodes = [world.directory.index.nodes[key] for key in world.page_keys(prompt(pages))]
    assert all(node.masks == [0, 1] for node in nodes)
    return nodes


def test_what_could_not_be_evicted_for_a_moment_counts_as_room_when_it_can() -> None:
    world = World((FULL,), l1=20, l2=20, prefetch_l2_share=1.0)
    index = world.directory.index
    nodes = chain_in_l2(world, 20)
    leaf = index.pin(nodes[-1].entries[Tier.L2][0])
    assert index.acquire(Tier.L2, 0, 1) is None
    index.unpin(leaf)
    assert index.room(Tier.L2, 0) == 20
    live = prefetching(world, prompt(15, seed=1))
    restore(world, live)
    assert loaded_pages(live) == 15
    world.wind_up()


def test_looking_for_what_may_be_evicted_looks_at_each_page_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World((FULL,), l1=400, l2=400)
    index = world.directory.index
    leaf = index.pin(chain_in_l2(world, 400)[-1].entries[Tier.L2][0])
    looks = 0
    is_busy = Room._is_busy

    def counting(node: Node) -> bool:
        nonlocal looks
        looks += 1
        return is_busy(node)

    monkeypatch.setattr(Room, "_is_busy", staticmethod(counting))
    for _ in range(3):
        assert index.acquire(Tier.L2, 0, 1) is None
    assert looks <= 4 * 400
    index.unpin(leaf)
    assert index.acquire(Tier.L2, 0, 1) is not None


def test_children_go_before_their_parents() -> None:
    world = World((FULL,), l1=6, l2=0)
    world.serve(prompt(6))
    keys = world.page_keys(prompt(6))
    for left in (5, 4, 3):
        handles = world.directory.index.acquire(Tier.L1, 0, 1)
        assert handles is not None
        assert list(world.directory.index.nodes) == keys[:left]


def test_the_least_recently_used_of_two_prompts_goes_first() -> None:
    world = World((FULL,), l1=8, l2=0)
    world.serve(prompt(4, seed=1))
    world.serve(prompt(4, seed=2))
    world.serve(prompt(4, seed=1))
    assert world.directory.index.acquire(Tier.L1, 0, 4) is not None
    assert world.open(prompt(4, seed=1)).record.local_tokens["l1"] == 4 * PAGE
    assert world.open(prompt(4, seed=2)).record.local_tokens["l1"] == 0


def test_pages_in_use_are_never_evicted() -> None:
    world = World(HYBRID, l1=8, l2=8)
    world.serve(prompt(3))
    live = world.open(prompt(3))
    for tier in Tier:
        for group in range(2):
            index = world.directory.index
            handles = index.acquire(tier, group, index.room(tier, group))
            assert handles is not None
            index.release(tier, group, handles)
    world.load_whole(live)
    assert loaded_pages(live) == 3
    world.check()
    world.wind_up()


def test_using_a_page_makes_its_copies_in_both_tiers_young() -> None:
    world = World((FULL,), l1=20, l2=8)
    world.serve(prompt(4, seed=1))
    world.serve(prompt(4, seed=2))
    world.release(world.open(prompt(4, seed=1)))  # from L1; its copies in L2 are in use as well
    assert world.directory.index.acquire(Tier.L2, 0, 4) is not None
    masks = {seed: world.directory.index.nodes[world.page_keys(prompt(4, seed=seed))[0]].masks for seed in (1, 2)}
    assert masks == {1: [1, 1], 2: [1, 0]}


@pytest.mark.parametrize("tight", [0, 1, 2])
def test_room_in_one_group_is_given_back_when_another_group_has_none(tight: int) -> None:
    groups = (FULL, MODELS[1][1], WINDOW)
    slots = tuple(3 if group == tight else 20 for group in range(3))
    world = World(groups, l1=slots, l2=slots, prefetch_l2_share=1.0, store_l2_share=1.0)
    live = prefetching(world, prompt(8))
    restore(world, live)
    assert loaded_pages(live) == (8 if tight == 2 else 3)  # of the window two pages are enough
    free = slots_free(world)
    assert world.directory.extend(live.record, tokens=12 * PAGE) is False
    assert slots_free(world) == free
    world.check()
    world.wind_up()


@pytest.mark.parametrize("tight", [0, 1])
def test_room_is_only_an_upper_bound_and_what_was_taken_in_vain_is_given_back(
    tight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = tuple(7 if group == tight else 40 for group in range(2))
    world = World(MODELS[1], l1=slots, l2=40, prefetch_l2_share=1.0)
    world.fill_l3(prompt(20))
    monkeypatch.setattr(Room, "available", lambda self, tier, group: 40)
    live = world.open(prompt(20))
    world.prefetch(live)
    restore(world, live)
    assert 7 * 3 // 4 <= loaded_pages(live) <= 7
    world.check()
    world.wind_up()


@pytest.mark.parametrize("tight", [0, 1])
def test_a_prefetch_that_finds_less_room_than_it_counted_on_takes_less(
    tight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = tuple(7 if group == tight else 40 for group in range(2))
    world = World(MODELS[1], l1=40, l2=slots, prefetch_l2_share=1.0)
    world.fill_l3(prompt(20))
    monkeypatch.setattr(world.prefetcher.fetches, "room", lambda group: 40)
    live = world.open(prompt(20))
    world.prefetch(live)
    restore(world, live)
    assert 7 * 3 // 4 <= loaded_pages(live) <= 7
    world.check()
    world.wind_up()


@pytest.mark.parametrize("tight", [0, 1])
def test_a_page_goes_down_with_all_its_groups_or_not_at_all(tight: int) -> None:
    slots = tuple(3 if group == tight else 40 for group in range(2))
    world = World(MODELS[1], l1=40, l2=slots)
    live = world.open(prompt(8))
    world.load_whole(live)
    world.compute(live, pages=8, snapshot=False)
    assert world.directory.stats.skipped == {"backup.no_host_capacity": 1}
    world.run_all()
    assert [world.directory.index.nodes[key].masks[Tier.L2] for key in live.record.keys] == [3] * 3 + [0] * 5
    world.check()
    world.wind_up()


def test_a_plan_that_rests_on_pages_of_this_engine_keeps_them() -> None:
    world = World((WINDOW, STATE), l1=40, l2=20, prefetch_l2_share=0.5)
    world.serve(prompt(8), snapshot=False)  # the window without a state: nothing of it is usable by itself
    evict_all(world, Tier.L1)
    windows = {(page, 0) for page in range(8)}
    world.fill_l3(prompt(8), without=frozenset(windows))
    for key in world.page_keys(prompt(8)):
        world.lose_in_l3(key, 0)
    live = world.open(prompt(8))
    assert (live.record.keep.path, live.record.keep.entries) == (None, [])
    world.prefetch(live)
    world.run_all()
    for seed in range(1, 6):
        world.serve(prompt(12, seed=seed))
    world.load_whole(live)
    assert loaded_pages(live) == 8
    world.check()
    world.wind_up()


def test_what_could_not_be_evicted_for_a_moment_is_again_the_first_to_go() -> None:
    world = World((FULL,), l1=20, l2=12)
    index = world.directory.index
    nodes = chain_in_l2(world, 6)
    leaf = index.pin(nodes[-1].entries[Tier.L2][0])
    assert index.acquire(Tier.L2, 0, 7) is None
    index.unpin(leaf)
    world.serve(prompt(6, seed=1))
    evict_all(world, Tier.L1)
    assert index.acquire(Tier.L2, 0, 6) is not None
    assert set(index.nodes) == set(world.page_keys(prompt(6, seed=1)))


def test_a_page_whose_last_unwritten_object_is_on_its_way_down_is_not_written_again() -> None:
    """Its attention is in L3 and waits for the page below it; its state is being copied to L2."""
    spec = CacheSpec("m", "r", (FULL, STATE), page_tokens=PAGE)
    index = Index(spec, ((2, 2), (4, 4)), has_l3=True, spares_unwritten=True)
    keys = [b"first", b"second"]
    for page in range(2):
        node = index.obtain(keys, page)
        (slot,) = index.acquire(Tier.L1, 0, 1) or []
        index.publish(node, Tier.L1, 0, slot)
        index.stored(node, 1)
    first, second = (index.nodes[key] for key in keys)
    (slot,) = index.acquire(Tier.L1, 1, 1) or []
    state = index.publish(first, Tier.L1, 1, slot)
    below = second.entries[Tier.L1][0]
    assert below is not None
    index.pin(below)  # so that nothing of the first page can go, and it is parked
    assert index.acquire(Tier.L1, 0, 1) is None
    with index.next_unwritten(Tier.L1, 0) as entry:
        assert entry is not None, "its state is unwritten"
        assert entry.node is first
    assert index.acquire(Tier.L1, 0, 1) is None
    first.copying = 1 << 1
    index.pin(state)
    with index.next_unwritten(Tier.L1, 0) as entry:
        assert entry is None
