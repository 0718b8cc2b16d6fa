"""The report draws what the JSON has, says what it does not have, and refuses what is not a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.admission.bounds import compute_bounds
from bench.admission.generator import agent_sessions
from bench.admission.replay import TierSpec, replay
from bench.admission.report import policy_name, regrets, saved_share, write_report
from hicache.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    trace = agent_sessions(4, seed=3)
    runs = [
        {"trace": trace.name, "eviction": eviction, "write": "write_through", "read": "always", "capacity_pages": pages}
        | {"capacity_tokens": pages * trace.block_tokens + 100}  # as asked for: not a whole number of pages
        | replay(trace, [TierSpec("L3", pages, eviction=eviction)]).to_dict()
        for eviction in ("lru", "fifo")
        for pages in (100, 600)
    ]
    facts = {"name": trace.name, "requests": len(trace.requests), "block_tokens": trace.block_tokens}
    return {
        "traces": [facts],
        "runs": runs,
        "bounds": [compute_bounds(trace, pages, solve=False) for pages in (100, 600)],
    }


def test_the_page_shows_every_plot_that_has_figures(document: dict[str, Any], tmp_path: Path) -> None:
    more = {
        "ttl": [
            {
                "trace": document["traces"][0]["name"],
                "ttl_s": ttl_s,
                "token_hit_share": 0.5,
                "resident_tokens_mean": 1e6,
            }
            for ttl_s in (60, 600)
        ],
        "break_even": {"token_bytes": 131072, "tokens": [1000, 8000], "prefill_s": [0.02, 0.2], "rigs": {"DRAM": 43.5}},
        "queueing": [
            {"trace": document["traces"][0]["name"], "eviction": "lru", "requests_per_s": 2.0, "ttft_s_mean": 0.3}
        ],
    }
    (tmp_path / "run.json").write_text(json.dumps(document | more))
    page = write_report(tmp_path / "run.json", tmp_path / "report")
    text = page.read_text()
    for name in ("hits", "pareto", "regret", "ttl", "break_even", "speed"):
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(PNG)
        assert f"src={name}.png" in text
    assert "no figures" not in text
    assert "http" not in text, "nothing is loaded from anywhere"


def test_what_the_json_does_not_have_is_said(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(document))
    text = write_report(tmp_path / "run.json", tmp_path / "report").read_text()
    assert text.count("The run has no figures for this plot.") == 3
    assert not (tmp_path / "report" / "ttl.png").exists()
    assert f"{saved_share(document['runs'][0]):.4f}" in text


def test_regret_is_an_interval(document: dict[str, Any]) -> None:
    found = regrets(document, document["traces"][0]["name"])
    assert set(found) == {"lru", "fifo"}
    for points in found.values():
        for _, least, most in points:
            assert -1e-9 <= least <= most < 1


def test_policies_are_named_by_what_differs() -> None:
    assert policy_name({"eviction": "lru", "write": "write_through", "read": "always"}) == "lru"
    assert policy_name({"eviction": "lru", "write": "second_touch"}) == "lru + second_touch"
    assert policy_name({"eviction": "continuation", "write": "continuation"}) == "continuation"


@pytest.mark.parametrize("text", ["", "[]", '{"runs": 3, "traces": []}'])
def test_what_is_not_a_run_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json"):
        write_report(tmp_path / "run.json", tmp_path / "report")
