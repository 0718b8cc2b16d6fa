"""The demo itself, run as a user runs it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import zstandard

from bench.demo import command
from bench.demo.processes import DemoError
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
    assert finished.stderr == "", "log lines belong into the log files"
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
        (["--json", "/tmp"], "json = '/tmp'"),
        (["--requests", "5"], "requests = 5: expected --trace"),
        (["--scale", "16"], "scale = 16: expected --trace"),
        (["--trace", __file__, "--scale", "0"], "scale = 0"),
    ],
)
def test_bad_input_is_one_line_that_names_it(flags: list[str], named: str) -> None:
    finished = run(*flags)
    assert finished.returncode == 2
    assert named in finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1


def trace_line(**changes: object) -> bytes:
    fields = {"timestamp": 0, "input_length": 1200, "output_length": 70, "hash_ids": [5, 6, 7]}
    return json.dumps(fields | changes).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        (
            "corrupt.jsonl.zst",
            zstandard.compress(trace_line() * 1000)[:-9] + b"corrupted",
            "in UTF-8",
        ),
        ("latin1.jsonl", trace_line() + "{\xe9}\n".encode("latin1"), "in UTF-8"),
        ("negative.jsonl", trace_line(hash_ids=[3, -4]), "none of them negative"),
        ("endless.jsonl", trace_line(timestamp=float("inf")), "endless.jsonl:1"),
        ("tiny.jsonl", trace_line(), "at least 16 requests with 33 or more prompt tokens"),
        ("short.jsonl", trace_line(input_length=64) * 100, "here are 0 among 100"),
    ],
)
def test_a_trace_that_cannot_be_served_is_refused_before_anything_starts(
    name: str, content: bytes, named: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    finished = run("--trace", str(tmp_path / name))
    assert finished.returncode == 2
    assert named in finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1
    assert not finished.stdout


def test_help_says_what_a_trace_is_cut_to() -> None:
    text = " ".join(run("--help").stdout.split())
    assert "prompts are cut to 768 tokens and outputs to 8" in text
    assert "[default: (400)]" in text
    assert "[default: (32)]" in text


def start_demo(folder: str) -> subprocess.Popen[str]:
    """A demo in a process group of its own, whose temporary files are in ``folder``."""
    hicache = Path(sys.executable).with_name("hicache")
    return subprocess.Popen(
        [str(hicache), "demo"],
        env=os.environ | {"TMPDIR": folder},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(condition: Callable[[], object], *, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["starting", "serving"])
def test_a_signal_ends_the_demo_with_one_line_and_leaves_nothing_behind(number: signal.Signals, moment: str) -> None:
    with TemporaryDirectory(prefix="hic") as folder:
        demo = start_demo(folder)
        sign = {"starting": "hicache-demo-*", "serving": "hicache-demo-*/ready.json"}[moment]
        wait_until(lambda: list(Path(folder).glob(sign)), timeout_s=60)
        if moment == "serving":
            wait_until(lambda: list(Path(folder).glob("hicache-demo-*/objects/*")), timeout_s=60)
        children = psutil.Process(demo.pid).children(recursive=True)
        if number is signal.SIGTERM:
            demo.send_signal(number)  # as a supervisor does
        else:
            os.killpg(demo.pid, number)  # as a terminal does
        _, errors = demo.communicate(timeout=30)
        assert demo.returncode == 128 + number
        assert errors == f"hicache: the demo was stopped by {number.name}\n"
        assert not psutil.wait_procs(children, timeout=10)[1], "processes were left behind"
        assert children or moment == "starting"
        assert not list(Path(folder).iterdir())


def run_with(monkeypatch: pytest.MonkeyPatch, result: Outcome | Exception) -> int:
    """The demo's command around a script that only writes a log, and then ends with ``result``."""

    class ShortDemo:
        def __init__(self, turns: object, folder: Path, **_: object) -> None:
            (folder / "engine-1.log").write_text("the last words\n")

        def run(self) -> Outcome:
            if isinstance(result, Exception):
                raise result
            return result

    monkeypatch.setattr(command, "Demo", ShortDemo)
    return command.run_demo(trace=None, requests=1, scale=32, seed=1, json_path=None)


def test_a_process_that_fails_is_exit_code_1_and_its_log_is_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_with(monkeypatch, DemoError("engine 1 has died")) == 1
    errors = capfd.readouterr().err
    assert "--- engine-1.log\nthe last words" in errors
    assert errors.endswith("hicache: engine 1 has died\n")


def test_a_check_that_fails_shows_the_logs_and_success_does_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_with(monkeypatch, good_outcome()) == 0
    assert "the last words" not in "".join(capfd.readouterr())
    outcome = good_outcome()
    outcome.came_back_by_itself = False
    assert run_with(monkeypatch, outcome) == 1
    assert "the last words" in capfd.readouterr().err


def served(**changes: object) -> Served:
    fields: dict[str, object] = {
        "tokens": (1,),
        "by_source": {"l1": 16, "l2": 16, "l3": 16, "computed": 3},
        "prompt_tokens": 51,
        "ttft_s": 0.01,
        "recompute_ttft_s": 0.02,
        "differences": (),
        "is_compared": True,
    }
    return Served(**(fields | changes))  # type: ignore[arg-type]


def good_outcome() -> Outcome:
    return Outcome(
        served=[served()],
        cross_tenant_control_hits=1,
        survived_engine_restart=True,
        survived_daemon_kill=True,
        came_back_by_itself=True,
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
        {"came_back_by_itself": False},
        {"served": [served(is_compared=False)]},
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


def test_only_comparisons_that_were_made_are_counted() -> None:
    outcome = good_outcome()
    outcome.served = [served(), served(is_compared=False)]
    assert to_json(outcome)["requests"] == 2
    assert to_json(outcome)["requests_compared"] == 1


@pytest.mark.parametrize(
    "spoil", [{"stores_cut_off": 0}, {"came_back_by_itself": False}, {"survived_daemon_kill": False}]
)
def test_a_kill_that_met_no_store_was_not_survived(spoil: dict[str, object]) -> None:
    assert to_json(good_outcome())["survived"]["daemon_kill"] is True
    outcome = good_outcome()
    for name, value in spoil.items():
        setattr(outcome, name, value)
    assert to_json(outcome)["survived"]["daemon_kill"] is False


def test_a_time_counts_for_a_tier_only_when_half_of_the_prompt_was_restored() -> None:
    page = served(by_source={"l1": 0, "l2": 0, "l3": 16, "computed": 384}, prompt_tokens=400)
    half = served(by_source={"l1": 184, "l2": 0, "l3": 16, "computed": 200}, prompt_tokens=400)
    nothing = served(by_source={"l1": 0, "l2": 0, "l3": 0, "computed": 400}, prompt_tokens=400)
    assert [one.source for one in (page, half, nothing)] == ["computed", "l3", "computed"]
    assert [one.is_hit for one in (page, half, nothing)] == [True, True, False]
    outcome = good_outcome()
    outcome.served = [page]
    assert to_json(outcome)["ttft_ms"]["l3"] == {"p50": None, "p95": None}
    assert to_json(outcome)["tokens_by_source"]["l3"] == 16
