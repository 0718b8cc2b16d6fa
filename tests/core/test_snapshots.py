"""How live states become snapshots, who may read them, and what goes: at the directory, with every byte told apart."""

from __future__ import annotations

import pytest

from hicache.errors import StateNotCommitted, UsageError
from hicache.jobs import CopyKind
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.policies.snapshot import SnapshotPolicy
from hicache.slots import slot_of
from tests.core.invariants import live_state_is_true
from tests.core.simulated_executor import failing
from tests.core.situations import HYBRID, evict_all, loaded_pages, prompt, slots_free
from tests.core.world import CONV, FULL, PAGE, STATE, WINDOW, Live, World

ALL = (FULL, WINDOW, STATE, CONV)
ENDS = SnapshotPolicy(chunk_ends=False, branch_points=False, state_interval_tokens=None)
BRANCHES = SnapshotPolicy(chunk_ends=False, state_interval_tokens=None)


def loaded(world: World, tokens: list[int]) -> Live:
    live = world.open(tokens)
    world.load_whole(live)
    return live


def snapshots(world: World, tokens: list[int], *, tier: Tier = Tier.L1) -> list[int]:
    """The boundaries, in pages, at which a tier has the states of all groups."""
    states = [g for g, group in enumerate(world.spec.groups) if group in (STATE, CONV)]
    nodes = [world.directory.index.nodes.get(key) for key in world.page_keys(tokens)]
    return [
        page + 1
        for page, node in enumerate(nodes)
        if node is not None and all(node.masks[tier] >> group & 1 for group in states)
    ]


def copies(world: World) -> int:
    """State objects that were copied within L1."""
    objects = world.directory.stats.objects
    return objects["snapshot.ok"] + objects["restore.ok"]


def serve_by_policy(world: World, tokens: list[int], *, chunk_pages: int) -> Live:
    """A whole request that stops at chunk ends and where the policy says. Returns what it was."""
    live = loaded(world, tokens)
    start = loaded_pages(live)
    while start < len(tokens) // PAGE:
        chunk_end = min((start // chunk_pages + 1) * chunk_pages, len(tokens) // PAGE)
        assert world.compute_to_stop(live, pages=chunk_end - start)
        start = live.computed // PAGE
    world.check()
    world.release(live)
    world.run_all()
    return live


# -- donated, handed over, copied ------------------------------------------------------------------------------------


@pytest.mark.parametrize("double_buffering", [False, True])
def test_a_donated_slot_is_the_snapshot_and_nothing_is_copied(double_buffering: bool) -> None:
    world = World(ALL, l1=8, l2=0, double_buffering=double_buffering)
    live = loaded(world, prompt(3))
    slots = {group: slot_of(handle) for group, handle in live.record.live.items()}
    assert world.compute(live, pages=3, snapshot=True, donate=True)
    assert copies(world) == 0
    assert world.directory.stats.objects["donate.ok"] == 2
    node = world.directory.index.nodes[live.record.keys[2]]
    assert {group: slot_of(node.entries[Tier.L1][group].handle) for group in slots} == slots
    assert not live.record.live
    world.release(live)
    assert loaded_pages(loaded(world, prompt(3))) == 3
    world.check()
    world.wind_up()


def test_with_one_state_slot_a_request_can_donate_where_it_could_not_copy() -> None:
    world = World(HYBRID, l1=(8, 1), l2=0)
    live = loaded(world, prompt(2))
    assert world.compute(live, pages=1, snapshot=True)
    assert world.directory.stats.skipped == {"snapshot.no_device_capacity": 1}
    assert world.compute(live, pages=1, snapshot=True, donate=True)
    world.release(live)
    assert snapshots(world, prompt(2)) == [2]
    world.wind_up()


@pytest.mark.parametrize(
    ("state_at", "pending", "named"),
    [(2 * PAGE, 1, "state_pending = 1"), (PAGE, 0, f"state_at = {PAGE}"), (2 * PAGE + 1, 0, "state_at = 5")],
)
def test_a_state_that_is_not_committed_is_not_donated_and_stays_the_requests(
    state_at: int, pending: int, named: str
) -> None:
    world = World(HYBRID, l1=8, l2=8)
    live = loaded(world, prompt(2))
    assert world.directory.extend(live.record, tokens=2 * PAGE + 1)
    computed = 2 * PAGE + 1 if state_at == 2 * PAGE + 1 else 2 * PAGE
    with pytest.raises(StateNotCommitted, match=named):
        world.directory.store(live.record, computed=computed, state_at=state_at, state_pending=pending, donate=True)
    with pytest.raises(UsageError, match="the state of which boundary"):
        world.directory.store(live.record, computed=computed, state_at=None, state_pending=0, donate=True)
    assert world.directory.index.nodes == {}
    assert live.record.live
    world.wind_up()


def test_a_state_that_is_there_already_is_not_donated_and_its_slot_is_free() -> None:
    world = World(HYBRID, l1=8, l2=0)
    world.serve(prompt(2))
    twin = loaded(world, prompt(2)[:-1])  # one page is left to compute
    assert loaded_pages(twin) == 1
    free = slots_free(world)[Tier.L1][1]
    assert world.compute(twin, pages=1, snapshot=True, donate=True)
    assert world.directory.stats.objects["donate.ok"] == 0
    assert slots_free(world)[Tier.L1][1] == free + 1
    world.release(twin)
    world.wind_up()


def test_a_state_that_another_request_is_just_copying_is_not_donated_over_it() -> None:
    world = World(HYBRID, l1=8, l2=0)
    twins = [loaded(world, prompt(1)) for _ in range(2)]
    for live in twins:
        assert world.compute(live, pages=1, snapshot=False)
    world.directory.store(twins[0].record, computed=PAGE, state_at=PAGE, state_pending=0)
    world.directory.store(twins[1].record, computed=PAGE, state_at=PAGE, state_pending=0, donate=True)
    world.run_all()
    world.check()
    assert snapshots(world, prompt(1)) == [1]
    world.wind_up()


def test_a_request_that_has_donated_its_state_can_only_be_released() -> None:
    world = World(HYBRID, l1=8, l2=8)
    live = loaded(world, prompt(3))
    assert world.compute(live, pages=1, snapshot=True, donate=True)
    directory, record = world.directory, live.record
    for misuse in (
        lambda: directory.extend(record, tokens=2 * PAGE),
        lambda: directory.store(record, computed=PAGE, state_at=None, state_pending=0),
        lambda: directory.next_state_stop(record, computed=PAGE, until=2 * PAGE),
        lambda: directory.state_moved(record),
    ):
        with pytest.raises(UsageError, match="has donated its state: it can only be released"):
            misuse()
    world.wind_up()


def test_with_double_buffering_a_snapshot_takes_no_copy_and_neither_does_its_use() -> None:
    world = World(ALL, l1=12, l2=0, double_buffering=True, snapshot_policy=SnapshotPolicy(prefill_interval_tokens=PAGE))
    serve_by_policy(world, prompt(4), chunk_pages=4)
    assert world.directory.stats.objects["hand_over.ok"] == 4 * 2
    live = loaded(world, [*prompt(4), 7, 8])
    assert loaded_pages(live) == 4
    assert live.record.sources.keys() == live.record.live.keys()
    assert world.compute(live, pages=1, snapshot=True)
    assert not live.record.sources
    world.check()
    assert copies(world) == 2  # the last one, which was not asked for before its step
    world.wind_up()


def test_the_snapshot_that_is_read_in_place_is_not_evicted_before_the_state_has_moved() -> None:
    world = World(HYBRID, l1=(12, 3), l2=0, double_buffering=True)
    world.serve(prompt(2))
    evict_all(world, Tier.L2) if any(world.config.l2_slots) else None
    live = loaded(world, prompt(2))
    source = live.record.sources[1]
    assert world.compute(live, pages=0, snapshot=False)
    handles = world.directory.index.acquire(Tier.L1, 1, 1)
    assert world.directory.index.acquire(Tier.L1, 1, 1) is None
    assert source.node.entries[Tier.L1][1] is source
    live_state_is_true(world, live, 1, live.record.live[1])
    world.directory.index.release(Tier.L1, 1, handles or [])
    world.directory.state_moved(live.record)
    assert world.directory.index.room(Tier.L1, 1) == 2
    world.release(live)
    world.wind_up()


def test_a_state_that_has_not_moved_is_no_snapshot_of_a_later_boundary() -> None:
    world = World(HYBRID, l1=8, l2=0, double_buffering=True)
    world.serve(prompt(1))
    live = loaded(world, prompt(3))
    assert world.compute(live, pages=1, snapshot=True, moves=False)  # its updates are in the ring
    with pytest.raises(StateNotCommitted, match=f"state_at = {2 * PAGE}: the state is still that of {PAGE} tokens"):
        world.directory.store(live.record, computed=2 * PAGE, state_at=2 * PAGE, state_pending=0)
    assert snapshots(world, prompt(3)) == [1]
    world.check()
    world.wind_up()


@pytest.mark.parametrize("back_to", [PAGE, 2 * PAGE])
def test_a_state_does_not_go_back_to_a_boundary_before_it(back_to: int) -> None:
    world = World(HYBRID, l1=8, l2=0)
    world.serve(prompt(2), snapshot=back_to == PAGE)
    live = loaded(world, prompt(4))
    assert world.compute(live, pages=3, snapshot=False)
    with pytest.raises(StateNotCommitted, match=rf"state_at = {back_to}: \d tokens are in the state already"):
        world.directory.store(live.record, computed=back_to, state_at=back_to, state_pending=0)
    world.wind_up()


@pytest.mark.parametrize("trouble", ["no room", "emptying fails"])
def test_without_a_spare_slot_the_snapshot_is_a_copy_or_none(trouble: str) -> None:
    world = World(HYBRID, l1=(8, 1 if trouble == "no room" else 2), l2=0, double_buffering=True)
    live = loaded(world, prompt(2))
    fault = failing(Outcome.IO_ERROR)
    assert world.next_stop(live, pages=2, fault=fault) == 2 * PAGE
    assert world.compute(live, pages=2, snapshot=True)
    assert snapshots(world, prompt(2)) == ([] if trouble == "no room" else [2])
    assert world.directory.stats.objects["hand_over.ok"] == 0
    world.check()
    world.wind_up()


def test_a_slot_that_cannot_be_emptied_does_without_the_snapshot() -> None:
    world = World(HYBRID, l1=8, l2=0, double_buffering=True)
    world.serve(prompt(2))
    live = world.open(prompt(2))
    world.load(live)
    world.executor.run_kind(CopyKind.CLEAR, failing(Outcome.IO_ERROR))
    assert not live.record.is_loaded
    world.load_whole(live)
    assert loaded_pages(live) == 1
    world.check()
    world.wind_up()


@pytest.mark.parametrize("moment", ["before", "under way", "prepared", "handed over", "moved"])
def test_a_request_that_is_aborted_at_any_point_gives_every_slot_back(moment: str) -> None:
    world = World(ALL, l1=12, l2=0, double_buffering=True)
    world.serve(prompt(2))
    free = slots_free(world)
    live = loaded(world, prompt(5))
    if moment == "under way":
        world.directory.next_state_stop(live.record, computed=2 * PAGE, until=5 * PAGE)
    elif moment != "before":
        assert world.next_stop(live, pages=1) == 3 * PAGE
    if moment in ("handed over", "moved"):
        assert world.compute(live, pages=1, snapshot=True)
        assert live.record.sources
    if moment == "moved":
        assert world.compute(live, pages=1, snapshot=False)
    world.release(live)
    world.run_all()
    world.check()
    assert slots_free(world) == free
    world.wind_up()


# -- branch points ---------------------------------------------------------------------------------------------------


def session(number: int, *, shared: int = 29, pages: int = 33) -> list[int]:
    """Sessions share their first pages and diverge: BR-146 at one two-thousandth of its size."""
    return prompt(shared)[:-1] + prompt(pages - shared, seed=1 + number)


def test_a_branch_point_in_l3_is_one_though_nothing_of_it_is_here() -> None:
    world = World(HYBRID, l1=100, l2=100, prefetch_l2_share=1.0, snapshot_policy=BRANCHES)
    world.fill_l3(session(0), without=frozenset((page, 1) for page in range(32)))
    live = world.open(session(1))
    world.prefetch(live)
    world.run_all()
    world.load_whole(live)
    assert loaded_pages(live) == 0
    assert world.next_stop(live, pages=33) == 29 * PAGE
    world.wind_up()


def test_two_requests_that_branch_off_together_stop_there_once_and_the_other_one_takes_over() -> None:
    world = World(HYBRID, l1=200, l2=0, snapshot_policy=BRANCHES)
    serve_by_policy(world, session(0), chunk_pages=40)
    first, second = loaded(world, session(1)), loaded(world, session(2))
    assert world.next_stop(first, pages=33) == 29 * PAGE
    assert world.next_stop(second, pages=32) is None
    world.release(first)
    assert world.next_stop(second, pages=32) == 29 * PAGE
    assert world.compute(second, pages=29, snapshot=True)
    third = loaded(world, session(3))
    assert loaded_pages(third) == 29
    assert world.next_stop(third, pages=3) is None
    world.wind_up()


# -- how many are kept -----------------------------------------------------------------------------------------------


def test_a_path_keeps_as_many_as_the_policy_says_in_both_tiers() -> None:
    policy = SnapshotPolicy(prefill_interval_tokens=PAGE, cap_per_path=3)
    world = World(HYBRID, l1=200, l2=200, snapshot_policy=policy)
    serve_by_policy(world, prompt(10), chunk_pages=10)
    assert len(snapshots(world, prompt(10))) == 10  # all of them are just being written down
    serve_by_policy(world, [*prompt(10), 7, 7], chunk_pages=11)
    kept = snapshots(world, prompt(10))
    assert kept[-1] == 10
    assert len(kept) == 2  # and the one at page 11
    assert snapshots(world, prompt(10), tier=Tier.L2) == kept
    assert world.directory.stats.snapshots_thinned >= 7
    world.wind_up()


def test_a_snapshot_at_a_branch_outlives_later_ones_of_the_path() -> None:
    world = World(HYBRID, l1=200, l2=0, snapshot_policy=SnapshotPolicy(cap_per_path=3, prefill_interval_tokens=PAGE))
    serve_by_policy(world, prompt(2), chunk_pages=9)
    serve_by_policy(world, prompt(2)[:-1] + [9] * (2 * PAGE), chunk_pages=9)
    long = prompt(20)
    serve_by_policy(world, long, chunk_pages=9)
    assert snapshots(world, long)[0] == 2
    assert len(snapshots(world, long)) == 3
    world.wind_up()


@pytest.mark.parametrize("tier", list(Tier), ids=["L1", "L2"])
def test_states_and_pages_have_their_own_order_of_eviction_in_each_tier(tier: Tier) -> None:
    """A state that nobody uses goes first, though its page is on a path that everybody uses; and pages stay for it."""
    world = World(HYBRID, l1=40, l2=40)
    world.serve(prompt(4))  # snapshots at every page
    for _ in range(3):
        world.serve(prompt(4))  # which uses the last one
    world.serve(prompt(2, seed=5))
    index = world.directory.index
    free = index.pools[tier][1].free_count
    for evicted in (1, 2, 3):
        handles = index.acquire(tier, 1, free + evicted)
        assert handles is not None
        left = snapshots(world, prompt(4), tier=tier)
        assert left[-1] == 4
        assert len(left) == 4 - evicted
        index.release(tier, 1, handles)
    assert snapshots(world, prompt(2, seed=5), tier=tier) == [1, 2]
    assert index.evicted[tier] == [0, 3]
    handles = index.acquire(tier, 0, index.pools[tier][0].free_count + 2)  # pages go, and no state with them
    assert handles is not None
    index.release(tier, 0, handles)
    assert index.evicted[tier] == [2, 3]
    assert snapshots(world, prompt(4), tier=tier) == [4]
    world.wind_up()
