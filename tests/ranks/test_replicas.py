"""Ranks in real processes: stored, started again, restored from L3, and every byte of every rank compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.conftest import PAGE, MakeReplica, prompt, spec_of

SHAPES = {
    "TP2": spec_of(2),
    "TP4": spec_of(4),
    "PP2": spec_of(1, (2, 3)),
    "TP2xPP2": spec_of(2, (3, 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_replica_restores_from_l3_what_another_one_has_stored(shape: str, make: MakeReplica, tmp_path: Path) -> None:
    spec = SHAPES[shape]
    l3 = f"file://{tmp_path}/l3?shared=1"
    first = make(spec, l3=l3)
    assert first.serve(prompt(5)).by_source["computed"] == 5 * PAGE + 1
    first.settle()
    assert first.serve(prompt(5)).by_source["l1"] == 5 * PAGE
    first.settle()
    first.close()
    second = make(spec, l3=l3)
    assert second.serve(prompt(5)).by_source["l3"] == 5 * PAGE
    second.settle()
    stats = second.cache.stats
    assert stats.prefetch_used == 5 * PAGE
    assert not stats.ranks_lost
