"""What must hold of prefixes at every moment: the longest usable one is loaded, and what was found stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hicache.node import Tier
from hicache.request import RequestRecord
from hicache.spec import StateGroup
from tests.core.live import PAGE

if TYPE_CHECKING:
    from tests.core.system import System


def usable_pages(system: System, keys: Sequence[bytes], *, lost: frozenset[tuple[int, int]] = frozenset()) -> int:
    """The longest n for which every group has what a prefix of n pages needs, without what is ``lost``."""
    nodes = system.directory.index.nodes
    best = 0
    for n in range(1, len(keys) + 1):
        if all(
            keys[page] in nodes and nodes[keys[page]].resident >> group & 1 and (page, group) not in lost
            for group, reach in enumerate(system.spec.reach_pages)
            for page in range(0 if reach is None else max(0, n - reach), n)
        ):
            best = n
    return best


def loads_take_the_longest_usable_prefix(system: System) -> None:
    """A load takes all that was usable when it chose, unless L1 has no room or a copy has failed. What nobody kept may
    have gone to make room for its own live states."""
    for live in system.live:
        record = live.record
        if record.loaded_pages is not None:
            assert record.loaded_pages <= live.usable_at_load
            has_chosen_freely = record.cut_reason in ("not_usable", "late") and not live.is_cut_by_eviction
            if has_chosen_freely and not system.directory.stats.ranks_lost:
                assert record.loaded_pages == live.usable_at_load, "shorter than what was usable, for no reason"


def what_was_found_stays(system: System) -> None:
    """What a request was told to have stays where it was, or comes nearer; what it has loaded stays in L1."""
    for live in system.live:
        index, record = system.directory.index, live.record
        if not record.is_loaded and record.keep is not live.found:
            continue  # a load has chosen, perhaps less
        pages = record.published_pages if record.is_loaded else sum(record.local_tokens.values()) // PAGE
        off_device = 0
        for page in range(pages):
            needed = {
                group
                for group, reach in enumerate(system.spec.reach_pages)
                if reach is None or page >= max(0, pages - reach)
            }
            if record.is_loaded:
                paged = {g for g in needed if record.tables[g] and record.tables[g][page] is not None}
                assert all(index.nodes[record.keys[page]].entries[Tier.L1][group] is not None for group in paged)
            elif needed:
                node = index.nodes[record.keys[page]]
                assert all(node.nearest(group) is not None for group in needed)
                off_device += any(node.entries[Tier.L1][group] is None for group in needed)
        assert record.is_loaded or off_device * PAGE <= record.local_tokens["l2"]


def no_page_is_here_without_its_ancestors(system: System) -> None:
    """The tree is one: each node can be reached, has something, and attention is here from the first page on."""
    index = system.directory.index
    full = index.rule.full_mask
    for key, node in index.nodes.items():
        assert node.key == key
        assert node.resident or node.children or node.copying or node.storing
        assert node.parent is None or (index.nodes[node.parent.key] is node.parent and node in node.parent.children)
        if full and node.resident:
            assert node.resident & full == full
            assert node.parent is None or node.parent.resident & full == full
        for tier in Tier:
            there = sum(1 << group for group, entry in enumerate(node.entries[tier]) if entry is not None)
            assert node.masks[tier] == there
        assert node.resident == node.masks[Tier.L1] | node.masks[Tier.L2]


def the_path_has_no_more_snapshots_than_the_cap(system: System, record: RequestRecord, pages: int) -> None:
    """Asked where a snapshot was just taken: more than the policy's cap stay only while they are in use."""
    states = [group for group, described in enumerate(system.spec.groups) if isinstance(described, StateGroup)]
    nodes = [system.directory.index.nodes.get(key) for key in record.keys[:pages]]
    is_there = nodes[-1] is not None and all(nodes[-1].masks[Tier.L1] >> group & 1 for group in states)
    cap = system.snapshot_policy.cap_per_path
    if cap is None or not is_there:  # one of its groups failed, perhaps
        return
    there = [node for node in nodes if node is not None and any(node.resident >> group & 1 for group in states)]
    idle = [
        node
        for node in there[:-1]
        if not any((node.copying | node.storing) >> group & 1 for group in states)
        and not any(entries[group] and entries[group].pins for entries in node.entries for group in states)
    ]
    assert len(there) <= cap or not idle


def what_a_plan_has_brought_is_here(system: System) -> None:
    """The plan of a settled prefetch is usable until its request takes it, unless it failed as often as it may: else
    what was fetched, by itself or for another request, was evicted or given up."""
    for live in system.live:
        prefetch = live.record.prefetch
        if prefetch is not None and prefetch.settled and not prefetch.concluded and prefetch.replans_left:
            assert usable_pages(system, prefetch.keys) >= prefetch.target_pages
