"""The directory with several ranks, and with attention and states that must agree."""

from __future__ import annotations

import pytest

from hicache.errors import StateNotCommitted, UsageError
from hicache.jobs import CopyJob, CopyKind, FetchJob, Job, LookupJob
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.prefetch_record import REPLANS_MAX
from hicache.slots import slot_of
from tests.core.simulated_executor import EMPTY, failing, no_fault
from tests.core.situations import HYBRID, loaded_pages, prefetching, prompt
from tests.core.world import MODELS, PAGE, STATE, World


def test_a_copy_that_fails_on_one_rank_fails_on_all() -> None:
    world = World(HYBRID, l1=8, l2=8, ranks=3)
    live = world.open(prompt(2))
    world.load_whole(live)
    world.compute(live, pages=2, snapshot=False)
    for rank in range(3):
        world.executor.run(0, failing(Outcome.IO_ERROR, 1) if rank == 1 else no_fault)
    assert [world.directory.index.nodes[key].masks[Tier.L2] for key in live.record.keys] == [1, 0]
    world.run_all()
    world.check()
    world.wind_up()


@pytest.mark.parametrize("trouble", ["missing", "fails", "late", "evicted from L2"])
def test_br_138_a_sidecar_page_that_is_not_there_ends_the_prefix_for_all_pools(trouble: str) -> None:
    groups = MODELS[1]  # two full-attention groups
    world = World(groups, l1=24, l2=24, prefetch_l2_share=1.0)
    live = prefetching(world, prompt(10), without=frozenset({(5, 1)} if trouble == "missing" else set()))
    world.executor.run_kind(LookupJob)
    if trouble == "evicted from L2":
        world.lose_in_l3(live.record.keys[5], 1)

    def fault(job: Job, item: int) -> Outcome | None:
        is_it = isinstance(job, FetchJob) and (job.items[item].block_key, job.items[item].group) == (
            live.record.keys[5],
            1,
        )
        return Outcome.CORRUPT if is_it else None

    if trouble == "late":
        last = len(world.executor.waiting) - 1
        assert last == 1  # pages 0 to 7, pages 8 and 9
        world.executor.run(last)
        expected = 0
    else:
        world.executor.run_all(fault if trouble == "fails" else no_fault)
        expected = 5
    world.load(live)
    world.executor.run_kind(CopyKind.LOAD)
    assert loaded_pages(live) == expected
    visible = [key for key in live.record.keys if key in world.directory.index.nodes]
    assert visible == live.record.keys[:expected]
    world.check()
    world.run_all()
    world.check()
    world.wind_up()


@pytest.mark.parametrize("boundary", range(1, 6))
@pytest.mark.parametrize("leg", ["missing", "fails", "attention fails", "aborted", "ok"])
def test_br_139_attention_and_state_are_restored_for_one_boundary_or_not_at_all(leg: str, boundary: int) -> None:
    world = World(HYBRID, l1=12, l2=12, prefetch_l2_share=1.0)
    tokens = prompt(boundary)
    earlier = {(page, 1) for page in range(boundary - 1)}
    world.fill_l3(tokens, without=frozenset(earlier | ({(boundary - 1, 1)} if leg == "missing" else set())))
    live = world.open(tokens)
    world.prefetch(live)
    world.executor.run_kind(LookupJob)
    broken = {"fails": 1, "attention fails": 0}.get(leg)

    def fault(job: Job, item: int) -> Outcome | None:
        last = live.record.keys[boundary - 1]
        is_it = isinstance(job, FetchJob) and (job.items[item].block_key, job.items[item].group) == (last, broken)
        return Outcome.IO_ERROR if is_it else None

    if leg == "aborted":
        world.release(live)
        world.run_all()
    else:
        world.executor.run_all(fault)
        assert world.directory.is_settled(live.record)
        world.load_whole(live)
        assert loaded_pages(live) == (boundary if leg == "ok" else 0)
        if leg != "ok":
            assert world.executor.l1[1][slot_of(live.record.live[1])] == EMPTY
    world.check()
    world.wind_up()


@pytest.mark.parametrize("broken", [{0}, {1}, {0, 1}], ids=["attention", "state", "both"])
def test_br_143_recovery_goes_to_the_latest_boundary_valid_in_all_groups_and_spares_neighbours(
    broken: set[int],
) -> None:
    world = World(HYBRID, l1=24, l2=24)
    world.serve(prompt(6))
    neighbour = world.open(prompt(3))
    world.load_whole(neighbour)
    shared = [list(table) for table in neighbour.record.tables]
    for _ in range(2):  # pages 3 to 5 leave L1, the neighbour's stay
        for group in range(2):
            handles = world.directory.index.acquire(Tier.L1, group, world.directory.index.room(Tier.L1, group))
            assert handles is not None
            world.directory.index.release(Tier.L1, group, handles)
    live = world.open(prompt(6))
    world.load(live)

    def fault(job: Job, item: int) -> Outcome | None:
        assert isinstance(job, CopyJob)
        source = job.items[item]
        is_last = source.group == 1 or item == 2  # the state, or attention of page 5
        return Outcome.IO_ERROR if is_last and source.group in broken else None

    world.executor.run_kind(CopyKind.LOAD, fault)
    assert not live.record.is_loaded
    world.load_whole(live)
    assert loaded_pages(live) == 5
    assert [list(table) for table in neighbour.record.tables] == shared
    world.check()
    assert world.compute(live, pages=1, snapshot=True)
    world.run_all()
    world.check()
    world.wind_up()


def test_two_requests_that_hit_one_snapshot_each_get_their_own_copy() -> None:
    world = World(HYBRID, l1=12, l2=12)
    world.serve(prompt(2))
    twins = [world.open([*prompt(2)[:-1], 7 + number, 8, 9]) for number in range(2)]
    for live in twins:
        world.load_whole(live)
        assert loaded_pages(live) == 2
    assert twins[0].record.live[1] != twins[1].record.live[1]
    world.compute(twins[0], pages=1, snapshot=True)
    world.check()
    world.wind_up()


def test_a_model_of_states_alone_may_stand_within_a_page() -> None:
    world = World((STATE,), l1=8, l2=8)
    live = world.open([1, 2, 3, 4, 5])
    world.load_whole(live)
    world.directory.store(live.record, computed=5, state_at=None, state_pending=0)
    with pytest.raises(UsageError, match="computed = 6: the request has tokens and pages for 0 to 5"):
        world.directory.store(live.record, computed=6, state_at=None, state_pending=0)
    world.wind_up()


@pytest.mark.parametrize(
    ("state_at", "pending", "named"),
    [(2 * PAGE, 1, "state_pending = 1"), (PAGE, 0, f"state_at = {PAGE}"), (2 * PAGE + 1, 0, "state_at = 5")],
)
def test_a_snapshot_where_the_state_is_not_committed_is_refused_and_nothing_is_published(
    state_at: int, pending: int, named: str
) -> None:
    world = World(HYBRID, l1=8, l2=8)
    live = world.open(prompt(2))
    world.load_whole(live)
    assert world.directory.extend(live.record, tokens=2 * PAGE + 1)
    computed = 2 * PAGE + 1 if state_at == 2 * PAGE + 1 else 2 * PAGE
    with pytest.raises(StateNotCommitted, match=named):
        world.directory.store(live.record, computed=computed, state_at=state_at, state_pending=pending)
    assert world.directory.index.nodes == {}
    world.wind_up()


def test_a_snapshot_that_cannot_be_fetched_is_made_up_for_by_an_earlier_one() -> None:
    world = World(HYBRID, l1=16, l2=16, prefetch_l2_share=1.0)
    world.fill_l3(prompt(8), without=frozenset((page, 1) for page in (0, 1, 3, 5, 6)))  # snapshots at 3, 5 and 8 pages
    live = world.open(prompt(8))
    world.prefetch(live)

    def fault(job: Job, item: int) -> Outcome | None:
        is_last = isinstance(job, FetchJob) and (job.items[item].block_key, job.items[item].group) == (
            live.record.keys[7],
            1,
        )
        return Outcome.CORRUPT if is_last else None

    world.executor.run_all(fault)
    assert world.directory.is_settled(live.record)
    world.load_whole(live)
    assert loaded_pages(live) == 5
    assert world.directory.stats.prefetch_used == 5 * PAGE
    assert world.directory.stats.prefetch_dropped == {"corrupt": 3 * PAGE}
    world.check()
    world.wind_up()


def test_a_prompt_whose_objects_fail_one_by_one_is_not_tried_for_ever() -> None:
    world = World(HYBRID, l1=16, l2=16, prefetch_l2_share=1.0)
    live = prefetching(world, prompt(8))
    states_tried = 0

    def fault(job: Job, item: int) -> Outcome | None:
        nonlocal states_tried
        if not isinstance(job, FetchJob) or job.items[item].group != 1:
            return None
        states_tried += 1
        return Outcome.IO_ERROR

    world.executor.run_all(fault)
    assert world.directory.is_settled(live.record)
    assert states_tried <= 2 * (1 + REPLANS_MAX)  # with each plan an earlier one, perhaps
    world.load_whole(live)
    assert loaded_pages(live) == 0
    world.check()
    world.wind_up()


def test_br_146_attention_that_no_snapshot_makes_usable_is_counted() -> None:
    world = World(HYBRID, l1=16, l2=16)
    world.serve(prompt(8), snapshot=False)
    live = world.open(prompt(8))
    world.load_whole(live)
    assert loaded_pages(live) == 0
    assert world.directory.stats.tokens_attention_only == 8 * PAGE
