"""The bench that times kernels on a GPU does its work, and says when there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.gpu_copies import GROUPS, MISSING, bus_limits, main, measure
from hicache.spec import Group, PagedGroup, StateField, StateGroup
from tests.kernels.devices import DEVICE

SMALL = [
    PagedGroup("pages", (0, 1), heads=1, head_dim=8, dtype="bfloat16"),
    StateGroup("states", (0,), (StateField("conv", (3, 8), "bfloat16"), StateField("ring", (2,), "int8", True))),
]


@pytest.mark.parametrize("group", SMALL, ids=lambda group: group.name)
def test_every_count_is_measured_both_ways_by_both_backends(group: Group) -> None:
    limits = bus_limits(DEVICE, size_bytes=1 << 20, repetitions=1)
    rows = list(measure("small", group, (1, 3), device=DEVICE, limits=limits, repetitions=1))
    assert [(row.pages, row.direction, row.backend) for row in rows] == [
        (count, direction, backend)
        for count in (1, 3)
        for backend in ("kernel", "reference")
        for direction in ("D2H", "H2D")
    ]
    for row in rows:
        assert row.page_bytes == group.object_bytes(64)
        assert row.gbps >= 0
        assert row.per_call_us > 0


def test_the_states_are_as_large_as_those_of_the_model() -> None:
    assert round(GROUPS["Kimi-K3 state, one of TP8"].object_bytes(64) / 2**20, 2) == 27.69


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: its figures are not missing")
def test_without_a_gpu_it_says_that_the_figures_are_missing(tmp_path: Path) -> None:
    ended = CliRunner().invoke(main, ["--json", str(tmp_path / "figures.json")])
    assert ended.exit_code == 0, ended.output
    assert MISSING in ended.output
    assert json.loads((tmp_path / "figures.json").read_text())["rows"] == []
