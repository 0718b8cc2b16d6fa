"""What must hold of a system: each check is a sentence, and says in its docstring what breaks when it does not."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from hicache.arena_room import ArenaRoom
from hicache.jobs import FetchJob
from hicache.node import Entry, Tier
from hicache.room import Room
from hicache.slots import slot_of
from hicache.spec import StateGroup
from tests.core.live import PAGE, Live
from tests.core.prefix_invariants import (
    loads_take_the_longest_usable_prefix,
    no_page_is_here_without_its_ancestors,
    usable_pages,
    what_a_plan_has_brought_is_here,
    what_was_found_stays,
)
from tests.core.simulated_executor import CLEAR, EMPTY, GARBAGE

if TYPE_CHECKING:
    from tests.core.system import System

SETTLED_EVERY = 3  # checks: else holds stay uncounted for a while, or come and go without ever being


def is_unwritten(system: System, entry: Entry) -> bool:
    """Whether this is the lowest copy of its object, as far as has been acknowledged, in a tier that is not."""
    below = entry.node.in_l3 >> entry.group & 1
    if entry.tier is Tier.L1:
        has_l2 = any(system.config.l2_slots)
        return has_l2 and not below and entry.node.entries[Tier.L2][entry.group] is None
    return system.config.has_l3 and not below


def is_idle(room: Room, entry: Entry) -> bool:
    """Whether the entry waits to be evicted; in one place if so."""
    places = [queue[entry.tier][entry.group] for queue in (room._eviction, room._unwritten, room._parked)]
    assert sum(entry in place for place in places) <= 1
    return any(entry in place for place in places)


def slot_holds(system: System, group: int, handle: int, expected: object, *, tier: Tier = Tier.L1) -> None:
    """A slot has these bytes on every rank that is left and has layers of the group."""
    for number in system.executor.left:
        if system.executor.is_on(number, group):
            rank = system.executor.ranks[number]
            memory = rank.l1 if tier is Tier.L1 else rank.l2
            assert memory[group][slot_of(handle)] == expected


# -- bytes -----------------------------------------------------------------------------------------------------------


def published_copies_are_true(system: System) -> None:
    """Each published copy, and each object in L3, has the bytes of exactly the tokens that its key names: else somebody
    restores what another prompt, another boundary or an unfinished copy has left there."""
    for tier, group, entry in system.entries():
        slot_holds(system, group, entry.handle, (system.truth[entry.node.key], group), tier=tier)
    for (key, group, _), value in system.executor.l3.items():
        assert value == (system.truth[key], group)


def requests_compute_on_true_bytes(system: System) -> None:
    """Page tables and live states of a loaded request hold the bytes of its own tokens, whole or not at all."""
    for live in system.live:
        record = live.record
        if record.loaded_pages is None:
            continue
        computed = max(live.computed, record.loaded_pages * PAGE)
        assert record.loaded_pages <= record.prompt_pages
        for group, table in enumerate(record.tables):
            for page, handle in enumerate(table[: computed // PAGE]):
                if handle is None:
                    reach = system.spec.reach_pages[group]
                    assert reach is not None, "a page of full attention is missing"
                    assert page < record.loaded_pages - reach
                else:
                    slot_holds(system, group, handle, (system.truth[record.keys[page]], group))
        for group, handle in record.live.items():
            live_state_is_true(system, live, group, handle)
        for group, handle in record.spares.items():
            transients_are_empty(system, group, handle)


def live_state_is_true(system: System, live: Live, group: int, handle: int) -> None:
    """A live state lies in its slot, or still in its source; then its slot has an empty ring to begin with."""
    tokens = live.state_at(PAGE)
    state = (tuple(live.tokens[:tokens]), group) if tokens else EMPTY
    source = live.record.sources.get(group)
    if source is None:
        slot_holds(system, group, handle, state)
    else:
        assert live.record.sources_at == tokens
        assert source.node.entries[Tier.L1][group] is source, "a snapshot went that a live state is read from"
        slot_holds(system, group, source.handle, state)
        transients_are_empty(system, group, handle)


def transients_are_empty(system: System, group: int, handle: int) -> None:
    """A slot to go on in has no ring of whoever had it before."""
    described = system.spec.groups[group]
    assert isinstance(described, StateGroup)
    if any(field.transient for field in described.fields):
        slot_holds(system, group, handle, CLEAR)


# -- room ------------------------------------------------------------------------------------------------------------


def what_is_kept_cannot_be_evicted(system: System) -> None:
    """Holds are counted exactly, at the latest when somebody asks for room; the queues have what nobody keeps, and what
    is nowhere below apart from the rest."""
    index = system.directory.index
    full = index.rule.full_mask
    if system.checks % SETTLED_EVERY == 0:
        index.settle()
    ends = Counter(keep.path for keep in system.keeps() if keep.path is not None)
    assert full or not ends
    assert all(index.nodes[node.key] is node and node.resident & full == full for node in ends)
    assert all(index.nodes[node.key] is node for node in index._pending)
    for node in index.nodes.values():
        held_children = sum(1 for child in node.children if child.held)
        assert node.held + index._pending.get(node, 0) == held_children + ends[node]
    for tier, group, entry in system.entries():
        is_nearest = tier is Tier.L1 or not entry.node.masks[Tier.L1] >> group & 1
        is_held = bool(full >> group & 1 and is_nearest and entry.node.held)
        assert is_idle(index._room, entry) == (not entry.pins and not is_held)
        is_spared = entry in index._room._unwritten[tier][group]
        if is_spared or entry in index._room._eviction[tier][group]:
            assert is_spared == (index._room.spares_unwritten and is_unwritten(system, entry))


def every_byte_of_an_arena_is_of_one_slot(system: System) -> None:
    """Or free, or stranded; what another group has taken is lost to the old one."""
    room, layout = system.directory.index._room, system.config.l1_arena
    if layout is None:
        return
    assert isinstance(room, ArenaRoom)
    arena = room.arena
    taken: dict[int, int] = {}  # by unit: the group that has slots in it
    used_bytes = 0
    for group, pool in enumerate(arena.pools):
        held = [slot for slot in range(pool.capacity) if pool._holders[slot]]
        used_bytes += len(held) * layout.stride_bytes(group)
        for unit in {arena.unit_of(group, slot) for slot in held}:
            assert taken.setdefault(unit, group) == group, "slots of two groups share bytes"
        idle = {
            slot_of(e.handle) for tier, g, e in system.entries() if tier is Tier.L1 and g == group and is_idle(room, e)
        }
        assert idle == set(room._idle[group])
        assert idle <= set(held)
        idle_units = [unit for unit in pool.units() if idle >= set(pool.slots_of(unit)) & set(held)]
        assert pool.idle_units == len(idle_units) == sum(map(pool.is_idle, pool.units()))
    assert {unit: owner for unit, owner in enumerate(arena.owners) if owner is not None} == taken
    free_bytes = arena.free_units * layout.unit_bytes
    assert used_bytes + arena.stranded_bytes + free_bytes == layout.size_bytes
    for rank, group in itertools.product(system.executor.ranks, range(len(system.spec.groups))):
        for slot in list(rank.l1[group]):
            if arena.owners[arena.unit_of(group, slot)] not in (None, group):
                rank.l1[group][slot] = GARBAGE


# -- accounts and L3 -------------------------------------------------------------------------------------------------


def accounts_are_conserved(system: System) -> None:
    """Each token found, requested or lost is counted once, wherever it went."""
    stats = system.directory.stats
    assert stats.prefetch_found == (
        stats.prefetch_used + sum(stats.prefetch_dropped.values()) + stats.prefetch_in_flight
    )
    in_flight = sum(
        prefetch.planned_pages - prefetch.base_pages
        for prefetch in (live.record.prefetch for live in system.live)
        if prefetch is not None and not prefetch.concluded
    )
    assert stats.prefetch_in_flight == in_flight * PAGE
    assert stats.tokens_requested == sum(stats.tokens_by_source.values())
    assert stats.tokens_lost == system.lost
    for record in (live.record for live in system.live if live.record.is_loaded):
        assert sum(record.by_source.values()) == record.by_source["computed"] + (record.loaded_pages or 0) * PAGE


def what_l3_is_said_to_have_was_there(system: System) -> None:
    """Nothing is believed to be in L3 that no rank of this engine, or of another one, has brought there in full."""
    for node in system.directory.index.nodes.values():
        for group in range(len(system.spec.groups)):
            assert not node.in_l3 >> group & 1 or system.executor.had_in_l3(node.key, group)


def a_handover_says_what_is_there(system: System) -> None:
    """What is said to be in L3 is there, but for what L3 lost after the hand-over began to ask, or could not tell; and
    so is all that another engine needs of it."""
    for live in system.live:
        handover = live.handover
        if handover is None:
            continue
        keys, result = handover._keys, handover.result
        assert result.pages_here == usable_pages(system, keys)
        has_guessed = handover.is_under_way or system.executor.lookups_failed > live.lookups_failed_before
        excused = set(system.lost_in_l3[0 if has_guessed else live.losses_before :])
        for page, group in system.directory.index.rule.needed(result.pages_in_l3):
            assert (keys[page], group) in excused or system.executor.has_in_l3(keys[page], group)
        assert system.directory.open_jobs or not handover.is_under_way


def l3_has_no_holes(system: System) -> None:
    """Unless something was lost on its way or in L3, what L3 holds can be reached from its first page on."""
    full = system.directory.index.rule.full_mask
    if not system.is_l3_whole or not full:
        return
    by_tokens = {tokens: key for key, tokens in system.truth.items()}
    groups = [group for group in range(len(system.spec.groups)) if full >> group & 1]
    for key, rank in {(key, rank) for key, _, rank in system.executor.l3}:
        homes = [(group, system.executor.home(rank, group)) for group in groups]
        tokens = system.truth[key]
        for end in range(PAGE, len(tokens) + 1, PAGE):
            parts = ((by_tokens[tokens[:end]], group, home) for group, home in homes if home is not None)
            assert all(part in system.executor.l3 for part in parts), "a page in L3 that nobody can reach"


def everything_is_in_l3_if_said_so(system: System) -> None:
    """Asked after a flush: nothing is left for later but what failed, or what L3 has lost since it acknowledged it."""
    directory, executor = system.directory, system.executor
    unwritten = [
        (node.key, group)
        for node in directory.index.nodes.values()
        for group in range(len(system.spec.groups))
        if node.resident >> group & 1 and not executor.has_in_l3(node.key, group)
    ]
    is_write_back = system.config.has_l3 and directory._write_ahead is not None
    if is_write_back and directory.is_all_written:
        assert set(unwritten) <= set(system.lost_in_l3)
    if is_write_back and not system.has_failed and not system.live:
        assert directory.is_all_written, "something stays unwritten, though nothing has failed"


# -- at rest ---------------------------------------------------------------------------------------------------------


def slots_and_pins_have_an_owner(system: System) -> None:
    """Slots and pins are exactly those of entries and of requests that are alive: else they are lost for good."""
    holders: list[list[Counter[int]]] = [[Counter() for _ in system.spec.groups] for _ in Tier]
    for tier, group, entry in system.entries():
        holders[tier][group][entry.handle] += 1
    pins: Counter[Entry] = Counter()
    for live in system.live:
        for group, table in enumerate(live.record.tables):
            holders[Tier.L1][group].update(handle for handle in table if handle is not None)
        for slots in (live.record.live, live.record.spares):
            for group, handle in slots.items():
                holders[Tier.L1][group][handle] += 1
        pins.update(live.record.sources.values())
        assert not live.record.preparing
    for keep in system.keeps():
        pins.update(keep.entries)
    for tier in Tier:
        for group, pool in enumerate(system.directory.index.pools[tier]):
            assert pool.used_count == len(holders[tier][group])
            assert all(pool.holders(handle) == count for handle, count in holders[tier][group].items())
    for _, _, entry in system.entries():
        assert entry.pins == pins[entry]
    for node in system.directory.index.nodes.values():
        assert not node.copying
        assert not node.storing


def budgets_are_taken_by_what_waits(system: System) -> None:
    """The shares of L2 are taken by what waits there for its request, and nothing else."""
    held = [0] * len(system.spec.groups)
    for live in system.live:
        if live.record.prefetch is not None and not live.record.prefetch.concluded:
            for _, group in live.record.prefetch.fetched:
                held[group] += 1
    assert system.prefetcher.fetches.held == held
    assert not any(system.writer._storing)
    assert not any(system.writer._copying)
    assert not system.writer._queue


def prefetches_have_settled(system: System) -> None:
    """Nobody waits for what is not on its way, and the next probe does not wait for one that is over."""
    assert all(live.record.prefetch is None or live.record.prefetch.settled for live in system.live)
    assert system.prefetcher._admission._probing_since_s is None


def bytes_on_their_way_are_counted(system: System) -> None:
    """What the read policy takes for the queue at L3 is what is being fetched, each job until all ranks have it; and
    what never pays is never read."""
    fetching = {task.job.job_id: task.job for task in system.executor.waiting if isinstance(task.job, FetchJob)}
    object_bytes = system.directory.stats.object_bytes
    size_bytes = sum(object_bytes[item.group] for job in fetching.values() for item in job.items)
    assert system.prefetcher._admission._under_way_bytes == size_bytes
    if system.read_policy == "never":
        assert not system.directory.stats.tokens_by_source["l3"]


ALWAYS = (
    bytes_on_their_way_are_counted,
    published_copies_are_true,
    requests_compute_on_true_bytes,
    loads_take_the_longest_usable_prefix,
    no_page_is_here_without_its_ancestors,
    what_is_kept_cannot_be_evicted,
    what_was_found_stays,
    what_a_plan_has_brought_is_here,
    accounts_are_conserved,
    what_l3_is_said_to_have_was_there,
    a_handover_says_what_is_there,
    every_byte_of_an_arena_is_of_one_slot,
)
AT_REST = (slots_and_pins_have_an_owner, budgets_are_taken_by_what_waits, prefetches_have_settled, l3_has_no_holes)
