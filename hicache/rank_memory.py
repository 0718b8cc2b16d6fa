"""What one rank opens before it takes jobs: its pools, and its client of L3."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.connect import open_l3
from hicache.errors import ConfigError
from hicache.l3 import L3
from hicache.pools import L1Pool, L2Pool, l2_slot_counts, open_l1
from hicache.spec import CacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """What ``HiCache.open`` and ``RankWorker.open`` are told: equal on all ranks, but for ``device`` and ``l3``."""

    l1_pages: int
    l1_state_slots: int
    l2_bytes: int
    l2_state_share: float
    l3: str | None
    l3_capacity_bytes: int
    token: str
    device: str
    deployment: str = ""
    salt: bytes | None = None
    l1_bytes: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for what a type checker would have refused, and for what contradicts itself."""
        for name in ("l1_pages", "l1_state_slots", "l1_bytes", "l2_bytes", "l3_capacity_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(name, value, "a whole number of at least 0")
        if not isinstance(self.l2_state_share, int | float):
            raise ConfigError("l2_state_share", self.l2_state_share, "a fraction from 0 to 1")
        for name in ("l3", "token", "deployment", "device"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "l3" and value is None):
                raise ConfigError(name, value, "text")
        if not isinstance(self.salt, bytes | None):
            raise ConfigError("salt", type(self.salt).__name__, "bytes, or None")
        if self.deployment and self.l3 is None:
            raise ConfigError(
                "deployment", self.deployment, "an l3 to share, unix://, tls:// or tcp://, or no deployment"
            )
        if self.l3 is not None and self.l2_bytes == 0:
            raise ConfigError("l2_bytes", self.l2_bytes, "more than 0 when l3 is set: L3 reads and writes L2 pages")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Pools and L3 of one rank. Whoever takes them over closes ``l3`` (an executor does), then ``l2``."""

    l1: L1Pool
    l2: L2Pool | None
    l3: L3 | None

    @classmethod
    def open(cls, spec: CacheSpec, settings: MemorySettings, *, rank: int) -> RankMemory:
        """Raises ConfigError when it is more than there is, and then holds nothing. Never waits for L3."""
        l1 = open_l1(
            spec,
            rank=rank,
            pages=settings.l1_pages,
            state_slots=settings.l1_state_slots,
            size_bytes=settings.l1_bytes,
            device=settings.device,
        )
        if not settings.l2_bytes:
            return cls(l1, None, None)
        counts = l2_slot_counts(spec, settings.l2_bytes, state_share=settings.l2_state_share)
        l2 = L2Pool(spec, counts, rank=rank, device=l1.device)
        try:
            l3 = open_l3(
                settings.l3,
                spec=spec,
                memory=l2,
                token=settings.token,
                capacity_bytes=settings.l3_capacity_bytes,
                deployment=settings.deployment,
                salt=settings.salt,
            )
        except BaseException:
            l2.close()
            raise
        return cls(l1, l2, l3)

    def close(self) -> None:
        """Give everything back, where nobody has taken it over."""
        if self.l3 is not None:
            self.l3.close()
        if self.l2 is not None:
            self.l2.close()
