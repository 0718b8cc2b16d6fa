"""hicache calibrate: through a real store, into a preset that the planner reads."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from click.testing import CliRunner

from hicache.cli import cli
from hicache.costs.machine import machine
from hicache.errors import ConfigError


def test_it_measures_a_store_and_writes_a_machine_that_the_planner_takes(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    result = CliRunner().invoke(
        cli, ["calibrate", "--l3", f"file://{tmp_path}/store", "--out", str(out), "--json", str(tmp_path / "all.json")]
    )
    assert result.exit_code == 0, result.output
    found = machine(str(out))
    assert found.gpu_gb == machine("h100").gpu_gb
    assert set(found.tiers) == {"dram", "l3"}
    document = json.loads((tmp_path / "all.json").read_text())
    measured = document["measured"]["l3"]
    assert len(measured["seconds"]) == 7
    ratios = [found.tiers["l3"].load_s(int(size)) / seconds for size, seconds in measured["seconds"].items()]
    assert 0.2 < median(ratios) < 5, "the preset is of these times"
    assert found.tiers["l3"].bytes_per_s < found.tiers["dram"].bytes_per_s, "what is below is on the way too"
    planned = CliRunner().invoke(cli, ["plan", "llama-3-8b", "--machine", str(out)])
    assert "l3" in planned.output, planned.output


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["calibrate", "--l3", f"file://{tmp_path}/store", "--out", "preset"])
    assert isinstance(result.exception, ConfigError)
    assert "preset" in str(result.exception)
    result = CliRunner().invoke(cli, ["calibrate", "--l3", "nowhere://x"])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize("name", ["nothing", "nothing.json"])
def test_a_machine_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        machine(name)
