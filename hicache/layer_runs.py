"""Which layers of a load are copied together, so that compute can begin with the first ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hicache.rank_spec import RankSpec
from hicache.slices import Span

# What crosses a PCIe 5 bus in 80 us: a run costs some launches and an event, of 20 us together.
RUN_BYTES_MIN = 4 << 20


class LayerRun(NamedTuple):
    """Neighbouring layers: their ids, and by group where they are in it, as ``[first, stop)``."""

    layers: tuple[int, ...]
    spans: dict[int, Span]


def layer_runs(rank: RankSpec, item_counts: Mapping[int, int], *, run_bytes_min: int = RUN_BYTES_MIN) -> list[LayerRun]:
    """The layers of all groups that are copied, in their order, cut into runs of at least so many bytes.

    ``item_counts``: by group that the rank has, how many pages or states of it. A group whose layers are in no order is
    copied whole with the first of them.
    """
    due: dict[int, list[tuple[int, Span, int]]] = {}  # by layer id: group, places in it, bytes
    for group, count in item_counts.items():
        described = rank.groups[group]
        assert described is not None, "there is nothing to do for a group that the rank lacks"
        layers = described.layers
        size_bytes = count * described.object_bytes(rank.page_tokens)
        for place, layer in enumerate(sorted(layers)):
            pieces = due.setdefault(layer, [])
            if list(layers) == sorted(layers):
                pieces.append((group, (place, place + 1), size_bytes // len(layers)))
            elif place == 0:
                pieces.append((group, (0, len(layers)), size_bytes))
    runs: list[LayerRun] = []
    run_bytes = run_bytes_min  # so that the first layer begins a run
    for layer in sorted(due):
        if run_bytes >= run_bytes_min:
            runs.append(LayerRun((), {}))
            run_bytes = 0
        ids, spans = runs[-1]
        for group, (first, stop), piece_bytes in due[layer]:
            spans[group] = (spans.get(group, (first, stop))[0], stop)
            run_bytes += piece_bytes
        runs[-1] = LayerRun((*ids, layer), spans)
    return runs
