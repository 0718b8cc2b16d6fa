"""Promises of prefixes that L3 cannot keep, holes in them, and prefixes that must survive the engine."""

from __future__ import annotations

import pytest

from hicache.directory import Directory
from hicache.jobs import CopyKind
from hicache.node import Tier
from hicache.policies.facts import SuffixFacts
from hicache.policies.write import WriteBack
from hicache.spec import Group
from tests.core.situations import HYBRID, evict_all, loaded_pages, prefetching, prompt, restore
from tests.core.test_directory_policies import in_l3, objects_of
from tests.core.world import FULL, PAGE, WINDOW, World


@pytest.mark.parametrize(
    ("reason", "settings", "pages"),
    [
        ("no_l3", {"has_l3": False}, 8),
        ("below_threshold", {"prefetch_threshold_tokens": 8 * PAGE + 1}, 8),
        ("nothing_to_gain", {}, 0),
    ],
)
def test_br_065_a_declined_prefetch_promises_nothing(reason: str, settings: dict[str, object], pages: int) -> None:
    world = World((FULL,), l1=16, l2=16, **settings)
    world.fill_l3(prompt(8))
    live = world.open(prompt(pages))
    world.prefetch(live)
    assert world.directory.is_settled(live.record)
    assert world.executor.waiting == []
    assert live.record.prefetch is not None
    assert live.record.prefetch.planned_pages == live.record.prefetch.base_pages == 0
    assert world.directory.stats.prefetch_declined == {reason: 1}
    assert world.directory.stats.prefetch_found == 0
    world.load_whole(live)
    assert loaded_pages(live) == 0
    world.wind_up()


def test_br_065_a_prefetch_without_room_promises_nothing_and_says_what_it_found() -> None:
    world = World((FULL,), l1=16, l2=4)
    world.serve(prompt(4, seed=1))
    world.fill_l3(prompt(8))
    live = world.open(prompt(8))
    handles = world.directory.index.acquire(Tier.L2, 0, 4)
    assert handles is not None
    world.prefetch(live)
    world.run_all()
    assert world.directory.is_settled(live.record)
    assert world.directory.stats.prefetch_found == 8 * PAGE
    assert world.directory.stats.prefetch_dropped == {"no_host_capacity": 8 * PAGE}
    assert world.directory.stats.prefetch_in_flight == 0
    world.directory.index.release(Tier.L2, 0, handles)
    world.wind_up()


def test_br_067_pages_behind_a_hole_are_not_found() -> None:
    world = World((FULL,), l1=16, l2=16, prefetch_l2_share=1.0)
    live = prefetching(world, prompt(8), without=frozenset({(0, 0), (1, 0)}))
    world.run_all()
    assert world.directory.stats.prefetch_found == 0
    assert world.directory.stats.skipped == {"lookup.unreachable": 6}
    world.load_whole(live)
    assert loaded_pages(live) == 0
    world.compute(live, pages=8, snapshot=False)
    world.release(live)
    world.run_all()
    evict_all(world, Tier.L1)
    evict_all(world, Tier.L2)
    again = world.open(prompt(8))
    world.prefetch(again)
    restore(world, again)
    assert loaded_pages(again) == 8  # the writer has filled the hole
    assert world.directory.stats.skipped == {"lookup.unreachable": 6}
    world.wind_up()


def test_br_067_a_hole_in_the_middle_ends_the_prefix_and_shows_in_the_counts() -> None:
    """And a hybrid whose last state is missing uses the prefix up to the state before."""
    world = World((FULL,), l1=16, l2=16, prefetch_l2_share=1.0)
    live = prefetching(world, prompt(8), without=frozenset({(3, 0)}))
    world.run_all()
    assert world.directory.stats.skipped == {"lookup.unreachable": 4}
    world.load_whole(live)
    assert loaded_pages(live) == 3
    world.release(live)
    world.wind_up()
    state = len(HYBRID) - 1
    world = World(HYBRID, l1=16, l2=16, prefetch_l2_share=1.0)
    live = prefetching(world, prompt(8), without=frozenset({(page, state) for page in range(5, 8)}))
    world.run_all()
    assert world.directory.stats.skipped == {"lookup.unreachable": 3 * state}
    world.load_whole(live)
    assert loaded_pages(live) == 5
    world.wind_up()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), HYBRID], ids=["attention", "window", "hybrid"])
def test_br_067_l3_gets_every_page_and_never_one_before_its_ancestors(groups: tuple[Group, ...], share: float) -> None:
    world = World(groups, l1=40, l2=20, store_l2_share=share)
    live = world.open(prompt(16))
    world.load_whole(live)
    world.compute(live, pages=16, snapshot=True)
    world.release(live)
    while world.executor.waiting:
        world.executor.run(0)
        stored = [all((key, 0, rank) in world.executor.l3 for rank in range(1)) for key in live.record.keys]
        assert stored == sorted(stored, reverse=True)
    assert all(stored)
    world.check()
    world.wind_up()


class DropsSome:
    """A write policy that refuses some pages."""

    def __init__(self, *refused: bytes) -> None:
        self.refused = refused

    ahead_share = 0.0

    def touch(self, keys: list[bytes], facts: SuffixFacts) -> bool:
        return False

    def wrote(self, size_bytes: int) -> None:
        pass

    def admits(self, keys: list[bytes], facts: SuffixFacts) -> int:
        return next((page for page, key in enumerate(keys) if key in self.refused), len(keys))


def test_br_067_a_policy_that_refuses_a_page_leaves_no_hole_below_it() -> None:
    world = World((FULL,), l1=16, l2=16)
    keys = world.page_keys(prompt(6))
    world.directory = Directory(world.spec, world.config, write_policy=DropsSome(keys[2]))
    world.executor.directory = world.directory
    world.serve(prompt(6))
    assert [(key, 0, 0) in world.executor.l3 for key in keys] == [True, True, False, False, False, False]
    assert [world.directory.index.nodes[key].masks[Tier.L2] for key in keys] == [1, 1, 0, 0, 0, 0]
    world.check()
    world.wind_up()


def test_br_073_a_flush_makes_the_whole_prefix_restorable_though_its_root_was_only_in_l1() -> None:
    world = World(HYBRID, l1=10, l2=10, policy=lambda: WriteBack(ahead_share=0.2), prefetch_l2_share=1.0)
    system = prompt(2)[:-1]
    for number in range(8):  # the common beginning stays hot, the ends are evicted
        world.serve([*system, *prompt(3, seed=number + 1)])
    served = world.page_keys([*system, *prompt(3, seed=8)])
    assert all(world.directory.index.nodes[key].masks[Tier.L1] for key in served[:2])
    world.directory.flush()
    world.run_all()
    assert world.directory.is_all_written
    world.restart()
    assert world.serve([*system, *prompt(3, seed=8)]).record.by_source["l3"] == 5 * PAGE
    world.wind_up()


def test_br_073_a_flush_takes_along_what_is_just_being_copied_to_l2_for_room() -> None:
    world = World((FULL,), l1=8, l2=16, policy=lambda: WriteBack(ahead_share=0.5))
    live = world.open(prompt(4))
    world.load_whole(live)
    world.compute(live, pages=4, snapshot=False)
    world.release(live)
    other = world.open(prompt(2, seed=1))
    world.load(other)
    assert world.directory.extend(other.record, tokens=2 * PAGE)
    world.executor.collect()
    assert world.executor.waiting_for(CopyKind.BACKUP)
    world.directory.flush()
    world.run_all()
    assert world.directory.is_all_written
    assert in_l3(world) == objects_of(world, prompt(4), groups=[0])
    world.wind_up()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), HYBRID], ids=["attention", "window", "hybrid"])
def test_br_067_an_evicted_leaf_takes_its_hot_ancestors_to_l3_first(groups: tuple[Group, ...]) -> None:
    """L2 overflows with ends of conversations; none reaches L3 without the common beginning that stays in L1."""
    world = World(groups, l1=12, l2=8, policy=lambda: WriteBack(ahead_share=0.25), store_l2_share=1.0)
    system = prompt(3)[:-1]
    for number in range(30):
        world.serve([*system, *prompt(2, seed=number + 1)], patient=True)
        world.check()
    assert len(in_l3(world)) > 20
    assert {(key, 0) for key in world.page_keys(system)} <= in_l3(world)
    assert world.directory.stats.tokens_lost == {}
    world.wind_up()
