"""The tenants that have a label of their own in metrics: the first few that do anything, and ``other`` for the rest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

OTHER = "other"

ByLabel = Mapping[tuple[str, ...], float]


class TenantLabels:
    """A tenant keeps its label as long as it is there, and ``other`` what tenants had that have gone: no counter ever
    goes down. Bounded by the tenants that there are. Only for the thread that renders.
    """

    def __init__(self, tenants_max: int) -> None:
        self._tenants_max = tenants_max
        self._labels: dict[str, str] = {}
        self._last: defaultdict[str, dict[str, float]] = defaultdict(dict)  # of each counter, by tenant
        self._totals: defaultdict[str, dict[str, float]] = defaultdict(dict)  # by label

    def gauges(self, numbers: Mapping[str, float]) -> ByLabel:
        """``numbers`` of all tenants, by label. A tenant gets its label with its first number that is not 0."""
        self._assign(numbers)
        folded: Counter[str] = Counter()
        for name, number in numbers.items():
            if name in self._labels:
                folded[self._labels[name]] += number  # type: ignore[assignment]  # a Counter of floats
        return {(label,): number for label, number in folded.items()}

    def counters(self, metric: str, numbers: Mapping[str, float]) -> ByLabel:
        """The same of a counter: what it has grown by since the last time goes to the label."""
        self._assign(numbers)
        last, totals = self._last[metric], self._totals[metric]
        for name, number in numbers.items():
            if name in self._labels:
                grown = number - last.get(name, 0.0)
                label = self._labels[name]
                totals[label] = totals.get(label, 0.0) + (grown if grown >= 0 else number)
        self._last[metric] = dict(numbers)
        kept = {*self._labels.values(), OTHER}
        self._totals[metric] = {label: total for label, total in totals.items() if label in kept}
        return {(label,): total for label, total in self._totals[metric].items()}

    def _assign(self, numbers: Mapping[str, float]) -> None:
        for gone in self._labels.keys() - numbers.keys():
            del self._labels[gone]
        named = sum(label != OTHER for label in self._labels.values())
        for name, number in numbers.items():
            if number and name not in self._labels:
                self._labels[name] = name if named < self._tenants_max else OTHER
                named += self._labels[name] != OTHER
