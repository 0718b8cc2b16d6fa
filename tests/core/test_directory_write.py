"""The way down: what reaches L2 and L3, in which order, and what happens to the rest."""

from __future__ import annotations

import pytest

from hicache.directory import Directory
from hicache.jobs import CopyKind, StoreJob
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.policies.facts import SuffixFacts
from hicache.policies.write import ByteBudget
from hicache.spec import Group
from tests.core.simulated_executor import failing
from tests.core.situations import HYBRID, evict_all, prompt
from tests.core.world import FULL, POLICIES, WINDOW, World


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), HYBRID], ids=["attention", "window", "hybrid"])
def test_br_067_l3_gets_every_page_and_never_one_before_its_ancestors(groups: tuple[Group, ...], share: float) -> None:
    world = World(groups, l1=40, l2=20, store_l2_share=share)
    live = world.open(prompt(16))
    world.load_whole(live)
    world.compute(live, pages=16, snapshot=True)
    world.release(live)
    while world.executor.waiting:
        world.executor.run(0)
        stored = [all((key, 0, rank) in world.executor.l3 for rank in range(1)) for key in live.record.keys]
        assert stored == sorted(stored, reverse=True)
    assert all(stored)
    world.check()
    world.wind_up()


class DropsSome:
    """A write policy that refuses some pages."""

    def __init__(self, *refused: bytes) -> None:
        self.refused = refused

    ahead_share = 0.0

    def touch(self, keys: list[bytes], facts: SuffixFacts) -> bool:
        return False

    def wrote(self, size_bytes: int) -> None:
        pass

    def admits(self, keys: list[bytes], facts: SuffixFacts) -> int:
        return next((page for page, key in enumerate(keys) if key in self.refused), len(keys))


def test_br_067_a_policy_that_refuses_a_page_leaves_no_hole_below_it() -> None:
    world = World((FULL,), l1=16, l2=16)
    keys = world.page_keys(prompt(6))
    world.directory = Directory(world.spec, world.config, write_policy=DropsSome(keys[2]))
    world.executor.directory = world.directory
    world.serve(prompt(6))
    assert [(key, 0, 0) in world.executor.l3 for key in keys] == [True, True, False, False, False, False]
    assert [world.directory.index.nodes[key].masks[Tier.L2] for key in keys] == [1, 1, 0, 0, 0, 0]
    world.check()
    world.wind_up()


def test_br_001_a_failed_backup_is_not_published_and_the_next_request_writes_it() -> None:
    world = World((FULL,), l1=8, l2=8)
    live = world.open(prompt(4))
    world.load_whole(live)
    world.compute(live, pages=4, snapshot=False)
    world.executor.run_kind(CopyKind.BACKUP, failing(Outcome.IO_ERROR, 1))
    masks = [world.directory.index.nodes[key].masks[Tier.L2] for key in live.record.keys]
    assert masks == [1, 0, 1, 1]
    assert world.directory.stats.objects["backup.io_error"] == 1
    world.check()
    world.run_all()
    world.release(live)
    assert [key for key in live.record.keys if (key, 0, 0) in world.executor.l3] == live.record.keys[:1]
    world.serve(prompt(4))
    assert [key for key in live.record.keys if (key, 0, 0) in world.executor.l3] == live.record.keys
    world.wind_up()


def test_br_001_a_failed_store_is_not_believed_and_the_next_request_stores_it() -> None:
    world = World((FULL,), l1=8, l2=8, store_l2_share=1.0)
    live = world.open(prompt(4))
    world.load_whole(live)
    world.compute(live, pages=4, snapshot=False)
    world.executor.run_kind(CopyKind.BACKUP)
    world.executor.run_kind(StoreJob, failing(Outcome.UNAVAILABLE, 1))
    assert [world.directory.index.nodes[key].in_l3 for key in live.record.keys] == [1, 0, 1, 1]
    world.release(live)
    world.serve(prompt(4))
    assert [world.directory.index.nodes[key].in_l3 for key in live.record.keys] == [1, 1, 1, 1]
    assert world.directory.stats.objects["store.unavailable"] == 1
    world.wind_up()


def test_a_prefix_that_stays_in_l1_is_confirmed_in_l3_and_stored_again_when_l3_has_dropped_it() -> None:
    world = World(HYBRID, l1=16, l2=16, l3_confirm_interval_s=60.0)
    world.serve(prompt(4))
    world.now_s = 59.0
    world.serve(prompt(4))
    assert not any(name.startswith("confirm") for name in world.directory.stats.objects)
    for group in range(2):
        world.lose_in_l3(world.page_keys(prompt(4))[1], group)
    world.now_s = 61.0
    world.serve(prompt(6))  # its new pages are stored below the ones that are put back
    assert world.directory.stats.objects["confirm.absent"] == 2
    keys = world.page_keys(prompt(6))
    assert all((key, 0, 0) in world.executor.l3 for key in keys)
    assert (keys[1], 1, 0) in world.executor.l3
    asked = world.directory.stats.objects["confirm.ok"]
    world.serve(prompt(6))
    assert world.directory.stats.objects["confirm.ok"] == asked  # once per interval
    world.check()
    world.wind_up()


def test_l3_that_cannot_say_is_believed_to_have_what_it_acknowledged() -> None:
    world = World((FULL,), l1=16, l2=16, l3_confirm_interval_s=60.0)
    world.serve(prompt(4))
    world.executor.done.clear()
    world.now_s = 100.0
    live = world.open(prompt(4))
    world.run_all(failing(Outcome.UNAVAILABLE, *range(8)))
    assert world.directory.stats.objects["confirm.unavailable"] == 4
    assert not any(isinstance(task.job, StoreJob) for task in world.executor.done)
    world.release(live)
    world.check()
    world.wind_up()


def test_a_flush_stores_what_arrives_in_l2_after_the_rest_of_its_page_has_gone_to_l3() -> None:
    world = World(HYBRID, l1=8, l2=8, policy=POLICIES["write_back"])
    live = world.open(prompt(1))
    world.load_whole(live)
    world.compute(live, pages=1, snapshot=False)
    node = world.directory.index.nodes[live.record.keys[0]]
    assert world.writer.demote(node)
    world.run_all()
    world.compute(live, pages=0, snapshot=True)
    assert (node.masks, node.in_l3) == ([0b11, 0b01], 0)
    world.release(live)
    world.flush()
    assert world.directory.is_all_written
    assert node.in_l3 == 0b11
    world.wind_up()


def test_a_flush_stores_a_snapshot_that_is_taken_meanwhile() -> None:
    world = World(HYBRID, l1=8, l2=8, policy=POLICIES["write_back"])
    live = world.open(prompt(1))
    world.load_whole(live)
    world.compute(live, pages=1, snapshot=False)
    world.flush()
    assert world.directory.is_all_written
    world.compute(live, pages=0, snapshot=True, is_told_late=True)
    world.release(live)
    assert world.executor.waiting_for(CopyKind.SNAPSHOT)
    assert not world.directory.is_all_written
    world.flush()
    assert world.directory.is_all_written
    assert world.directory.index.nodes[live.record.keys[0]].in_l3 == 0b11
    world.wind_up()


def test_a_budget_is_charged_for_what_is_written_and_for_nothing_else() -> None:
    page_bytes = 16
    world = World(
        (FULL,), l1=16, l2=2, has_l3=False, policy=lambda: ByteBudget(bytes_per_s=1e-9, burst_bytes=6 * page_bytes)
    )
    live = world.open(prompt(4))
    world.load_whole(live)
    held = world.directory.index.acquire(Tier.L2, 0, 2)
    assert held is not None
    assert world.compute(live, pages=4, snapshot=False)
    assert world.directory.stats.skipped["backup.no_host_capacity"] == 1
    world.directory.index.release(Tier.L2, 0, held)
    assert world.compute(live, pages=0, snapshot=False), "which tries again"
    world.run_all()
    assert world.directory.stats.objects["backup.ok"] == 2, "as many as L2 has room for"
    world.release(live)
    world.serve(prompt(2))  # is all below
    assert world.directory.stats.objects["backup.ok"] == 2
    evict_all(world, Tier.L2)
    world.serve(prompt(2))
    assert world.directory.stats.objects["backup.ok"] == 4, "it is paid for as often as it is written"
    evict_all(world, Tier.L2)
    world.serve(prompt(2))
    evict_all(world, Tier.L2)
    world.serve(prompt(2))
    assert world.directory.stats.objects["backup.ok"] == 6, "and no more than the budget has"
    world.wind_up()
