"""What a copy job does on one rank: the calls for its groups, whole or layer by layer, and the outcome of each item."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hicache.copies import Copies
from hicache.copy_order import LayerCopy
from hicache.jobs import CopyItem, CopyJob, CopyKind
from hicache.layer_runs import layer_runs
from hicache.outcome import Outcome
from hicache.rank_spec import RankSpec
from hicache.slices import Span


class CopyJobs:
    """One call copies a whole group, or some of its layers, so when it fails no item of the group may be used. There is
    nothing to do for a group that the rank lacks.
    """

    def __init__(self, rank: RankSpec, copies: Copies, *, fault: Callable[[CopyKind, Exception], None]) -> None:
        """``fault`` is told what went wrong; nothing raises for it."""
        self._rank = rank
        self._copies = copies
        self._fault = fault

    def run(self, job: CopyJob, outcomes: list[Outcome]) -> None:
        """Run the copies group by group, and extend ``outcomes`` by one for each item."""
        failed: set[int] = set()
        for group, items in _by_group(job).items():
            if self._has(job.kind, group, failed):
                self._try(job.kind, group, items, failed)
        outcomes.extend(_outcomes(job, failed))

    def by_layer(self, job: CopyJob, outcomes: list[Outcome]) -> list[LayerCopy]:
        """The copies of a LOAD in the order of layers, of all groups together; the last one extends ``outcomes``."""
        by_group = _by_group(job)
        failed: set[int] = set()
        counts = {group: len(items) for group, items in by_group.items() if self._has(job.kind, group, failed)}
        copies = [
            LayerCopy(run.layers, partial(self._load_layers, by_group, run.spans, failed))
            for run in layer_runs(self._rank, counts)
        ]
        return [*copies, LayerCopy((), lambda: outcomes.extend(_outcomes(job, failed)))]

    def _load_layers(self, by_group: dict[int, list[CopyItem]], spans: dict[int, Span], failed: set[int]) -> None:
        for group, (first, stop) in spans.items():
            if group not in failed:
                self._try(CopyKind.LOAD, group, by_group[group], failed, layers=slice(first, stop))

    def _has(self, kind: CopyKind, group: int, failed: set[int]) -> bool:
        """Whether the rank has a group; one that does not exist has ``failed``."""
        try:
            return not self._rank.lacks(group)
        except IndexError as error:
            failed.add(group)
            self._fault(kind, error)
            return False

    def _try(
        self, kind: CopyKind, group: int, items: list[CopyItem], failed: set[int], *, layers: slice | None = None
    ) -> None:
        sources, targets = [item.source for item in items], [item.target for item in items]
        try:
            match kind:
                case CopyKind.BACKUP:
                    self._copies.backup(group, sources, targets)
                case CopyKind.LOAD:
                    self._copies.load(group, sources, targets, layers=layers)
                case CopyKind.SNAPSHOT:
                    self._copies.snapshot(group, sources, targets)
                case CopyKind.RESTORE:
                    self._copies.restore(group, sources, targets)
                case CopyKind.RESET:
                    self._copies.reset(group, targets)
                case CopyKind.CLEAR:
                    self._copies.clear(group, targets)
                case CopyKind.ARRIVE:
                    raise AssertionError("an arrival copies nothing")
        except Exception as error:
            failed.add(group)
            self._fault(kind, error)


def _by_group(job: CopyJob) -> dict[int, list[CopyItem]]:
    by_group: dict[int, list[CopyItem]] = {}
    for item in job.items:
        by_group.setdefault(item.group, []).append(item)
    return by_group


def _outcomes(job: CopyJob, failed: set[int]) -> list[Outcome]:
    return [Outcome.IO_ERROR if item.group in failed else Outcome.OK for item in job.items]
