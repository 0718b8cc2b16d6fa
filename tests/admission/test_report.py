"""The report draws what the JSON has, says what it does not have, and refuses what is not a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from bench.admission.__main__ import carry_out, main, read_study
from bench.admission.plots import PLOTS, policy_name, saved_share
from bench.admission.report import write_report
from hicache.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


def studied(*options: str) -> dict[str, Any]:
    """The JSON of a run with these options, without what it says of the machine."""
    context = main.make_context("admission", list(options))
    return json.loads(json.dumps(carry_out(read_study(context.params), Console(quiet=True), 2)))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("unused")
    options = ["--agents", "3", "--seed", "3", "--policies", "lru,fifo,lru+write_through+latency"]
    return studied(*options, "--capacities", "60k,300k", "--tiers", "L1:50k,L3", "--report", str(folder))


def test_the_page_shows_every_plot_and_all_of_it_comes_from_the_json(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(document))
    page = write_report(tmp_path / "run.json", tmp_path / "again")
    first = write_report(document, tmp_path / "first")
    text = page.read_text()
    for plot in PLOTS:
        drawn = page.with_name(f"{plot.name}.png").read_bytes()
        assert drawn.startswith(PNG)
        assert drawn == first.with_name(f"{plot.name}.png").read_bytes()
        assert f"src={plot.name}.png" in text
    assert text == first.read_text()
    assert "no figures" not in text
    assert "http" not in text, "nothing is loaded from anywhere"
    assert f"{saved_share(document['runs'][0]):.4f}" in text


@pytest.mark.parametrize(
    ("part", "plot"),
    [
        ("runs", "hits"),
        ("runs", "pareto"),
        ("bounds", "regret"),
        ("computed", "speed"),
        ("ttl", "ttl"),
        ("orphans", "orphans"),
    ],
)
def test_a_plot_is_of_the_figures_in_the_json(document: dict[str, Any], part: str, plot: str, tmp_path: Path) -> None:
    """Without them it is not drawn, and that is said."""
    without = document | {part: []}
    if part == "bounds":
        without["runs"] = [run | {"regret": None} for run in document["runs"]]
    text = write_report(without, tmp_path).read_text()
    assert "The run has no figures for this plot." in text
    assert not (tmp_path / f"{plot}.png").exists()
    assert (tmp_path / "break_even.png").exists()


def test_regret_is_an_interval(document: dict[str, Any]) -> None:
    assert all(run["regret"] is not None for run in document["runs"])
    for run in document["runs"]:
        least, most = run["regret"]
        assert least <= most < 1
        assert most >= 0


def test_policies_are_named_by_what_differs() -> None:
    assert policy_name({"eviction": "lru", "write": "write_through", "read": "always"}) == "lru"
    assert policy_name({"eviction": "lru", "write": "second_touch"}) == "lru + second_touch"
    assert policy_name({"eviction": "continuation", "write": "continuation"}) == "continuation"
    assert policy_name({"eviction": "lru", "write": "write_through", "read": "latency"}) == "lru + read latency"


@pytest.mark.parametrize("text", ["", "[]", '{"runs": 3, "traces": []}'])
def test_what_is_not_a_run_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json"):
        write_report(tmp_path / "run.json", tmp_path / "report")


def test_a_tier_that_gets_what_the_one_above_evicts_is_studied_too() -> None:
    options = ["--agents", "4", "--policies", "lru+write_back", "--tiers", "L1:60k,L2:120k:lru:write_back,L3"]
    document = studied(*options, "--capacities", "300k")
    (run,) = document["runs"]
    assert [tier["name"] for tier in run["tiers"]] == ["L1", "L2", "L3"]
    assert all(tier["bytes_written"] > 0 for tier in run["tiers"])
    assert document["policy_cost"] == []


def test_a_run_without_time_or_bounds_has_a_table_all_the_same() -> None:
    options = ["--agents", "2", "--policies", "lru", "--capacities", "100k,inf", "--untimed"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    assert "saves most" in result.output
    assert "TTFT" not in result.output
