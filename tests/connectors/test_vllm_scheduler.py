"""The scheduler's half of the vLLM connector, against a store that remembers what it was told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hicache.connectors.vllm_pages import Geometry
from hicache.connectors.vllm_scheduler import Identity
from hicache.connectors.vllm_spec import BlockGroup
from hicache.errors import UsageError
from hicache.samples import METRICS
from tests.connectors.vllm_scheduler_world import HYBRID, PAGE, World, computed, saved_pages


def test_steps_that_prefill_are_timed_and_their_times_told_with_what_they_computed() -> None:
    world = World()
    request, other = world.request("a", range(30)), world.request("b", range(100, 140))
    request.num_computed_tokens = 8
    plan = world.plan({"a": 22, "b": 24})
    assert plan.is_timed
    world.side.prefill_times.computed({(plan.number, 0): 0.5})
    assert world.logged("tell_step") == [([(8, 30), (0, 24)], 0.5)]
    request.num_computed_tokens, other.num_computed_tokens = 29, 24
    assert not world.plan({"a": 1}).is_timed
    assert not world.plan({"a": 4}).is_timed, "drafts are no prefill"
    assert not world.plan().is_timed


def test_full_pages_are_saved_after_the_step_that_fills_them_and_each_once() -> None:
    world = World()
    request = world.request("a", range(30))
    world.compute(request, 10)
    world.compute(request, 10)
    world.compute(request, 10)
    assert world.logged("save") == [(1, {0: {0: 10}}), (2, {0: {1: 11}}), (3, {0: {2: 12}})]


def test_drafts_are_not_saved_before_they_are_tokens_of_the_request() -> None:
    world = World()
    request = world.request("a", range(14))
    world.compute(request, 14)
    world.compute(request, 4)  # one token and three drafts: 18 positions, 14 tokens
    assert saved_pages(world) == [0]
    request.num_computed_tokens = 15  # the drafts were refused
    request.tokens += [14]
    world.compute(request, 1)
    assert saved_pages(world) == [0]
    request.tokens += [15]
    world.compute(request, 1)
    assert saved_pages(world) == [0, 1]


def test_what_was_saved_is_matched_and_loaded_into_the_blocks_of_the_request() -> None:
    world = World()
    computed(world, range(30))
    request = world.request("b", range(30))
    assert world.side.matched(request, 0) == 24
    world.side.allocated(request, ([5, 6, 7],), 24)
    plan = world.plan()
    assert world.logged("load") == [(plan.number, 0, 24, {0: {0: 5, 1: 6, 2: 7}})]
    assert (plan.received, plan.failed) == (frozenset(), frozenset())
    world.cache.records[-1].load.done = True  # type: ignore[union-attr]
    plan = world.plan()
    assert (plan.received, plan.failed) == ({"b"}, frozenset())
    world.side.allocated(request, ([5, 6, 7, 8],), 0)
    assert world.plan().received == frozenset()


def test_the_last_token_is_left_to_compute() -> None:
    world = World()
    computed(world, range(25))
    assert world.side.matched(world.request("b", range(24)), 0) == 16
    assert world.side.matched(world.request("c", range(25)), 0) == 24


def test_br_012_what_vllm_has_itself_is_not_loaded_again() -> None:
    world = World()
    computed(world, range(30))
    request = world.request("b", range(30))
    assert world.side.matched(request, 16) == 8
    world.side.allocated(request, ([1, 2, 3],), 8)
    world.plan()
    assert world.logged("load")[0][1:] == (16, 24, {0: {2: 3}})
    assert world.side.matched(world.request("c", range(30)), 24) == 0


def test_a_load_begins_after_its_step_which_may_zero_the_blocks() -> None:
    world = World()
    computed(world, range(30))
    request = world.request("b", range(30))
    world.side.matched(request, 0)
    world.side.allocated(request, ([5, 6, 7],), 24)
    world.cache.log.clear()
    world.side.plan({}, world.blocks.get, {}, [9])
    assert [entry[0] for entry in world.cache.log] == ["step", "load"]
    assert world.logged("step")[0][1] == [5, 6, 7, 9]


def test_a_request_waits_while_its_prefetch_is_worth_it() -> None:
    world = World()
    computed(world, range(30))
    world.cache.ready = False
    request = world.request("b", range(30))
    assert [world.side.matched(request, 0) for _ in range(3)] == [None, None, None]
    world.cache.ready = True
    assert world.side.matched(request, 0) == 24


def test_a_step_is_idle_when_nothing_is_computed_and_something_waits() -> None:
    world = World()
    computed(world, range(30))
    assert not world.plan().is_idle, "nothing waits"
    request = world.request("b", range(30))
    world.cache.ready = False
    assert world.side.matched(request, 0) is None
    assert world.plan().is_idle
    assert not world.plan().is_idle, "nobody has asked since"
    assert world.side.matched(request, 0) is None
    other = world.request("c", range(100, 130))
    assert not world.compute(other, 30).is_idle
    world.cache.ready = True
    assert world.side.matched(request, 0) == 24
    world.side.allocated(request, ([5, 6, 7],), 24)
    assert world.plan().is_idle, "it is being loaded"
    world.cache.records[1].load.done = True  # type: ignore[union-attr]
    plan = world.plan()
    assert (plan.received, plan.is_idle) == ({"b"}, False)


def test_a_failed_load_is_told_once_and_not_tried_again() -> None:
    world = World()
    computed(world, range(30))
    request = world.request("b", range(30))
    world.side.matched(request, 0)
    world.side.allocated(request, ([5, 6, 7],), 24)
    world.plan()
    world.cache.fail(world.cache.records[-1])
    plan = world.plan()
    assert (plan.received, plan.failed) == ({"b"}, {"b"})
    assert world.side.matched(request, 0) == 0
    assert world.plan().failed == frozenset()


def test_a_request_that_ends_while_it_is_loaded_is_reported_when_the_copies_have_ended() -> None:
    world = World()
    computed(world, range(30))
    request = world.request("b", range(30))
    world.side.matched(request, 0)
    world.side.allocated(request, ([5, 6, 7],), 24)
    world.plan()
    world.side.finished(request)
    record = world.cache.records[-1]
    assert world.plan().received == frozenset()
    assert not record.released
    assert record.load is not None
    record.load.done = record.load.failed = True
    plan = world.plan()
    assert (plan.received, plan.failed) == ({"b"}, frozenset())
    assert record.released


def test_every_request_is_given_back_however_it_ends() -> None:
    world = World()
    requests = [world.request(str(number), range(30)) for number in range(4)]
    world.compute(requests[0], 30)
    world.side.matched(requests[1], 0)
    for request in requests:
        world.side.finished(request)
        world.side.finished(request)  # vLLM says so once; twice does no harm
    world.plan({"0": 1})
    assert all(record.released for record in world.cache.records)


def test_a_preempted_request_is_matched_with_what_it_has_generated() -> None:
    world = World()
    request = world.request("a", range(14))
    world.compute(request, 14)
    for token in range(14, 20):
        request.tokens.append(token)
        world.compute(request, 1)
    request.num_computed_tokens = 0
    assert world.side.matched(request, 0) == 16


def test_hashes_finer_than_a_page_are_taken_at_its_end() -> None:
    world = World(hash_tokens=2)
    request = world.request("a", range(30))
    assert [key for _, key in world.cache.records[0].keys] == request.block_hashes[3::4]


def test_several_blocks_to_a_page_are_groups_of_their_own() -> None:
    geometry = Geometry(
        (BlockGroup(0, 0, 2, is_state=False), BlockGroup(0, 1, 2, is_state=False)), page_tokens=PAGE, hash_tokens=4
    )
    assert geometry.attention_slots([[1, 2, 3, 4, 5]], range(3)) == {0: {0: 1, 1: 3, 2: 5}, 1: {0: 2, 1: 4}}


@pytest.mark.parametrize("salt", [b"x", None])
def test_salts_keep_requests_apart(salt: bytes | None) -> None:
    salts = iter([b"x", salt])
    world = World(identity_of=lambda request: Identity(next(salts)))
    computed(world, range(30))
    assert world.side.matched(world.request("b", range(30)), 0) == (24 if salt else 0)


class Names:
    """What is told of pages, for events."""

    def __init__(self) -> None:
        self.named: list[tuple[str, int, int]] = []  # of which request, from which page on, up to which

    def name_pages(self, request: Any, keys: Sequence[Any], page_hashes: Sequence[bytes], first: int) -> None:
        assert [each for _, each in keys] == list(page_hashes)
        self.named.append((request.request_id, first, len(keys)))

    def forget(self) -> None:
        self.named.append(("all", 0, 0))


def test_pages_are_named_for_events_when_a_request_comes_and_as_it_grows() -> None:
    names = Names()
    world = World(events=names)
    request = world.request("a", range(20))
    world.compute(request, 20)
    request.tokens += range(20, 34)
    world.compute(request, 14)
    world.side.reset()
    assert names.named == [("a", 0, 2), ("a", 2, 4), ("all", 0, 0)]


def test_br_114_a_request_without_identity_neither_loads_nor_saves_and_is_no_miss() -> None:
    world = World(identity_of=lambda request: None)
    request = world.request("a", range(30))
    assert world.side.matched(request, 0) == 0
    world.compute(request, 30)
    world.side.finished(request)
    assert not world.cache.records
    assert not world.logged("save")
    assert world.side.counts.requests_uncached == 1


def test_prompt_logprobs_read_no_cache() -> None:
    world = World()
    computed(world, range(30))
    request = world.request("b", range(30), skip_reading_prefix_cache=True)
    world.cache.log.clear()
    assert world.side.matched(request, 0) == 0
    assert not world.logged("prefetch")


@pytest.mark.parametrize(("loads", "saves"), [(True, False), (False, True)])
def test_a_producer_only_saves_and_a_consumer_only_loads(loads: bool, saves: bool) -> None:
    world = World(loads=loads, saves=saves)
    computed(world, range(30))
    assert bool(world.cache.store) == saves
    world.cache.store |= {(record.root, key): {0} for record in world.cache.records for _, key in record.keys}
    assert bool(world.side.matched(world.request("b", range(30)), 0)) == loads


def test_after_a_reset_nothing_of_before_is_found_and_requests_under_way_save_nothing() -> None:
    world = World()
    computed(world, range(30))
    running = world.request("b", range(100, 130))
    world.compute(running, 10)
    loading = world.request("c", range(30))
    world.side.matched(loading, 0)
    world.side.allocated(loading, ([5, 6, 7],), 24)
    world.plan()
    saves = len(world.logged("save"))
    world.side.reset()
    world.compute(running, 10)
    assert len(world.logged("save")) == saves
    loading_record = world.cache.records[-1]
    assert loading_record.load is not None
    loading_record.load.done = True
    plan = world.plan()
    assert (plan.received, plan.failed) == ({"c"}, {"c"})
    assert world.side.matched(world.request("d", range(30)), 0) == 0
    computed(world, range(30), "e")
    assert world.side.matched(world.request("f", range(30)), 0) == 24
    for name in "bc":
        world.side.finished(running if name == "b" else loading)


def test_a_sequence_that_is_rewritten_is_not_cached_any_more() -> None:
    world = World()
    request = world.request("a", range(30))
    request.tokens[3] = 77
    world.compute(request, 30)
    assert not world.logged("save")
    world.side.finished(request)
    assert all(record.released for record in world.cache.records)


def test_workers_that_write_early_are_given_a_fence_behind_each_step() -> None:
    world = World(zeroes_early=True)
    plan = world.compute(world.request("a", range(30)), 30)
    assert plan.fence == (2, ())
    assert [entry[0] for entry in world.cache.log if entry[0] != "prefetch"] == ["step", "save", "step"]
    assert world.logged("step")[1] == (2, None)


def test_everything_that_is_counted_has_a_metric() -> None:
    world = World()
    computed(world, range(30))
    assert {sample[0] for sample in world.side.samples()} <= {metric.name for metric in METRICS}


@pytest.mark.parametrize("error", [UsageError, IndexError, AssertionError])
def test_a_call_that_fails_costs_the_request_the_cache_and_no_more(
    caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    world = World()
    computed(world, range(30))
    request = world.request("b", range(30))
    world.side.matched(request, 0)
    world.side.allocated(request, ([5, 6, 7],), 24)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise error("a slot is missing")

    world.cache.load = refuse  # type: ignore[method-assign]
    plan = world.plan()
    assert (plan.received, plan.failed) == ({"b"}, {"b"})
    assert "a slot is missing" in caplog.text
    assert world.side.matched(request, 0) == 0
    world.compute(request, 30)
    world.side.finished(request)
    assert world.side.counts.calls_refused == 1
    assert all(record.released for record in world.cache.records)


def test_blocks_that_vllm_does_not_name_cost_the_request_its_load() -> None:
    world = World(HYBRID)
    request = world.request("a", range(17))
    world.compute(request, 16, states=[(0, 11, 16)])
    world.side.finished(request)
    request = world.request("b", range(17))
    assert world.side.matched(request, 0) == 16
    world.side.allocated(request, ([], [5, 6]), 16)  # a state without its block
    plan = world.plan()
    assert (plan.received, plan.failed) == ({"b"}, {"b"})
    assert world.side.matched(request, 0) == 0
    world.side.finished(request)
    assert all(record.released for record in world.cache.records)


def test_a_reset_waits_for_copies_whose_memory_may_be_taken_away_next() -> None:
    world = World()
    computed(world, range(30))
    world.side.reset()
    assert len(world.logged("settle")) == 1


def test_close_ends_the_cache() -> None:
    world = World()
    world.request("a", range(30))
    world.side.close()
    assert world.cache.closed
