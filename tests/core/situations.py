"""What the tests of the directory put it into."""

from __future__ import annotations

import itertools

from hicache.node import Tier
from hicache.spec import Group
from tests.core.world import FULL, PAGE, STATE, Live, World

SENTINEL = "tenant B"
HYBRID: tuple[Group, ...] = (FULL, STATE)


def prompt(pages: int, *, seed: int = 0) -> list[int]:
    """So many full pages and one token more; prompts of different seeds share nothing."""
    return [1000 * seed + token for token in range(pages * PAGE + 1)]


def fill_with_sentinel(world: World, *tiers: Tier) -> None:
    """Another tenant's bytes lie in every slot of these tiers, which hold nothing of ours."""
    for rank, tier in itertools.product(world.executor.ranks, tiers):
        memory, counts = ((rank.l1, world.config.l1_slots), (rank.l2, world.config.l2_slots))[tier]
        for slots, count in zip(memory, counts, strict=True):
            slots.update(dict.fromkeys(range(count), SENTINEL))


def evict_all(world: World, tier: Tier) -> None:
    """Other requests need all room of a tier."""
    index = world.directory.index
    for group, pool in enumerate(index.pools[tier]):
        handles = index.acquire(tier, group, pool.capacity)
        assert handles is not None
        index.release(tier, group, handles)


def loaded_pages(live: Live) -> int:
    assert live.record.loaded_pages is not None
    return live.record.loaded_pages


def slots_free(world: World) -> list[list[int]]:
    """What could be taken, by tier and group."""
    index = world.directory.index
    return [[index.room(tier, group) for group in range(len(world.spec.groups))] for tier in Tier]


def prefetching(world: World, tokens: list[int], *, without: frozenset[tuple[int, int]] = frozenset()) -> Live:
    """A request that has asked for what another engine has stored of its prompt, ``without`` some (page, group)."""
    world.fill_l3(tokens, without=without)
    live = world.open(tokens)
    world.prefetch(live)
    return live


def restore(world: World, live: Live) -> None:
    """What the request has asked for arrives, and is loaded."""
    world.run_all()
    world.load_whole(live)


def resident(world: World, tier: Tier) -> set[tuple[bytes, int]]:
    """Block key and group of what lies in a tier."""
    return {(entry.node.key, group) for where, group, entry in world.entries() if where is tier}
