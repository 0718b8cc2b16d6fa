"""Every engine that the model drives: one space that both the machine and the random walks draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from hicache.policies.snapshot import SnapshotPolicy
from hicache.spec import Group, PagedGroup, StateGroup
from tests.core.checked_eviction import EVICTIONS
from tests.core.world import MODELS, PAGE, WRITES, World, shared

SLOTS = (2, 3, 4, 6, 12, 12, 30, 30)  # from what hardly does for one request to what is enough for all
HYBRIDS = [groups for groups in MODELS if len({type(group) for group in groups}) > 1]  # drawn twice as often
FETCH_S = (0.0, 0.001, 0.001, 0.01, 0.1, 1.0)  # of one object
SHARES = (0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine. ``units`` is None for a fixed split of L1; ``l2`` is None without L2 and L3."""

    groups: tuple[Group, ...]
    l1: tuple[int, ...]
    l2: tuple[int, ...] | None
    has_l3: bool
    units: int | None
    slots_per_unit: tuple[int, ...]
    ranks: int
    lacks: tuple[frozenset[int], ...]  # by rank: groups that its pipeline stage has no layer of
    policy: str
    eviction: str
    snapshot_policy: SnapshotPolicy
    double_buffering: bool
    layerwise: bool
    prefetch_l2_share: float
    store_l2_share: float
    job_items_max: int
    seconds_per_request: float
    read_policy: str
    fetch_s: float
    token_s: float

    @classmethod
    def draw(cls, rng: random.Random) -> Setup:
        groups = rng.choice([*MODELS, *HYBRIDS])
        ranks = rng.choice([1, 1, 2, 3])
        has_l2 = rng.random() < 0.85
        return cls(
            groups=groups,
            l1=_slots(rng, len(groups)),
            l2=_slots(rng, len(groups)) if has_l2 else None,
            has_l3=has_l2 and rng.random() < 0.9,
            units=rng.choice([None, None, None, 5, 8, 16, 40]),
            slots_per_unit=tuple(rng.choice([1, 1, 2, 3, 7]) for _ in groups),
            ranks=ranks,
            lacks=_stages(rng, ranks, len(groups)),
            policy=rng.choice([*WRITES, "write_back", "write_back"]),
            eviction=rng.choice([*EVICTIONS, "lru"]),
            snapshot_policy=SnapshotPolicy(
                chunk_ends=rng.random() < 0.5,
                branch_points=rng.random() < 0.7,
                ends=rng.random() < 0.7,
                prefill_interval_tokens=rng.choice([None, PAGE, 3 * PAGE]),
                state_interval_tokens=rng.choice([None, PAGE, 3, 2 * PAGE]),
                cap_per_path=rng.choice([None, 1, 2, 4]),
            ),
            double_buffering=(ways := rng.randrange(4)) < 2,
            prefetch_l2_share=rng.choice(SHARES),
            store_l2_share=rng.choice(SHARES),
            job_items_max=rng.choice([1, 2, 16]),
            seconds_per_request=rng.choice([0.0, 25.0, 100.0]),
            layerwise=ways % 2 == 1,
            read_policy=rng.choice(["latency"] * 5 + ["gpu", "gpu", "always", "never"]),
            fetch_s=rng.choice(FETCH_S),
            token_s=rng.choice([0.0, 0.0, 0.01, 0.1]),
        )

    def world(self) -> World:
        arena = None
        if self.units is not None:
            arena = shared(self.groups, units=self.units, slots_per_unit=self.slots_per_unit)
        world = World(
            self.groups,
            l1=self.l1,
            l2=self.l2 or 0,
            arena=arena,
            job_items_max=self.job_items_max,
            seconds_per_request=self.seconds_per_request,
            policy=WRITES[self.policy],
            eviction=EVICTIONS[self.eviction],
            snapshot_policy=self.snapshot_policy,
            lacks=self.lacks,
            has_l3=self.has_l3,
            ranks=self.ranks,
            prefetch_l2_share=self.prefetch_l2_share,
            store_l2_share=self.store_l2_share,
            double_buffering=self.double_buffering,
            layerwise=self.layerwise,
            read_policy=self.read_policy,
        )
        world.fetch_s, world.token_s = self.fetch_s, self.token_s
        return world

    @property
    def traits(self) -> Iterator[str]:
        """What sets it apart, by name."""
        states = [group for group in self.groups if isinstance(group, StateGroup)]
        paged = [group for group in self.groups if isinstance(group, PagedGroup)]
        yield f"policy.{self.policy}"
        yield f"eviction.{self.eviction}"
        yield f"read.{self.read_policy}"
        yield f"ranks.{self.ranks}"
        yield "l1.fixed" if self.units is None else "l1.arena"
        yield "tiers.3" if self.has_l3 else "tiers.2" if self.l2 else "tiers.1"
        yield f"states.{len(states)}"
        yield f"double_buffering.{bool(states and self.double_buffering)}"
        yield f"layerwise.{self.layerwise}"
        yield f"cap.{self.snapshot_policy.cap_per_path}"
        yield from ("window" for group in paged if group.window_tokens)
        yield from ("latent" for group in paged if group.planes == 1)
        if all(group.window_tokens for group in paged):
            yield "no full attention"
        if any(self.lacks):
            yield "stages"


def _slots(rng: random.Random, groups: int) -> tuple[int, ...]:
    """As many for all groups, or for each as may be."""
    return (rng.choice(SLOTS),) * groups if rng.random() < 0.5 else tuple(rng.choice(SLOTS) for _ in range(groups))


def _stages(rng: random.Random, ranks: int, groups: int) -> tuple[frozenset[int], ...]:
    """With several ranks at times a pipeline: each group is on one of them at least."""
    if ranks == 1 or rng.random() < 0.5:
        return (frozenset[int](),) * ranks
    homes = [rng.randrange(ranks) for _ in range(groups)]
    return tuple(
        frozenset(group for group in range(groups) if homes[group] != rank and rng.random() < 0.6)
        for rank in range(ranks)
    )
