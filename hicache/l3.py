"""What the executor asks of L3, whether it is hicached or a backend in this very process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hicache.outcome import Outcome


@dataclass(frozen=True, slots=True)
class L3Item:
    """One object and where its bytes are, or shall be, in the L2 memory: ``[offset, offset + size_bytes)``."""

    key: bytes
    offset: int
    size_bytes: int


Done = Callable[[list[Outcome]], None]


TierFills = Mapping[str, tuple[int, int]]  # bytes in use and bytes in all of l1 and l2


@runtime_checkable
class TellsFills(Protocol):
    """An L3 that others can ask how full its engine's own tiers are."""

    def tell_fills(self, read_fills: Callable[[], TierFills]) -> None:
        """``read_fills`` is called now and then, in another thread."""
        ...


def tell_fills(l3: object, read_fills: Callable[[], TierFills]) -> None:
    """Has ``l3`` tell how full the tiers of this engine are, if that is something that it does."""
    if isinstance(l3, TellsFills):
        l3.tell_fills(read_fills)


class L3(Protocol):
    """Thread-safe. Calls block their caller no longer than ``timeout_s``; no call raises for a fault of L3.

    ``done`` is called exactly once, with an outcome for each item, and only when nobody touches the L2 bytes of the
    items any more: that may be after the call returned (a silent daemon may still be writing), from another thread.
    """

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        """OK or ABSENT for each key; UNAVAILABLE or DEADLINE for all when L3 cannot say.

        Keys that are OK are kept from eviction for a short lease, so that a get that follows at once finds them.
        """
        ...

    def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """Bring objects into L2. OK means complete and verified where it lies."""
        ...

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """Store objects out of L2. OK or EXISTS means that hicached keeps them across restarts."""
        ...

    def close(self) -> None:
        """Give up what is in flight (``done`` is still called), and disconnect. Idempotent."""
        ...
