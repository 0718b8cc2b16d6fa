"""What must hold of a directory for an engine that owns its slots: each check is a sentence."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hicache.jobs import CopyKind
from hicache.node import Entry, Tier
from hicache.page_changes import Place
from hicache.slot_request import SlotRecord
from tests.core.invariants import (
    l3_has_no_holes,
    published_copies_are_true,
    what_is_kept_cannot_be_evicted,
    what_l3_is_said_to_have_was_there,
)
from tests.core.live import PAGE

if TYPE_CHECKING:
    from tests.core.slot_world import SlotWorld


def usable_beyond(world: SlotWorld, record: SlotRecord, own: int) -> int:
    """The brute-force model: the longest n > own for which L2 has what n pages need beyond ``own``; else ``own``."""
    nodes, reaches = world.slots.index.nodes, world.spec.reach_pages
    best = own
    for n in range(own + 1, record.restorable_pages + 1):
        if all(
            record.keys[page] in nodes
            and nodes[record.keys[page]].masks[Tier.L2] >> group & 1
            and (page, group) not in record.lost
            for group, reach in enumerate(reaches)
            for page in range(max(own, 0 if reach is None else n - reach), n)
        ):
            best = n
    return best


def the_engine_computes_on_true_bytes(world: SlotWorld) -> None:
    """What a sequence has computed or restored is there on every rank: no copy went into a slot that was not named for
    it, none after it was said to be done, and none was taken for whole that was not."""
    for life in world.alive:
        for (page, group), slot in life.parts.items():
            for number in world.executor.left:
                if world.executor.is_on(number, group):
                    held = world.executor.ranks[number].l1[group][slot]
                    assert held == (world.truth[life.keys[page]], group)


def no_slot_is_read_and_written_at_a_time(world: SlotWorld) -> None:
    """A load does not overtake the save that still reads its target."""
    assert set(world.copies(CopyKind.BACKUP)).isdisjoint(world.copies(CopyKind.LOAD))


def what_is_busy_is_said_to_be(world: SlotWorld) -> None:
    """The engine is told of every slot that a copy touches, and of no other but those of loads that wait."""
    touched = {*world.copies(CopyKind.BACKUP), *world.copies(CopyKind.LOAD)}
    waiting = {slot for load in world.slots._loader._waiting for slot in load.targets}
    assert world.slots.busy_slots() == touched | waiting
    for life in world.alive:
        if life.load is not None:
            assert {world.slots._use.slot(g, s) for (_, g), s in life.targets.items()} <= world.slots.busy_slots(
                life.record
            )


def what_is_promised_is_here(world: SlotWorld) -> None:
    """Until the promise is over."""
    for life in world.alive:
        if life.promised is not None and life.promised[1] > world.now_s and not world.slots.stats.ranks_lost:
            assert usable_beyond(world, life.record, life.computed) >= life.promised[0]


def promises_end(world: SlotWorld) -> None:
    """Nobody keeps L2 who does not come back for it."""
    for life in world.alive:
        assert life.record.promise is None or life.record.promise.until_s > world.slots.index.now_s


def what_is_in_l2_can_be_reached(world: SlotWorld) -> None:
    """Where nothing could be in L3, nor has failed, a page is there with its attention and after its parent."""
    full = world.slots.index.rule.full_mask
    if world.config.has_l3 or world.has_failed:
        return
    for node in world.slots.index.nodes.values():
        for page in filter(None, (node, node.parent)):
            assert not node.resident or (page.masks[Tier.L2] | page.copying) & full == full


def the_tree_is_one(world: SlotWorld) -> None:
    """Each node can be reached from its first page on, and is there for a reason."""
    index = world.slots.index
    anchors = Counter(life.record.anchor for life in world.alive if life.record.anchor is not None)
    for key, node in index.nodes.items():
        assert node.key == key
        assert node.anchors == anchors[node]
        assert node.resident or node.children or node.copying or node.storing or node.anchors
        assert not node.masks[Tier.L1]
        assert node.resident == node.masks[Tier.L2]
        if index.rule.full_mask:
            assert (node.parent is None) == (node.page == 0)
            assert node.parent is None or (index.nodes[node.parent.key] is node.parent and node in node.parent.children)
    assert all(index.nodes[node.key] is node for node in anchors)


def accounts_are_conserved(world: SlotWorld) -> None:
    """Each token found, requested or lost is counted once, wherever it went."""
    stats = world.slots.stats
    prefetches = [life.record.prefetch for life in world.alive if life.record.prefetch is not None]
    in_flight = sum(p.planned_pages - p.base_pages for p in prefetches if not p.concluded)
    assert stats.prefetch_in_flight == in_flight * PAGE
    assert stats.prefetch_found == stats.prefetch_used + stats.prefetch_dropped.total() + stats.prefetch_in_flight
    assert stats.tokens_requested == stats.tokens_by_source.total()
    assert all(count >= 0 for count in stats.tokens_by_source.values())
    assert stats.tokens_lost == world.lost


def what_is_told_of_pages_is_where_they_are(world: SlotWorld) -> None:
    """Whoever follows the changes knows what L2 has, and of L3 at least what the directory remembers."""
    for key, place, groups, is_there in world.slots.take_changes():
        world.told[key, place] = groups if is_there else world.told.get((key, place), 0) & ~groups
    nodes = world.slots.index.nodes
    in_l2 = {key: groups for (key, place), groups in world.told.items() if place is Place.L2 and groups}
    assert in_l2 == {key: node.masks[Tier.L2] for key, node in nodes.items() if node.masks[Tier.L2]}
    for key, node in nodes.items():
        assert not node.in_l3 & ~world.told.get((key, Place.L3), 0)


def slots_and_pins_have_an_owner(world: SlotWorld) -> None:
    """Slots of L2 and pins are exactly those of entries and of requests that are alive: else they are lost for good."""
    pins: Counter[Entry] = Counter(entry for keep in world.keeps() for entry in keep.entries)
    holders: list[Counter[int]] = [Counter() for _ in world.spec.groups]
    for _, group, entry in world.entries():
        holders[group][entry.handle] += 1
        assert entry.pins == pins[entry]
    for group, pool in enumerate(world.slots.index.pools[Tier.L2]):
        assert pool.used_count == len(holders[group])
        assert all(pool.holders(handle) == count for handle, count in holders[group].items())
    assert not any(node.copying or node.storing for node in world.slots.index.nodes.values())


def nothing_is_busy(world: SlotWorld) -> None:
    """Without jobs no slot is read or written, nothing waits for any, and every load and save is over."""
    assert not world.slots.busy_slots()
    assert not world.slots._use._jobs
    assert not world.slots._use._reading
    assert not world.slots._loader._waiting
    assert all(life.record.load is None and not life.record.saves for life in world.alive)


def budgets_are_taken_by_what_waits(world: SlotWorld) -> None:
    """The shares of L2 are taken by what waits there for its request, and nothing else."""
    held = [0] * len(world.spec.groups)
    for life in world.alive:
        if life.record.prefetch is not None and not life.record.prefetch.concluded:
            for _, group in life.record.prefetch.fetched:
                held[group] += 1
    assert world.prefetcher.fetches.held == held
    assert not any(world.writer._storing)
    assert not world.writer._queue
    assert all(life.record.prefetch is None or life.record.prefetch.settled for life in world.alive)


ALWAYS = (
    published_copies_are_true,
    the_engine_computes_on_true_bytes,
    no_slot_is_read_and_written_at_a_time,
    what_is_busy_is_said_to_be,
    what_is_promised_is_here,
    promises_end,
    what_is_in_l2_can_be_reached,
    the_tree_is_one,
    what_is_kept_cannot_be_evicted,
    what_l3_is_said_to_have_was_there,
    accounts_are_conserved,
    what_is_told_of_pages_is_where_they_are,
)
AT_REST = (slots_and_pins_have_an_owner, nothing_is_busy, budgets_are_taken_by_what_waits, l3_has_no_holes)
