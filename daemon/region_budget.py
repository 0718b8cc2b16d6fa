"""How much memory of clients may be mapped: in all, by one tenant, and how often the same memfd."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hicache.daemon.memory import OfferedMemory, RegionRefused

MAPPINGS_PER_MEMFD_MAX = 16  # address space: at most so many times the budget, far below the 128 TiB of a process


@dataclass(frozen=True, slots=True)
class RegionCharge:
    """One mapping that is counted until it is given back."""

    number: int
    tenant: str
    memfd: tuple[int, int]
    size_bytes: int


class RegionBudget:
    """Counts what is mapped. Event loop only.

    A memfd counts once for its tenant, with its largest mapping, however often it is attached: a client that comes back
    while a stuck thread still holds its old region fits beside itself.
    """

    def __init__(self, *, regions_bytes_max: int, tenant_regions_bytes_max: int) -> None:
        self._regions_bytes_max = regions_bytes_max
        self._tenant_regions_bytes_max = tenant_regions_bytes_max
        self._numbers = itertools.count()
        self._charges: dict[int, RegionCharge] = {}

    def charge(self, tenant: str, offered: OfferedMemory) -> RegionCharge:
        """Counts a mapping that is about to be made. Raises RegionRefused, with nothing counted."""
        mappings = sum(1 for charge in self._charges.values() if charge.memfd == offered.memfd)
        if mappings >= MAPPINGS_PER_MEMFD_MAX:
            raise RegionRefused(f"one memfd may be attached {MAPPINGS_PER_MEMFD_MAX} times")
        charge = RegionCharge(next(self._numbers), tenant, offered.memfd, offered.size_bytes)
        charges = [*self._charges.values(), charge]
        for setting, limit_bytes, counted_bytes in (
            ("regions_bytes_max", self._regions_bytes_max, _bytes_of(charges)),
            (
                "tenant_regions_bytes_max",
                self._tenant_regions_bytes_max,
                _bytes_of([other for other in charges if other.tenant == tenant]),
            ),
        ):
            if counted_bytes > limit_bytes:
                raise RegionRefused(f"{setting} is {limit_bytes} bytes: with this memory it would be {counted_bytes}")
        self._charges[charge.number] = charge
        return charge

    def set_tenant_bytes_max(self, tenant_regions_bytes_max: int) -> None:
        """Another bound for what is attached from here on."""
        self._tenant_regions_bytes_max = tenant_regions_bytes_max

    def give_back(self, charge: RegionCharge) -> None:
        """Forgets a mapping that is gone."""
        del self._charges[charge.number]

    @property
    def used_bytes(self) -> int:
        """What counts now."""
        return _bytes_of(list(self._charges.values()))


def _bytes_of(charges: list[RegionCharge]) -> int:
    largest: dict[tuple[str, tuple[int, int]], int] = {}
    for charge in charges:
        owner = (charge.tenant, charge.memfd)
        largest[owner] = max(largest.get(owner, 0), charge.size_bytes)
    return sum(largest.values())
