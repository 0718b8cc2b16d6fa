"""The documents say what the code has: settings, counters, outcomes, files; and the README's example runs."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hicache import CacheSpec, HiCache, PrefetchPolicy, Ranks, RankWorker, SlotCache, SnapshotPolicy
from hicache.front import CacheFront
from hicache.outcome import Outcome
from hicache.settings import CacheSettings, SlotSettings
from hicache.stats import DirectoryStats
from tests.client.hicached import HicachedProcess

ROOT = Path(__file__).parents[2]
ENGINE = (ROOT / "docs" / "engine.md").read_text()


def rows(section: str) -> list[str]:
    """The names in the first column of the table under a heading."""
    text = ENGINE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)[^`]*`", cell)]


def test_every_setting_of_open_is_documented() -> None:
    own = set(inspect.signature(HiCache.open).parameters) - {"spec", "settings"}
    assert sorted(rows("Settings of `HiCache.open`")) == sorted(own | CacheSettings.__optional_keys__)


@pytest.mark.parametrize(("kind", "settings"), [(HiCache, CacheSettings), (SlotCache, SlotSettings)])
def test_what_a_leader_is_told_is_what_a_cache_is_told(kind: type, settings: type[CacheSettings]) -> None:
    own = {"spec", "l1", "l2", "l3", "salt", "ranks", "copies", "clock"}
    assert set(inspect.signature(kind).parameters) - own == settings.__optional_keys__


def test_every_setting_of_the_prefetch_is_documented_with_its_default() -> None:
    assert sorted(rows("Prefetch")) == sorted(field.name for field in fields(PrefetchPolicy))
    for field in fields(PrefetchPolicy):
        assert f"| `{field.name}` | `{field.default}` |" in ENGINE, field.name


def test_every_setting_of_the_snapshot_policy_is_documented_with_its_default() -> None:
    assert sorted(rows("Snapshots")) == sorted(field.name for field in fields(SnapshotPolicy))
    for field in fields(SnapshotPolicy):
        assert f"| `{field.name}` | `{field.default}` |" in ENGINE, field.name


def test_every_counter_is_documented() -> None:
    assert sorted(rows("What is counted")) == sorted(
        field.name for field in fields(DirectoryStats) if field.name != "on_served"
    )


def test_every_outcome_is_documented() -> None:
    assert sorted(rows("Outcomes")) == sorted(outcome.name for outcome in Outcome)


def test_every_call_of_a_request_is_documented() -> None:
    calls = [
        "match",
        "prefetch",
        "wait",
        "load",
        "extend",
        "next_state_stop",
        "append",
        "wait_layer",
        "state_moved",
        "store",
        "wait_stored",
        "release",
    ]
    assert rows("A request") == calls
    assert all(callable(getattr(HiCache, call)) for call in calls)


def test_the_example_of_the_readme_runs() -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    finished = subprocess.run([sys.executable, "-c", example[1]], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr


def test_the_example_of_prefill_and_decode_engines_runs() -> None:
    section = ENGINE.split("\n## Prefill and decode engines\n", 1)[1].split("\n## ", 1)[0]
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert example is not None
    with TemporaryDirectory(prefix="hic") as folder:
        daemon = HicachedProcess(Path(folder))
        daemon.start()
        try:
            code = example[1].replace("unix:///run/hicached/hicached.sock", daemon.address)
            assert code != example[1]
            finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        finally:
            daemon.end()
    assert finished.returncode == 0, finished.stderr


def test_every_setting_of_rank_processes_is_documented_with_its_default() -> None:
    assert rows("Rank processes") == [field.name for field in fields(Ranks)]
    for field in fields(Ranks):
        if field.name.endswith("_s"):
            assert f"| `{field.name}` | `{field.default}` |" in ENGINE, field.name


def test_a_worker_takes_the_settings_of_the_leader() -> None:
    settings = inspect.signature(HiCache.open).parameters
    for name, parameter in inspect.signature(RankWorker.open).parameters.items():
        if name not in ("rank", "leader", "waits"):
            assert parameter.default == settings[name].default, name


def test_the_example_of_rank_processes_runs(tmp_path: Path) -> None:
    section = ENGINE.split("\n## Rank processes\n", 1)[1].split("\n## ", 1)[0]
    [example] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "ranks.py").write_text(example)
    finished = subprocess.run([sys.executable, str(tmp_path / "ranks.py")], capture_output=True, text=True, timeout=100)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == ["restored: 0", "restored: 32 lost: {}"]


def test_every_call_of_an_engine_that_owns_its_slots_is_documented_and_the_example_runs(tmp_path: Path) -> None:
    calls = [
        name
        for name, value in {**vars(CacheFront), **vars(SlotCache)}.items()
        if callable(value) and not name.startswith("_")
    ]
    assert sorted([*rows("An engine that owns its slots"), "close", "flush"]) == sorted(calls)
    section = ENGINE.split("\n## An engine that owns its slots\n", 1)[1].split("\n## ", 1)[0]
    [example] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=60, env=environment
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == ["usable: 0", "usable: 32 failed: False block 9: 2.0"]


def test_every_setting_of_ranks_is_documented_with_its_default_and_the_example_runs() -> None:
    defaults = {field.name: field.default for field in fields(CacheSpec)}
    assert rows("A model on several ranks") == ["tp_size", "tp_lcm", "pp_layers"]
    assert {name for name in defaults if name.startswith(("tp_", "pp_"))} == set(rows("A model on several ranks"))
    for name in rows("A model on several ranks"):
        assert f"| `{name}` | `{defaults[name]}` |" in ENGINE
    section = ENGINE.split("## A model on several ranks", 1)[1].split("\n## ", 1)[0]
    example = textwrap.dedent("\n".join(line for line in section.splitlines() if line.startswith("    ")))
    check = (
        "assert (rank.groups[0].layers[0], rank.groups[0].heads) == (27, 1)\nassert not rank.shards[0][0].is_written"
    )
    finished = subprocess.run([sys.executable, "-c", f"{example}\n{check}"], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "ARCHITECTURE.md",
        "docs/decisions/README.md",
        "docs/engine.md",
        "docs/faults.md",
        "docs/metrics.md",
        "docs/plan.md",
        "docs/vllm_tier.md",
    ],
)
def test_what_a_document_points_to_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    paths = re.findall(r"`((?:hicache|backends|daemon|kernels|bench|docs|tests)/[\w/]*(?:\.\w+)?)`", text)
    assert links or paths
    for link in links:
        assert ((ROOT / document).parent / link).exists(), link
    for path in paths:
        assert (ROOT / path).exists(), path


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    for record in (ROOT / "docs" / "decisions").glob("0*.md"):
        assert f"]({record.name})" in index, record.name
