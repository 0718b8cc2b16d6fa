"""The read policy in the directory: what is asked for, fetched, waited for and accounted for."""

from __future__ import annotations

import math

import pytest

from hicache.jobs import LookupJob
from hicache.policies.read import (
    LoadFacts,
)
from hicache.read_admission import LOOKUP, PROBE_REST_S_MAX
from tests.core.situations import loaded_pages, prompt
from tests.core.world import FULL, PAGE, STATE, World

# -- in the directory ------------------------------------------------------------------------------------------------


def slow_world(groups: tuple[object, ...] = (FULL,), **settings: object) -> World:
    """Computing a token takes 0.1 s, an object of L3 what ``fetch_s`` says."""
    world = World(groups, l1=40, l2=40, **settings)  # type: ignore[arg-type]
    world.token_s = 0.1
    return world


def learn(world: World, *, fetch_s: float) -> None:
    """One request has come from L3 and computed."""
    world.fetch_s = fetch_s
    world.directory.costs.computed(0, 8 * PAGE, 8 * PAGE * world.token_s)
    world.fill_l3(prompt(8, seed=9))
    world.serve(prompt(8, seed=9), snapshot=False)


def test_what_l3_would_take_too_long_for_is_computed_and_l3_is_not_asked() -> None:
    world = slow_world()
    learn(world, fetch_s=1.0)
    stats, lookups = world.directory.stats, world.directory.stats.objects["lookup.ok"]
    world.fill_l3(prompt(8))
    for _ in range(2):
        live = world.open(prompt(8))
        world.prefetch(live)
        assert world.directory.is_settled(live.record), "nobody waits"
        world.load_whole(live)
        assert loaded_pages(live) == 0
        world.release(live)
    assert stats.prefetch_declined == {"unmeasured": 1, "faster_computed": 2}
    assert stats.prefetch_found == 0
    assert stats.prefetch_probes == 1, "of the first one: it has learnt from all of it, and rests"
    assert stats.objects["lookup.ok"] == lookups
    world.wind_up()


def test_what_l3_turns_out_to_have_too_little_of_is_a_drop() -> None:
    """All eight pages would pay, since a load has a cost of its own; the two that are there do not."""
    world = slow_world()
    costs = world.directory.costs
    costs.computed(0, 8 * PAGE, 8 * PAGE * world.token_s)
    object_bytes = world.spec.object_bytes[0]
    for objects in (1, 2, 4, 8):
        costs.moved("L3", objects * object_bytes, 2.0 * PAGE * world.token_s + objects * 1e-6)
    world.fill_l3(prompt(2))
    live = world.open(prompt(8))
    world.prefetch(live)
    world.executor.run_kind(LookupJob)
    world.load_whole(live)
    assert loaded_pages(live) == 0
    assert world.directory.stats.prefetch_dropped["faster_computed"] == 2 * PAGE
    assert world.directory.stats.prefetch_probes == 1
    world.wind_up()


def test_a_fast_store_is_loaded_from_as_the_control_to_that() -> None:
    world = slow_world()
    learn(world, fetch_s=0.01)
    world.fill_l3(prompt(8))
    live = world.open(prompt(8))
    world.prefetch(live)
    world.run_all()
    world.load_whole(live)
    assert loaded_pages(live) == 8
    assert world.directory.stats.prefetch_probes == 1, "only of the first one"


def test_pages_that_a_probe_has_brought_are_found_in_l2() -> None:
    world = slow_world()
    learn(world, fetch_s=1.0)
    world.fill_l3(prompt(8))
    world.now_s += PROBE_REST_S_MAX
    for _ in range(2):
        live = world.open(prompt(8))
        found = live.record.local_tokens["l2"]
        world.prefetch(live)
        world.run_all()
        world.release(live)
    assert found == PAGE
    world.wind_up()


def test_a_prefix_whose_state_makes_it_too_large_may_have_a_shorter_one_that_pays() -> None:
    """The policy is asked anew with the bytes of the shorter prefix, and what it declines of the rest is a drop."""
    asked: list[LoadFacts] = []

    class Half:
        def tokens(self, facts: LoadFacts) -> int:
            asked.append(facts)
            all_tokens = facts.usable_tokens - facts.held_tokens
            return all_tokens if facts.usable_tokens <= 5 * PAGE else 5 * PAGE

        def patience_s(self, facts: LoadFacts) -> float:
            return math.inf

    world = slow_world((FULL, STATE))
    world.directory._prefetcher._admission._policy = Half()
    world.fill_l3(prompt(8), without=frozenset((page, 1) for page in (0, 1, 3, 4, 5, 6)))
    live = world.open(prompt(8))
    world.directory.prefetch(live.record)
    world.run_all()
    world.load_whole(live)
    assert loaded_pages(live) == 3
    assert [facts.usable_tokens for facts in asked] == [8 * PAGE, 8 * PAGE, 3 * PAGE], "hoped for, found, and less"
    assert world.directory.stats.prefetch_dropped["faster_computed"] == 5 * PAGE


def test_a_request_waits_no_longer_than_computing_would_have_taken() -> None:
    world = slow_world()
    learn(world, fetch_s=0.01)
    world.fill_l3(prompt(8))
    live = world.open(prompt(8))
    world.prefetch(live)
    assert live.record.prefetch is not None
    waits_s = live.record.prefetch.give_up_at_s - world.now_s
    assert waits_s == pytest.approx(8 * PAGE * world.token_s, rel=0.3)


def test_one_late_answer_is_counted_once_and_changes_nothing_and_two_change_all() -> None:
    world = slow_world()
    learn(world, fetch_s=0.01)
    costs = world.directory.costs
    for _ in range(8):
        costs.moved(LOOKUP, 8, 0.001)
    for late, expected_s in enumerate((0.001, 1.0)):
        live = world.open(prompt(8, seed=late))
        world.prefetch(live)
        assert world.executor.waiting_for(LookupJob)
        world.now_s += 1.0
        world.directory.tell_time(world.now_s)
        world.load(live)
        world.now_s += 1.0
        world.run_all()
        world.release(live)
        assert costs.transfer_s(LOOKUP, 8) == pytest.approx(expected_s)
    world.wind_up()
