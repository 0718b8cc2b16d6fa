"""Group M: which prefix of a hybrid is usable: one boundary that all groups have."""

from __future__ import annotations

import pytest

from hicache.jobs import CopyJob, CopyKind, FetchJob, Job, LookupJob
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.policies.snapshot import SnapshotPolicy
from hicache.slots import slot_of
from tests.core.simulated_executor import EMPTY, no_fault
from tests.core.situations import HYBRID, loaded_pages, prefetching, prompt
from tests.core.test_prefix import PAGE, attn, masks_of, rule_of, state, window
from tests.core.test_snapshots import BRANCHES, ENDS, serve_by_policy, session
from tests.core.world import MODELS, World
from tests.core.world import PAGE as WORLD_PAGE

EVERY_PAGE = SnapshotPolicy(
    chunk_ends=False, branch_points=False, prefill_interval_tokens=WORLD_PAGE, cap_per_path=None
)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (("x" * 10, "x" * 10, "." * 9 + "x"), 10),
        (("x" * 10, "xxxxx.xxxx", "....x....x"), 5),  # the sidecar lacks page 5: back to the state before it
        (("x" * 10, "xxxxx.xxxx", "." * 9 + "x"), 0),  # and there is none
        (("x" * 10, "x" * 10, "." * 10), 0),
        (("xxxxxx....", "x" * 10, "..x......x"), 3),
        (("." + "x" * 9, "x" * 10, "x" * 10), 0),
    ],
)
def test_br_138_the_prefix_is_the_least_over_all_pools_and_contiguous(rows: tuple[str, ...], expected: int) -> None:
    assert rule_of(attn(), attn("sidecar"), state()).usable(masks_of(*rows)) == expected


def test_br_141_a_joint_length_is_a_boundary_that_every_group_has() -> None:
    rule = rule_of(attn(), state())
    # attention ends at pages 2 and 4, states exist at 2 and 3: page 4 has no state, and cutting to 3 would be no help
    # if the rule took the least of 4 and 3; with attention up to 4, 3 is legal, with attention up to 2 only 2 is
    assert rule.usable(masks_of("xxxx", ".xx.")) == 3
    assert rule.usable(masks_of("xx..", ".xx.")) == 2
    assert rule.usable(masks_of("xx..", "..x.")) == 0


@pytest.mark.parametrize("pages", [1, 7, 8, 20])
def test_br_144_a_state_is_taken_from_the_page_that_its_boundary_ends(pages: int) -> None:
    rule = rule_of(attn(), state())
    assert [page for page, group in rule.needed(pages) if group == 1] == [pages - 1]


def test_br_146_the_nearest_earlier_snapshot_serves_when_the_last_page_has_none() -> None:
    rule = rule_of(attn(), state())
    states = "".join("x" if page in (7, 31, 63) else "." for page in range(100))
    assert rule.usable(masks_of("x" * 100, states)) == 64
    assert rule.usable(masks_of("x" * 60, states[:60])) == 32


@pytest.mark.parametrize("windows", [(5, 13), (2, 40), (4, 64, 3584)])
def test_br_149_windows_of_unrelated_lengths_live_together(windows: tuple[int, ...]) -> None:
    rule = rule_of(attn(), *(window(tokens, f"w{tokens}") for tokens in windows), state())
    everything = (1 << (len(windows) + 2)) - 1
    masks = [everything] * 1000
    assert rule.usable(masks) == 1000
    for group, tokens in enumerate(windows, start=1):
        reach = -(-(tokens - 1) // PAGE)
        missing = list(masks)
        missing[1000 - reach] &= ~(1 << group)  # the first page that the last boundary needs
        assert rule.usable(missing) == (1000 - reach if reach < 1000 else 0)
        assert rule.first_needed(group, 1000) == 1000 - reach


@pytest.mark.parametrize(
    ("policy", "second", "later"),
    [
        (ENDS, 0, 0),
        (SnapshotPolicy(branch_points=False, ends=False, state_interval_tokens=None), 24, 24),
        (BRANCHES, 0, 29),
        (
            SnapshotPolicy(
                chunk_ends=False, branch_points=False, prefill_interval_tokens=WORLD_PAGE, cap_per_path=None
            ),
            29,
            29,
        ),
        (SnapshotPolicy(chunk_ends=False, branch_points=False, prefill_interval_tokens=4 * WORLD_PAGE), 28, 28),
        (SnapshotPolicy(), 24, 29),
    ],
    ids=["ends", "chunk ends", "branch points", "every page", "every four pages", "default"],
)
def test_br_146_hit_tokens_of_each_snapshot_policy(policy: SnapshotPolicy, second: int, later: int) -> None:
    world = World(HYBRID, l1=(500, 200), l2=0, snapshot_policy=policy)
    hits = [loaded_pages(serve_by_policy(world, session(number), chunk_pages=8)) for number in range(13)]
    assert hits == [0, second, *[later] * 11]
    missed = 29 - second + 11 * (29 - later)
    assert world.directory.stats.tokens_attention_only == missed * WORLD_PAGE
    world.wind_up()


def test_br_141_a_hit_is_a_boundary_that_every_group_has_whatever_each_of_them_has_alone() -> None:
    """Attention reaches 16 pages but for page 10; states are there at 8, 12 and 16: the answer is 8, not 10 or 12."""
    world = World(HYBRID, l1=40, l2=40, prefetch_l2_share=1.0)
    without = {(page, 1) for page in range(16) if page + 1 not in (8, 12, 16)} | {(10, 0)}
    world.fill_l3(prompt(16), without=frozenset(without))
    live = world.open(prompt(16))
    world.prefetch(live)
    world.run_all()
    world.load_whole(live)
    assert loaded_pages(live) == 8
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


def test_br_146_attention_that_no_snapshot_makes_usable_is_counted() -> None:
    world = World(HYBRID, l1=16, l2=16)
    world.serve(prompt(8), snapshot=False)
    live = world.open(prompt(8))
    world.load_whole(live)
    assert loaded_pages(live) == 0
    assert world.directory.stats.tokens_attention_only == 8 * WORLD_PAGE
