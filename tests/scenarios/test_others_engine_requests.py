"""What others met in the life of a request in an engine: preemption, windows, boundaries, states, ends."""

from __future__ import annotations

import itertools
import random

import pytest

from hicache.jobs import CopyKind
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.spec import PagedGroup
from tests.connectors.test_vllm_scheduler import HYBRID, PAGE, World, computed, saved_pages
from tests.connectors.vllm_fakes import Request
from tests.core import world as directory
from tests.core.simulated_executor import failing
from tests.core.situations import evict_all, loaded_pages, prefetching, prompt, slots_free

WINDOWED = (directory.FULL, directory.WINDOW)
HYBRIDS = (directory.FULL, directory.STATE)


# -- in vLLM's scheduler ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", range(0, 31, 1))
def test_oe_08_an_engine_that_has_more_itself_is_never_told_less_than_nothing(own: int) -> None:
    """A preempted request whose own blocks reach farther than what is stored, and to no page's end."""
    world = World()
    computed(world, range(17))
    request = world.request("b", range(31))
    tokens = world.side.matched(request, own)
    assert tokens is not None
    assert tokens == max(0, 16 - own) if own % PAGE == 0 else tokens >= 0
    assert own + tokens <= 30


def test_oe_09_blocks_that_a_window_has_let_go_of_are_not_saved_for_what_they_were() -> None:
    """They are somebody else's by then: a table has none in their place, and no later step saves what it missed."""
    world = World()
    request = Request("a", list(range(40)), PAGE)
    world.side.opened(request, 0)
    table = ([10, 11, 12, 13, 14],)
    request.num_computed_tokens = 0
    world.side.plan({"a": 8}, lambda name: None, {}, ())  # a step whose table nobody gave
    request.num_computed_tokens = 8
    world.side.plan({"a": 24}, lambda name: ([0, 0, 12, 13],), {}, ())
    request.num_computed_tokens = 32
    world.side.plan({"a": 8}, lambda name: table, {}, ())
    assert [slots for _, slots in world.logged("save")] == [{0: {2: 12, 3: 13}}, {0: {4: 14}}]


@pytest.mark.parametrize("length", [16, 17, 23, 24, 25])
def test_oe_10_a_prompt_that_ends_at_a_boundary_is_restored_to_the_state_before_its_last_token(length: int) -> None:
    """Not to one token less than the boundary, with the state of the boundary itself."""
    world = World(HYBRID)
    writer = world.request("a", range(25))
    for page in (1, 2, 3):
        world.compute(writer, PAGE, first_block=10 * page, states=[(0, 10 * page + page - 1, page * PAGE)])
    world.side.finished(writer)
    request = world.request("b", range(length))
    found = world.side.matched(request, 0)
    assert found == (length - 1) // PAGE * PAGE
    pages = found // PAGE
    world.side.allocated(request, ([0] * (pages - 1) + [60], list(range(70, 70 + pages))), found)
    world.plan()
    _, beyond, tokens, slots = world.logged("load")[-1]
    assert (beyond, tokens) == (0, found)
    assert slots[0] == {pages - 1: 60}, "the state at the end of the last page that is restored"
    assert sorted(slots[1]) == list(range(pages))


def test_oe_11_attention_without_a_state_is_no_hit() -> None:
    """Kept, it makes the model go on from a state that it does not have."""
    world = World(HYBRID)
    computed(world, range(25))
    request = world.request("b", range(25))
    assert world.side.matched(request, 0) == 0
    assert request.shared_prefix_boundary == 24, "the next one finds a state there"


def test_oe_12_of_requests_that_share_a_prefix_only_the_one_whose_load_failed_computes() -> None:
    world = World()
    computed(world, range(25))
    requests = [world.request(name, range(25)) for name in "bcd"]
    for number, request in enumerate(requests):
        assert world.side.matched(request, 0) == 24
        world.side.allocated(request, ([20 + 10 * number + page for page in range(3)],), 24)
    world.plan()
    records = world.cache.records[-3:]
    world.cache.fail(records[1])
    for record in (records[0], records[2]):
        assert record.load is not None
        record.load.done = True
    plan = world.plan()
    assert (plan.received, plan.failed) == ({"b", "c", "d"}, {"c"})
    assert world.side.matched(requests[1], 0) == 0, "what failed is not tried again for it"
    assert world.side.matched(world.request("e", range(25)), 0) == 24


def test_oe_13_a_request_that_was_preempted_after_its_load_loads_again_and_does_not_wait_for_it() -> None:
    world = World()
    computed(world, range(25))
    request = world.request("b", range(25))
    for first_block in (20, 30):
        assert world.side.matched(request, 0) == 24
        world.side.allocated(request, ([first_block, first_block + 1, first_block + 2],), 24)
        assert world.plan().received == frozenset()
        load = world.cache.records[-1].load
        assert load is not None
        load.done = True
        assert world.plan().received == {"b"}
        request.num_computed_tokens = 24
        world.compute(request, 1, first_block=first_block)
        request.num_computed_tokens = 0  # preempted
    assert saved_pages(world) == [0, 1, 2] * 2, "each request offers its pages once"


@pytest.mark.parametrize("seed", range(5))
def test_oe_14_whatever_requests_end_at_nothing_of_them_is_kept(seed: int) -> None:
    """Ended while they wait, before and while they load, failed, computed; their ids used again at once."""
    rng = random.Random(seed)
    world = World()
    computed(world, range(41))
    for _ in range(200):
        name = f"r{rng.randrange(4)}"
        request = world.request(name, range(rng.randrange(1, 41)))
        if rng.random() < 0.8 and (found := world.side.matched(request, 0)):
            blocks = list(range(found // PAGE))
            world.side.allocated(request, (blocks,), found)
            if rng.random() < 0.6:
                world.plan()
        elif rng.random() < 0.5:
            world.compute(request, request.num_tokens)
        world.side.finished(request)
        for record in world.cache.records:
            if record.load is not None and not record.load.done:
                record.load.done, record.load.failed = True, rng.random() < 0.3
        world.plan()
        assert not world.side._entries
        assert not world.side._busy
        assert all(record.released for record in world.cache.records)


@pytest.mark.parametrize("settles", [True, False])
def test_oe_22_a_sleep_is_refused_while_blocks_are_still_copied(settles: bool) -> None:
    """vLLM takes the memory of blocks away after a reset that has succeeded. What was saved is found in no case."""
    world = World()
    computed(world, range(25))
    world.cache.settles = settles
    assert world.side.reset() is settles
    assert world.side.matched(world.request("b", range(25)), 0) == 0


@pytest.mark.parametrize("hash_tokens", [2, 4, PAGE])
def test_oe_23_what_is_loaded_ends_where_a_page_ends(hash_tokens: int) -> None:
    """An end within a page was counted as the page's: tokens that nobody had computed."""
    world = World(hash_tokens=hash_tokens)
    computed(world, range(30))
    for length, own in itertools.product(range(1, 41), range(0, 25, PAGE)):
        if own < length:
            tokens = world.side.matched(request := world.request(f"{length} {own}", range(length)), own)
            assert tokens is not None
            assert (own + tokens) % PAGE == 0
            assert tokens == 0 or own + tokens < length
            world.side.finished(request)


# -- in the directory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "lost"), [(WINDOWED, 0), (WINDOWED, 1), (HYBRIDS, 0), (HYBRIDS, 1), ((directory.FULL,), 0)]
)
def test_oe_15_what_a_store_has_lost_is_believed_in_once_and_then_written_again(
    groups: tuple[directory.Group, ...], lost: int
) -> None:
    """Of the page that every continuation needs, in attention, window or state."""
    pages = 8
    world = directory.World(groups, l1=64, l2=64, prefetch_l2_share=1.0, store_l2_share=1.0)
    world.serve(prompt(pages))
    world.flush()
    for tier in Tier:
        evict_all(world, tier)
    world.lose_in_l3(world.page_keys(prompt(pages))[pages - 1], lost)
    hits = []
    for _ in range(3):
        hits.append(loaded_pages(world.serve(prompt(pages))))
        world.flush()
        for tier in Tier:
            evict_all(world, tier)
    assert hits == [pages - 1, pages, pages]
    world.check()
    world.wind_up()


def test_oe_16_an_idle_conversation_loses_windows_and_attention_in_step() -> None:
    """With as many slots for windows as for attention, which is what pools are made with: no window is lost from the
    end of a prompt whose attention is still all there, so there is no cliff from all of it to nothing."""
    window = PagedGroup("swa", (1,), 1, 1, "float32", window_tokens=3 * directory.PAGE)
    for slots in range(20, 61, 5):
        world = directory.World((directory.FULL, window), l1=slots, l2=0)
        world.serve(prompt(20))
        for seed in (1, 2):
            world.serve(prompt(10, seed=seed))
        live = world.open(prompt(20))
        index = world.directory.index
        attention = index.attention_pages(live.record.keys)
        assert sum(live.record.local_tokens.values()) == attention * directory.PAGE
        world.release(live)
        world.wind_up()


@pytest.mark.parametrize("groups", [(directory.FULL,), WINDOWED, HYBRIDS])
def test_oe_17_a_request_that_ends_before_it_has_stored_leaves_nothing_behind(
    groups: tuple[directory.Group, ...],
) -> None:
    """A warm-up, an early end: its pages hold what somebody has computed, and are nobody's prefix."""
    world = directory.World(groups, l1=24, l2=24)
    free = slots_free(world)
    for extended in (0, 1, 4):
        live = world.open(prompt(4))
        world.load_whole(live)
        if extended:
            assert world.directory.extend(live.record, tokens=extended * directory.PAGE)
        world.release(live)
        world.run_all()
        assert slots_free(world) == free
        assert not world.directory.index.nodes
    assert loaded_pages(world.serve(prompt(4))) == 0
    world.wind_up()


def test_oe_24_pages_from_l3_under_pages_that_l1_alone_has_do_not_outlive_them() -> None:
    """Half of a prompt is in L1 and nowhere else, since the policy has not written it; the other half comes from L3."""
    world = directory.World((directory.FULL,), l1=32, l2=32, policy=directory.POLICIES["write_through_selective"])
    world.serve(prompt(4))
    assert not any(node.masks[Tier.L2] for node in world.directory.index.nodes.values())
    world.release(prefetching(world, prompt(8)))
    world.run_all()
    world.check()
    live = prefetching(world, prompt(8))
    world.run_all()
    world.load_whole(live)
    assert loaded_pages(live) == 8
    world.release(live)
    world.run_all()
    evict_all(world, Tier.L1)
    world.check()
    assert sum(world.open(prompt(8)).record.local_tokens.values()) % (8 * directory.PAGE) == 0, "all or nothing is left"
    world.wind_up()


def test_oe_25_an_engine_that_has_nothing_finds_all_that_others_have_stored() -> None:
    """Without a page of its own to hang the others on."""
    for groups in directory.MODELS:
        world = directory.World(groups, l1=32, l2=32, prefetch_l2_share=1.0)
        live = prefetching(world, prompt(9))
        world.run_all()
        world.load_whole(live)
        assert loaded_pages(live) == 9
        world.wind_up()


@pytest.mark.parametrize("groups", [(directory.FULL,), HYBRIDS])
def test_oe_18_pages_of_a_load_that_is_under_way_are_adopted_by_nobody_before_it_has_succeeded(
    groups: tuple[directory.Group, ...],
) -> None:
    """Two requests of one prompt: the second must not find in L1 what the first one's failed copies were to bring."""
    world = directory.World(groups, l1=32, l2=32, prefetch_l2_share=1.0)
    first = prefetching(world, prompt(6))
    world.run_all()
    world.load(first)
    assert first.record.loading
    second = world.open(prompt(6))
    assert second.record.local_tokens["l1"] == 0
    for live in (first, second) * 7:  # a hybrid tries the boundaries before the one that failed
        world.load(live)
        world.executor.run_kind(CopyKind.LOAD, failing(Outcome.IO_ERROR))
        world.run_all()
    assert [loaded_pages(live) for live in (first, second)] == [0, 0]
    world.check()
    world.wind_up()


def test_oe_19_every_prompt_that_was_computed_is_found_whole_whatever_it_was_cut_into() -> None:
    """What a window's reader needs is what its writer keeps, also where chunks end within windows."""
    for pages, chunk in itertools.product((1, 2, 5, 9), (1, 2, 3, 9)):
        world = directory.World(WINDOWED, l1=64, l2=64)
        live = world.open(prompt(pages))
        world.load_whole(live)
        while live.computed < pages * directory.PAGE:
            assert world.compute(live, pages=chunk, snapshot=True)
        world.release(live)
        world.run_all()
        evict_all(world, Tier.L1)
        assert loaded_pages(world.serve(prompt(pages))) == pages
        world.wind_up()
