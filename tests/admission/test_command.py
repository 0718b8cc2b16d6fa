"""The command: a row for each policy and capacity of each trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.admission.test_traces import line, written


def test_each_policy_is_replayed_at_each_capacity(tmp_path: Path) -> None:
    trace = written(tmp_path, line() + line(timestamp=1) + line(timestamp=2, hash_ids=[5, 8, 9]))
    options = ["--trace", str(trace), "--policies", "lru,arc+tiny_lfu", "--capacities", "2k,inf", "--json", "-"]
    command = [sys.executable, "-m", "bench.admission", *options, "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(run["eviction"], run["write"], run["capacity_tokens"]) for run in report["runs"]] == [
        ("lru", "write_through", 2000),
        ("arc", "tiny_lfu", 2000),
        ("lru", "write_through", None),
        ("arc", "tiny_lfu", None),
    ]
    assert report["traces"][0]["ceiling_tokens"] == report["runs"][2]["usable_tokens"] == 1200 + 512
    assert "arc" in done.stderr


def test_a_policy_that_there_is_not_is_refused_with_those_there_are() -> None:
    command = [sys.executable, "-m", "bench.admission", "--policies", "best"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "s3_fifo" in done.stderr
