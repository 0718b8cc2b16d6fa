"""The directory with several ranks, and with attention and states that must agree."""

from __future__ import annotations

import pytest

from hicache.errors import StateNotCommitted, UsageError
from hicache.jobs import FetchJob, Job
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.prefetch_record import REPLANS_MAX
from tests.core.simulated_executor import failing, no_fault
from tests.core.situations import HYBRID, loaded_pages, prefetching, prompt
from tests.core.world import PAGE, STATE, World


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
