"""The scheduler's half of the vLLM connector where models have states and windows."""

from __future__ import annotations

from hicache.connectors.vllm_pages import Geometry
from tests.connectors.vllm_scheduler_world import DENSE, HYBRID, PAGE, World, computed


def test_blocks_that_a_window_has_let_go_of_are_neither_saved_nor_loaded() -> None:
    geometry = Geometry(DENSE, page_tokens=PAGE, hash_tokens=PAGE)
    assert geometry.attention_slots([[0, 0, 7]], range(3)) == {0: {2: 7}}


def test_states_are_saved_where_vllm_offers_them_and_loaded_at_the_end() -> None:
    world = World(HYBRID)
    request = world.request("a", range(30))
    world.compute(request, 24, states=[(0, 99, 24)])
    assert world.logged("save") == [(1, {1: {0: 10, 1: 11, 2: 12}, 0: {2: 99}})]
    sibling = world.request("b", range(30))
    assert world.side.matched(sibling, 0) == 24
    world.side.allocated(sibling, ([0, 0, 4], [1, 2, 3]), 24)
    world.plan()
    assert world.logged("load")[0][3] == {1: {0: 1, 1: 2, 2: 3}, 0: {2: 4}}


def test_a_state_within_a_page_is_not_saved() -> None:
    world = World(HYBRID)
    world.compute(world.request("a", range(30)), 24, states=[(0, 99, 20), (0, 98, 0)])
    assert world.logged("save") == [(1, {1: {0: 10, 1: 11, 2: 12}})]


def test_a_checkpoint_is_asked_for_where_siblings_diverge() -> None:
    world = World(HYBRID)
    world.compute(world.request("a", range(50)), 48, states=[(0, 99, 48)])
    sibling = world.request("b", [*range(32), *range(100, 118)])
    assert world.side.matched(sibling, 0) == 0
    assert sibling.shared_prefix_boundary == 32
    world.compute(sibling, 32, states=[(0, 98, 32)])
    third = world.request("c", [*range(32), *range(200, 218)])
    assert world.side.matched(third, 0) == 32
    assert third.shared_prefix_boundary == 0


def test_a_model_without_states_needs_no_checkpoint() -> None:
    world = World()
    computed(world, range(30))
    request = world.request("b", range(30))
    world.side.matched(request, 0)
    assert request.shared_prefix_boundary == 0
