"""What eviction policies are told of a system, and what a time to live does: checks, as in ``invariants.py``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hicache.entry_facts import EntryFacts
from hicache.node import Entry, Node
from hicache.policies.eviction_kinds import Ttl
from hicache.request import RequestRecord
from tests.core.checked_eviction import TTL_S, CheckedEviction
from tests.core.live import PAGE

if TYPE_CHECKING:
    from tests.core.system import System


def uses_by_entry(system: System) -> dict[Entry, tuple[int, bool]]:
    """Of each copy, the requests that have used it, and whether it is the nearest one of its object."""
    return {entry: (entry.uses, entry.node.nearest(entry.group) is entry) for _, _, entry in system.entries()}


def used_s(system: System, entry: Entry) -> float:
    """When it was last used, as policies are told."""
    return EntryFacts(system.spec, entry.group, system.directory.index).facts(entry).used_s


def each_use_is_counted_once(system: System, record: RequestRecord, before: dict[Entry, tuple[int, bool]]) -> None:
    """A request uses all copies of the attention that it has found, and of windows and states the nearest ones, where a
    policy asks for that; nothing else is used by it."""
    rule, watches = system.directory.index.rule, system.directory.index._room.watches_use
    pages = sum(record.local_tokens.values()) // PAGE
    pages_by_key = {key: page for page, key in enumerate(record.keys[:pages])}
    partial = set(rule.needed_partial(pages))
    for entry, (uses, is_nearest) in before.items():
        page = pages_by_key.get(entry.node.key)
        is_full = bool(rule.full_mask >> entry.group & 1)
        is_used = page is not None and (is_full or (is_nearest and (page, entry.group) in partial))
        assert entry.uses == uses + (watches and is_used)
        assert not (watches and is_used) or (entry.last is record.facts and entry.used_s == system.now_s)


def what_is_idle_for_too_long_has_gone(system: System, before: Iterable[Entry]) -> None:
    """Asked when a request has come: what has not been used for its time to live is not here, unless it is the way to
    something that has; and nothing has gone but that, with the rest of its page."""
    room = system.directory.index._room
    gone: dict[Node, list[float]] = {}
    for entry in before:
        if entry.node.entries[entry.tier][entry.group] is not entry:
            gone.setdefault(entry.node, []).append(used_s(system, entry))
    assert all(system.now_s - min(used) > TTL_S for used in gone.values())
    for tier, group, entry in system.entries():
        for queue in (room._eviction[tier][group], room._unwritten[tier][group]):
            if isinstance(queue, CheckedEviction) and isinstance(queue.policy, Ttl) and entry in queue:
                assert system.now_s - used_s(system, entry) <= TTL_S


def pages_are_used_until_their_request_ends(system: System, record: RequestRecord) -> None:
    """Asked when it has: however long it took, none of its pages has been idle in the meantime."""
    index = system.directory.index
    nodes = [index.nodes[key] for key in record.keys[: record.published_pages] if key in index.nodes]
    for group in index._full_groups if record.is_loaded else ():
        entries = [entry for entry in (node.nearest(group) for node in nodes) if entry is not None]
        assert all(used_s(system, entry) == index.now_s for entry in entries)
