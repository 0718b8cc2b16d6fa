"""The tenants that have a label of their own in metrics: the first few that do anything, and ``other`` for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

OTHER = "other"


class TenantLabels:
    """A tenant keeps its label as long as it is there: no counter ever goes down because another became larger."""

    def __init__(self, tenants_max: int) -> None:
        self._tenants_max = tenants_max
        self._labels: dict[str, str] = {}

    def fold(self, numbers: Mapping[str, float]) -> Mapping[tuple[str, ...], float]:
        """The numbers of tenants, by label. A tenant gets its label with its first number that is not 0."""
        folded: Counter[tuple[str, ...]] = Counter()
        for name, number in numbers.items():
            if number and name not in self._labels:
                named = sum(label != OTHER for label in self._labels.values())
                self._labels[name] = name if named < self._tenants_max else OTHER
            if name in self._labels:
                folded[(self._labels[name],)] += number  # type: ignore[assignment]  # a Counter of floats
        return folded
