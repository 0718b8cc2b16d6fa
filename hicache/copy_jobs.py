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


class CopyRun:
    """The copies of one job. One call copies a whole group, or some of its layers, so when it fails no item of the
    group may be used. There is nothing to do for a group that the rank lacks.
    """

    def __init__(
        self, job: CopyJob, rank: RankSpec, copies: Copies, *, fault: Callable[[CopyKind, Exception], None]
    ) -> None:
        """``fault`` is told what went wrong; nothing raises for it."""
        self._job = job
        self._rank = rank
        self._copies = copies
        self._fault = fault
        self._by_group: dict[int, list[CopyItem]] = {}
        for item in job.items:
            self._by_group.setdefault(item.group, []).append(item)
        self._failed: set[int] = set()

    def run(self) -> None:
        """Run the copies group by group."""
        for group in self._groups():
            self._copy(group)

    def by_layer(self) -> list[LayerCopy]:
        """The copies of a LOAD in the order of layers, of all groups together, to be run."""
        counts = {group: len(self._by_group[group]) for group in self._groups()}
        return [LayerCopy(run.layers, partial(self._load_layers, run.spans)) for run in layer_runs(self._rank, counts)]

    @property
    def outcomes(self) -> list[Outcome]:
        """Of each item, after they have run."""
        return [Outcome.IO_ERROR if item.group in self._failed else Outcome.OK for item in self._job.items]

    def _load_layers(self, spans: dict[int, Span]) -> None:
        for group, (first, stop) in spans.items():
            if group not in self._failed:
                self._copy(group, layers=slice(first, stop))

    def _groups(self) -> list[int]:
        """Those that the rank has; one that does not exist has failed."""
        groups = []
        for group in self._by_group:
            try:
                if not self._rank.lacks(group):
                    groups.append(group)
            except IndexError as error:
                self._fail(group, error)
        return groups

    def _copy(self, group: int, *, layers: slice | None = None) -> None:
        items = self._by_group[group]
        sources, targets = [item.source for item in items], [item.target for item in items]
        try:
            match self._job.kind:
                case CopyKind.BACKUP:
                    self._copies.backup(group, sources, targets)
                case CopyKind.LOAD if layers is None:
                    self._copies.load(group, sources, targets)
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
            self._fail(group, error)

    def _fail(self, group: int, error: Exception) -> None:
        self._failed.add(group)
        self._fault(self._job.kind, error)
