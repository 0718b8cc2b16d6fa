"""bench.hybrid over few and short sessions."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from click.testing import CliRunner

from bench import hybrid
from bench.hybrid_snapshots import COPIED, DONATED, DOUBLE, POLICIES, measure_density


@pytest.fixture
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
def test_denser_snapshots_take_more_memory_and_leave_less_to_compute():
    rows = {(row.policy, row.states): row for row in measure_density(sessions=3, shared_tokens=144)}
    assert len(rows) == sum(len(ways) for _, _, ways in POLICIES)
    assert all(row.identical for row in rows.values())
    assert len({row.restored_tokens + row.recomputed_tokens for row in rows.values()}) == 1
    ends, branches, every = (rows[name, DONATED] for name in ("ends", "ends, branches", "ends, every page"))
    assert ends.recomputed_tokens > branches.recomputed_tokens > every.recomputed_tokens
    assert ends.state_bytes_l1 < branches.state_bytes_l1 < every.state_bytes_l1
    assert ends.attention_only_tokens > branches.attention_only_tokens > every.attention_only_tokens == 0
    for policy in ("ends", "ends, branches"):
        copies = [rows[policy, states].copies for states in (COPIED, DONATED, DOUBLE)]
        assert copies[0] > copies[1] > copies[2] == 0
        assert len({rows[policy, states].snapshots for states in (COPIED, DONATED, DOUBLE)}) == 1
    capped = rows["ends, branches, every 4 pages, cap 4", DONATED]
    assert capped.recomputed_tokens < branches.recomputed_tokens
    assert capped.state_bytes_l1 <= rows["ends, every 4 pages", DONATED].state_bytes_l1
    for row in rows.values():
        assert row.state_bytes_l1 == row.state_bytes_l2 <= row.state_bytes_l3


@dataclass(frozen=True)
class Row:
    what: str
    bytes: int
    share: float
    identical: bool


def test_the_command_prints_a_table_for_each_part_and_writes_them_as_json(tmp_path, monkeypatch):
    asked = []

    def measure(*, quick):
        asked.append(quick)
        return [Row("one", 12_345, 0.5, identical=True), Row("two", 1, 0.25, identical=False)]

    monkeypatch.setattr(hybrid, "PARTS", {"first_part": hybrid.Part("The first part", measure)})
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(hybrid.main, ["--quick", "--json", str(file)])
    assert result.exit_code == 0
    assert asked == [True]
    assert all(text in result.output for text in ("The first part", "12,345", "NO", "cpus"))
    document = json.loads(file.read_text())
    assert document["first_part"][1] == {"what": "two", "bytes": 1, "share": 0.25, "identical": False}
    assert document["machine"]["wall_s"] >= 0


def test_the_parts_have_the_names_that_scripts_rely_on():
    assert "snapshot_density" in hybrid.PARTS
