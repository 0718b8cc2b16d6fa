"""The demo itself, run as a user runs it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.demo.report import checks, to_json
from bench.demo.run import Outcome
from bench.demo.worker import Inspection, Served

FIELDS = {
    "requests",
    "requests_compared",
    "outputs_identical",
    "prompt_tokens",
    "tokens_by_source",
    "ttft_ms",
    "cross_tenant_hits",
    "cross_tenant_control_hits",
    "transient_bytes_persisted",
    "survived",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    hicache = Path(sys.executable).with_name("hicache")
    return subprocess.run([str(hicache), "demo", *arguments], capture_output=True, text=True, timeout=300)


def write_trace(path: Path, *, requests: int) -> Path:
    """Conversations that grow block by block, so that there is something to find."""
    rng = random.Random(3)
    lines = []
    for number in range(requests):
        conversation, turn = number % 6, number // 6
        blocks = [conversation * 1000 + block for block in range(3 + 2 * turn)]
        length = 512 * (len(blocks) - 1) + rng.randint(1, 512)
        lines.append(json.dumps({"timestamp": number, "input_length": length, "output_length": 96, "hash_ids": blocks}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workload", ["built-in", "trace"])
def test_everything_is_served_from_everywhere_and_equals_a_recompute(workload: str, tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    flags = ["--json", str(target)]
    if workload == "trace":
        flags += ["--trace", str(write_trace(tmp_path / "trace.jsonl", requests=24))]
    finished = run(*flags)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures = json.loads(target.read_text())
    assert set(figures) == FIELDS
    assert figures["outputs_identical"] is True
    assert figures["requests"] == figures["requests_compared"] > 24
    assert set(figures["tokens_by_source"]) == {"l1", "l2", "l3", "computed"}
    assert all(figures["tokens_by_source"].values())
    assert sum(figures["tokens_by_source"].values()) == figures["prompt_tokens"]
    assert set(figures["ttft_ms"]) == {"computed", "l1", "l2", "l3"}
    assert all(set(times) == {"p50", "p95"} and times["p50"] > 0 for times in figures["ttft_ms"].values())
    assert figures["cross_tenant_hits"] == 0
    assert figures["cross_tenant_control_hits"] > 0
    assert figures["transient_bytes_persisted"] == 0
    assert figures["survived"] == {"engine_restart": True, "daemon_kill": True}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--trace", "/nowhere/trace.jsonl"], "trace = '/nowhere/trace.jsonl'"),
        (["--requests", "0"], "requests = 0"),
        (["--trace", __file__, "--scale", "3"], "scale = 3"),
        (["--trace", __file__], "test_demo.py:1"),
        (["--json", "/nowhere/figures.json"], "json = '/nowhere/figures.json'"),
    ],
)
def test_bad_input_is_one_line_that_names_it(flags: list[str], named: str) -> None:
    finished = run(*flags)
    assert finished.returncode == 2
    assert named in finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1


def served(**changes: object) -> Served:
    fields: dict[str, object] = {
        "tokens": (1,),
        "by_source": {"l1": 16, "l2": 16, "l3": 16, "computed": 3},
        "prompt_tokens": 51,
        "ttft_s": 0.01,
        "recompute_ttft_s": 0.02,
        "differences": (),
    }
    return Served(**(fields | changes))  # type: ignore[arg-type]


def good_outcome() -> Outcome:
    return Outcome(
        served=[served()],
        cross_tenant_control_hits=1,
        survived_engine_restart=True,
        survived_daemon_kill=True,
        stores_cut_off=1,
        inspections=[Inspection(poison_in_l1=1)],
        samples_looked_for=1,
        samples_in_l3=1,
        daemon_exit_code=0,
    )


@pytest.mark.parametrize(
    "spoil",
    [
        {"served": [served(differences=("attn: page 3 of 5 differs",))]},
        {"served": [served(by_source={"l1": 16, "l2": 0, "l3": 16, "computed": 3})]},
        {"cross_tenant_hits": 1},
        {"cross_tenant_control_hits": 0},
        {"inspections": [Inspection(poison_in_l1=1, poison_in_l2=1)]},
        {"inspections": [Inspection()]},
        {"poison_in_l3": 1},
        {"samples_in_l3": 0},
        {"survived_engine_restart": False},
        {"survived_daemon_kill": False},
        {"stores_cut_off": 0},
        {"daemon_exit_code": -9},
    ],
)
def test_each_check_can_fail(spoil: dict[str, object]) -> None:
    assert all(holds for _, holds, _ in checks(good_outcome()))
    outcome = good_outcome()
    for name, value in spoil.items():
        setattr(outcome, name, value)
    assert sum(not holds for _, holds, _ in checks(outcome)) == 1


def test_a_source_that_served_nothing_has_no_times() -> None:
    assert to_json(good_outcome())["ttft_ms"]["l1"] == {"p50": None, "p95": None}
