"""How many slots a budget of bytes gives each group: arithmetic only, so that planning needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hicache.errors import ConfigError
from hicache.spec import CacheSpec, RankSpec, StateGroup

SLOT_ALIGNMENT_BYTES = 4096  # a slot starts on a page of memory, as direct I/O and the daemon's reads want it
PAGED_SLOTS_MIN = 8  # fewer pages than this in L2 cannot hold one request's prefix and the next one's prefetch
STATE_SLOTS_MIN = 2  # one snapshot being used while the next one arrives


def slot_stride(object_bytes: int) -> int:
    """Bytes from one object in L2 to the next: the object, rounded up to whole pages of memory."""
    return -(-object_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def l2_strides(rank: RankSpec) -> tuple[int, ...]:
    """Bytes of one L2 slot of a rank, by group index: its objects one after the other; 0 for a group that it lacks."""
    return tuple(sum(slot_stride(shard.size_bytes) for shard in shards) for shards in rank.shards)


def l2_size_bytes(rank: RankSpec, slot_counts: Sequence[int]) -> int:
    """Bytes of an L2 pool with ``slot_counts[group_index]`` slots: exactly what it takes of the host's memory."""
    return sum(count * stride for count, stride in zip(slot_counts, l2_strides(rank), strict=True))


def l2_slot_counts(spec: CacheSpec, l2_bytes: int, state_share: float) -> tuple[int, ...]:
    """Slots for each group out of ``l2_bytes`` on each rank: equally many for all paged groups, equally many for all
    state groups, and the same on every rank, since one directory gives them out.

    ``state_share`` of the bytes go to state groups, where there are both kinds; neither kind gets fewer than its
    minimum, whatever the share. No rank takes more than ``l2_bytes``. Raises ConfigError when the minima do not fit,
    naming what would.
    """
    if not 0.0 <= state_share <= 1.0:
        raise ConfigError("l2_state_share", state_share, "a fraction from 0 to 1")
    needs = {_slot_need(spec.rank(stage * spec.tp_size)) for stage in range(spec.pp_size)}  # alike within a stage
    largest = max(needs, key=lambda need: need.bytes_min)
    if l2_bytes < largest.bytes_min:
        raise ConfigError("l2_bytes", l2_bytes, f"at least {largest.bytes_min} bytes ({largest})")
    state_slots = min((need.state_slots(l2_bytes, state_share) for need in needs if need.state_bytes), default=0)
    paged_slots = min((need.paged_slots(l2_bytes, state_slots) for need in needs if need.page_bytes), default=0)
    return tuple(state_slots if isinstance(group, StateGroup) else paged_slots for group in spec.groups)


class _SlotNeed(NamedTuple):
    """What one rank takes for a page of all its paged groups, and for a snapshot of all its state groups."""

    page_bytes: int
    state_bytes: int

    @property
    def bytes_min(self) -> int:
        return self.page_bytes * PAGED_SLOTS_MIN + self.state_bytes * STATE_SLOTS_MIN

    def state_slots(self, l2_bytes: int, state_share: float) -> int:
        if not self.page_bytes:
            return l2_bytes // self.state_bytes
        slots_max = (l2_bytes - self.page_bytes * PAGED_SLOTS_MIN) // self.state_bytes
        return min(max(int(l2_bytes * state_share) // self.state_bytes, STATE_SLOTS_MIN), slots_max)

    def paged_slots(self, l2_bytes: int, state_slots: int) -> int:
        return (l2_bytes - state_slots * self.state_bytes) // self.page_bytes

    def __str__(self) -> str:
        parts = []
        if self.page_bytes:
            parts.append(f"{PAGED_SLOTS_MIN} pages of {self.page_bytes} bytes over all paged groups")
        if self.state_bytes:
            parts.append(f"{STATE_SLOTS_MIN} state snapshots of {self.state_bytes} bytes")
        return " and ".join(parts)


def _slot_need(rank: RankSpec) -> _SlotNeed:
    strides = l2_strides(rank)
    state_bytes = sum(
        stride for stride, group in zip(strides, rank.groups, strict=True) if isinstance(group, StateGroup)
    )
    return _SlotNeed(sum(strides) - state_bytes, state_bytes)
