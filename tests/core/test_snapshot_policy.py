"""Where a policy stops, and which snapshots of a path it lets go: pure decisions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.policies.snapshot import SnapshotPolicy, surplus

PAGE = 4
NONE = SnapshotPolicy(chunk_ends=False, branch_points=False, ends=False, state_interval_tokens=None)


def stops(
    policy: SnapshotPolicy, *, prompt: int, end: int, chunk: int = 1000, branch_at: int | None = None
) -> list[int]:
    """All stops of a request that computes a prompt in chunks, and decodes token by token up to ``end``."""
    computed, found = 0, []
    while computed < end:
        until = min((computed // chunk + 1) * chunk, prompt) if computed < prompt else computed + 1
        stop = policy.next_stop(
            computed=computed, until=until, prompt_tokens=prompt, page_tokens=PAGE, branch_at=branch_at, ends_at=end
        )
        assert stop is None or computed < stop <= until
        found += [] if stop is None else [stop]
        computed = stop or until
    return found


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (NONE, []),
        (SnapshotPolicy(chunk_ends=False, branch_points=False, state_interval_tokens=None), [36, 40, 52]),
        (SnapshotPolicy(ends=False, state_interval_tokens=None), [12, 20, 24, 36, 40]),
        (SnapshotPolicy(chunk_ends=False, ends=False, state_interval_tokens=None), [20]),
        (SnapshotPolicy(chunk_ends=False, branch_points=False, ends=False, state_interval_tokens=7), [48]),
        (
            SnapshotPolicy(
                chunk_ends=False,
                branch_points=False,
                ends=False,
                prefill_interval_tokens=16,
                state_interval_tokens=None,
            ),
            [16, 32],
        ),
    ],
    ids=["never", "ends", "chunk ends and branch point", "branch point", "decode interval", "prefill interval"],
)
def test_a_policy_stops_where_it_says(policy: SnapshotPolicy, expected: list[int]) -> None:
    assert stops(policy, prompt=40, end=53, chunk=12, branch_at=20) == expected


def test_a_prompt_that_ends_within_a_page_has_one_last_boundary() -> None:
    policy = SnapshotPolicy(chunk_ends=False, state_interval_tokens=None)
    assert stops(policy, prompt=42, end=42) == [40]
    assert stops(policy, prompt=3, end=3) == []


@given(
    policy=st.builds(
        SnapshotPolicy,
        chunk_ends=st.booleans(),
        branch_points=st.booleans(),
        ends=st.booleans(),
        prefill_interval_tokens=st.none() | st.integers(1, 30),
        state_interval_tokens=st.none() | st.integers(1, 30),
    ),
    prompt=st.integers(1, 100),
    decoded=st.integers(0, 40),
    chunk_pages=st.integers(1, 9),
    branch_page=st.none() | st.integers(1, 25),
)
def test_every_stop_is_a_boundary_and_each_comes_once(
    policy: SnapshotPolicy, prompt: int, decoded: int, chunk_pages: int, branch_page: int | None
) -> None:
    branch_at = None if branch_page is None else branch_page * PAGE
    found = stops(policy, prompt=prompt, end=prompt + decoded, chunk=chunk_pages * PAGE, branch_at=branch_at)
    assert all(stop % PAGE == 0 and stop > 0 for stop in found)
    assert found == sorted(set(found))
    if policy.ends:
        assert {(prompt - 1) // PAGE * PAGE, (prompt + decoded) // PAGE * PAGE} - {0} <= set(found)
    if policy.branch_points and branch_at is not None and branch_at <= prompt:
        assert branch_at in found


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("chunk_ends", 1),
        ("branch_points", None),
        ("ends", "yes"),
        ("prefill_interval_tokens", 0),
        ("state_interval_tokens", -64),
        ("state_interval_tokens", 2.5),
        ("cap_per_path", 0),
        ("cap_per_path", True),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"snapshot_policy.{setting} = "):
        SnapshotPolicy(**{setting: value})  # type: ignore[arg-type]


def kept_of(count: int, cap: int) -> list[int]:
    """A path on which a snapshot is taken at every page."""
    kept: list[int] = []
    for page in range(1, count + 1):
        kept.append(page)
        for gone in surplus(kept, cap=cap):
            kept.remove(gone)
        assert len(kept) <= cap
        assert kept[-1] == page
    return kept


@pytest.mark.parametrize("cap", [4, 8, 12, 16])
def test_going_back_costs_a_share_of_the_way_back_at_every_scale(cap: int) -> None:
    """With ``cap`` of n snapshots, who goes back d pages recomputes at most about n ** (2 / cap) times d."""
    for count in (50, 400, 1500):
        kept = [0, *kept_of(count, cap)]
        worst = max((after - 1 - before) / (count - after + 1) for before, after in pairwise(kept))
        assert worst <= count ** (2 / cap)


def test_the_spacing_grows_with_the_distance_from_the_end() -> None:
    gaps = [after - before for before, after in pairwise(kept_of(1000, 12))]
    assert gaps[0] > 50 * gaps[-1]
    assert sum(gap < later for gap, later in pairwise(gaps)) <= 3  # hardly ever wider again towards the end


@given(
    pages=st.sets(st.integers(1, 60), min_size=1).map(sorted),
    cap=st.integers(1, 8),
    in_use=st.sets(st.integers(1, 60)),
    branches=st.sets(st.integers(1, 60)),
)
def test_what_is_in_use_stays_and_branch_points_outlive_the_rest(
    pages: list[int], cap: int, in_use: set[int], branches: set[int]
) -> None:
    gone = surplus(pages, cap=cap, in_use=in_use, branches=branches)
    kept = [page for page in pages if page not in gone]
    assert len(gone) == len(set(gone))
    assert not in_use & set(gone)
    assert pages[-1] in kept
    may_go = [page for page in kept[:-1] if page not in in_use]
    assert len(kept) <= cap or not may_go
    assert len(kept) >= min(cap, len(pages))
    if set(gone) & branches:
        assert all(page in branches for page in may_go)
