"""Room that comes of writing: who waits for it, who does not, and what that loses."""

from __future__ import annotations

from hicache.jobs import CopyKind
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.policies.write import WriteBack
from tests.core.simulated_executor import failing
from tests.core.situations import prompt, resident
from tests.core.world import FULL, PAGE, Live, World


def full_of_unwritten(*, l2: int = 16) -> tuple[World, Live]:
    """L1 of eight pages holds six that nobody uses and are not written, and a request that needs five."""
    world = World((FULL,), l1=8, l2=l2, policy=lambda: WriteBack(ahead_share=0.1))
    for number in range(3):
        world.serve(prompt(2, seed=number))
    live = world.open(prompt(5, seed=9))
    world.load(live)
    return world, live


def test_a_patient_request_waits_for_the_copies_and_nothing_is_lost() -> None:
    world, live = full_of_unwritten()
    assert not world.directory.extend(live.record, tokens=5 * PAGE, patient=True)
    world.executor.collect()
    assert world.executor.waiting_for(CopyKind.BACKUP)
    world.executor.run_kind(CopyKind.BACKUP)
    assert world.directory.extend(live.record, tokens=5 * PAGE, patient=True)
    assert world.directory.stats.tokens_lost == {}
    assert len(resident(world, Tier.L2)) == 3
    world.check()
    world.wind_up()


def test_a_request_that_does_not_wait_gets_its_room_and_the_loss_is_counted() -> None:
    world, live = full_of_unwritten()
    assert world.directory.extend(live.record, tokens=5 * PAGE)
    assert world.directory.stats.tokens_lost == {"l1.attn": 3 * PAGE}
    world.check()
    world.wind_up()


def test_a_patient_request_does_not_wait_for_a_copy_that_has_failed() -> None:
    world, live = full_of_unwritten()
    assert not world.directory.extend(live.record, tokens=5 * PAGE, patient=True)
    world.executor.run_kind(CopyKind.BACKUP, failing(Outcome.IO_ERROR))
    assert world.directory.extend(live.record, tokens=5 * PAGE, patient=True)
    assert world.directory.stats.tokens_lost == {"l1.attn": 3 * PAGE}
    world.check()
    world.wind_up()


def test_a_copy_that_never_ends_keeps_its_pages_and_no_others() -> None:
    world, live = full_of_unwritten()
    assert not world.directory.extend(live.record, tokens=5 * PAGE, patient=True)
    world.executor.collect()
    assert not world.directory.extend(live.record, tokens=5 * PAGE)  # its time is over
    assert world.directory.extend(live.record, tokens=4 * PAGE)
    assert world.directory.stats.tokens_lost == {"l1.attn": 2 * PAGE}
    world.check()
    world.wind_up()


def test_a_patient_load_waits_for_pages_that_are_just_being_written_down() -> None:
    """Their copies hold them, so that they count neither as free nor as what can be evicted."""
    world = World((FULL,), l1=8, l2=16, has_l3=False, policy=lambda: WriteBack(ahead_share=0.1))
    tokens = [*prompt(7), 0]
    world.serve(tokens, patient=True)
    world.serve(prompt(7, seed=1), patient=True)
    world.writer.send_down([world.directory.index.nodes[key] for key in world.page_keys(prompt(7, seed=1))])
    world.executor.collect()
    live = world.open(tokens)
    world.load(live, patient=True)
    assert world.executor.waiting_for(CopyKind.BACKUP)
    assert not live.record.is_loaded
    world.load_whole(live, patient=True)
    assert live.record.loaded_pages == 7
    world.wind_up()


def test_a_patient_load_waits_rather_than_lose_or_restore_less() -> None:
    world = World((FULL,), l1=8, l2=16, policy=lambda: WriteBack(ahead_share=0.1), prefetch_l2_share=1.0)
    world.fill_l3(prompt(6))
    for number in range(1, 4):
        world.serve(prompt(2, seed=number))
    live = world.open(prompt(6))
    world.prefetch(live)
    world.run_all()
    world.load(live, patient=True)
    assert not live.record.is_loaded
    world.run_all()
    world.load(live, patient=True)
    world.run_all()
    assert live.record.by_source["l3"] == 6 * PAGE
    assert world.directory.stats.tokens_lost == {}
    world.wind_up()


def test_written_pages_are_evicted_before_unwritten_ones_whatever_their_age() -> None:
    world = World((FULL,), l1=8, l2=16, policy=lambda: WriteBack(ahead_share=0.1))
    world.serve(prompt(3))
    world.serve(prompt(3, seed=1))
    young = [world.directory.index.nodes[key] for key in world.page_keys(prompt(3, seed=1))]
    world.writer.send_down(young)
    world.run_all()
    live = world.open(prompt(5, seed=2))
    world.load_whole(live)
    assert world.directory.extend(live.record, tokens=5 * PAGE)
    assert all(world.directory.index.nodes[key].masks[Tier.L1] for key in world.page_keys(prompt(3)))
    assert world.directory.stats.tokens_lost == {}
    world.release(live)
    world.wind_up()


def test_without_l3_write_back_makes_l2_the_place_of_what_l1_has_no_room_for() -> None:
    world = World((FULL,), l1=8, l2=8, has_l3=False, policy=lambda: WriteBack(ahead_share=0.25))
    for number in range(4):
        world.serve(prompt(3, seed=number), patient=True)
    assert len(resident(world, Tier.L1) | resident(world, Tier.L2)) == 12
    assert world.directory.stats.tokens_lost == {}
    for number in range(4, 40):
        world.serve(prompt(3, seed=number), patient=True)
        world.check()
    assert world.directory.stats.tokens_lost == {}  # L2 is the lowest tier: what it evicts had been written
    world.directory.flush()
    assert world.directory.take_jobs() == []
    assert world.directory.is_all_written
    world.wind_up()
