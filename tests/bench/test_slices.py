"""bench.slices on a few small pages."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner

from bench import slices


@pytest.mark.parametrize("l1_layout", ["one tensor", "by layer"])
@pytest.mark.parametrize("group", [replace(slices.PAGES, layers=(0, 1)), replace(slices.STATE, layers=(0, 1))])
def test_every_number_of_slices_is_a_row_beside_the_unsliced_copy(group, l1_layout):
    rows = slices.measure(group, l1_layout=l1_layout, slots=2, repetitions=2)
    assert [(row.kind, row.l1_layout, row.slices) for row in rows] == [
        (group.name, l1_layout, count) for count in slices.SLICES
    ]
    assert (rows[0].backup_of_unsliced, rows[0].load_of_unsliced) == (1.0, 1.0)
    assert all(value > 0 for row in rows for value in list(asdict(row).values())[2:])


def test_the_command_writes_what_it_prints(monkeypatch):
    monkeypatch.setattr(slices, "PAGES", replace(slices.PAGES, layers=(0,)))
    monkeypatch.setattr(slices, "STATE", replace(slices.STATE, layers=(0,)))
    result = CliRunner().invoke(slices.main, ["--quick", "--json", "-"], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert len(document["rows"]) == 4 * len(slices.SLICES)
    assert document["machine"]["cpus"] >= 1
