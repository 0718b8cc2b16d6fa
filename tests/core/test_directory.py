"""What the directory counts, and what it refuses."""

from __future__ import annotations

import pytest

from hicache.directory import Directory
from hicache.directory_config import DirectoryConfig
from hicache.errors import ConfigError, UsageError
from hicache.node import Tier
from hicache.spec import CacheSpec, Group
from tests.core.situations import HYBRID, evict_all, prompt, slots_free
from tests.core.world import FULL, MODELS, PAGE, World


@pytest.mark.parametrize("groups", MODELS, ids=lambda groups: "+".join(group.name for group in groups))
def test_every_token_of_every_prompt_is_counted_once(groups: tuple[Group, ...]) -> None:
    world = World(groups, l1=20, l2=20, prefetch_l2_share=1.0)
    world.serve(prompt(4))  # computed
    world.serve(prompt(4))  # from L1
    evict_all(world, Tier.L1)
    world.serve(prompt(4))  # from L2
    evict_all(world, Tier.L1)
    evict_all(world, Tier.L2)
    world.serve(prompt(4))  # from L3
    assert world.directory.stats.tokens_by_source == {
        "computed": 4 * PAGE + 4,
        "l1": 4 * PAGE,
        "l2": 4 * PAGE,
        "l3": 4 * PAGE,
    }
    assert world.directory.stats.tokens_requested == 4 * (4 * PAGE + 1)
    assert world.directory.stats.requests == 4
    world.wind_up()


def test_a_released_request_can_do_nothing_more() -> None:
    world = World(HYBRID, l1=8, l2=8)
    world.fill_l3(prompt(4))
    live = world.open(prompt(4))
    world.release(live)
    free = slots_free(world)
    directory, record = world.directory, live.record
    for misuse in (
        lambda: directory.release(record),
        lambda: directory.load(record),
        lambda: directory.prefetch(record),
        lambda: directory.extend(record, tokens=PAGE),
        lambda: directory.store(record, computed=0, state_at=None, state_pending=0),
    ):
        with pytest.raises(UsageError, match="released"):
            misuse()
    world.run_all()
    assert slots_free(world) == free
    assert world.directory.take_jobs() == []
    world.wind_up()


def test_extend_and_store_come_after_the_load() -> None:
    world = World((FULL,), l1=8, l2=8)
    live = world.open(prompt(4))
    with pytest.raises(UsageError, match="not loaded"):
        world.directory.extend(live.record, tokens=PAGE)
    with pytest.raises(UsageError, match="not loaded"):
        world.directory.store(live.record, computed=0, state_at=None, state_pending=0)
    world.wind_up()


def test_a_prefetch_after_the_load_brings_nothing_and_holds_nothing() -> None:
    world = World((FULL,), l1=16, l2=16)
    world.fill_l3(prompt(4))
    live = world.open(prompt(4))
    world.load_whole(live)
    world.prefetch(live)
    assert world.executor.waiting == []
    assert world.directory.is_settled(live.record)
    world.wind_up()


@pytest.mark.parametrize("computed", [-1, 2 * PAGE + 1, 3 * PAGE])
def test_more_cannot_be_stored_than_there_are_pages_for(computed: int) -> None:
    world = World((FULL,), l1=8, l2=8)
    live = world.open(prompt(4))
    world.load_whole(live)
    assert world.directory.extend(live.record, tokens=2 * PAGE)
    with pytest.raises(UsageError, match=f"computed = {computed}: the request has tokens and pages for 0 to 4"):
        world.directory.store(live.record, computed=computed, state_at=None, state_pending=0)
    assert world.directory.index.nodes == {}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"l2_slots": (0, 0), "has_l3": True}, "l2_slots"),
        ({"l2_slots": (4, 0)}, "l2_slots = .4, 0.: expected room for every group"),
        ({"prefetch_l2_share": 0.0}, "prefetch_l2_share = 0.0"),
        ({"store_l2_share": 1.5}, "store_l2_share = 1.5"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DirectoryConfig(**({"l1_slots": (4, 4), "l2_slots": (4, 4)} | settings))  # type: ignore[arg-type]


def test_slot_counts_are_given_for_every_group() -> None:
    with pytest.raises(ValueError, match="zip"):
        Directory(CacheSpec("m", "r", HYBRID), DirectoryConfig(l1_slots=(4,), l2_slots=(0,)))
