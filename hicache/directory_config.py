"""How much room a directory has, and how much of it may be under way at a time."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.arena import ArenaLayout
from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """Capacities in slots by group index, and the bounds of what may be under way at a time.

    With ``l1_arena`` the groups share L1: ``l1_slots`` are then its ``slot_counts``.
    """

    l1_slots: tuple[int, ...]
    l2_slots: tuple[int, ...]  # all zero: no L2
    has_l3: bool = False
    ranks: int = 1
    prefetch_threshold_tokens: int = 256
    prefetch_l2_share: float = 0.5
    store_l2_share: float = 0.5
    l3_confirm_interval_s: float = 60.0
    double_buffering: bool = False
    layerwise: bool = False  # loads are done before they have arrived: compute waits for each layer
    l1_arena: ArenaLayout | None = None

    def __post_init__(self) -> None:
        if self.l1_arena is not None and self.l1_slots != self.l1_arena.slot_counts:
            raise ConfigError("l1_slots", self.l1_slots, f"{self.l1_arena.slot_counts}, as many as l1_arena numbers")
        if self.has_l3 and not any(self.l2_slots):
            raise ConfigError("l2_slots", self.l2_slots, "room in L2, which L3 is reached through, or no L3")
        if any(self.l2_slots) and not all(self.l2_slots):
            raise ConfigError("l2_slots", self.l2_slots, "room for every group, since a page goes down whole, or no L2")
        for name in ("double_buffering", "layerwise"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "True or False")
        for name in ("prefetch_l2_share", "store_l2_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "a share above 0 and at most 1")
