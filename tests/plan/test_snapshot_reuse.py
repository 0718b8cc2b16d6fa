"""Snapshots of the state over a trace: what each way to take them finds, against prompts counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from hicache.cli import cli
from hicache.plan.snapshot_reuse import SnapshotPoint, snapshot_points
from hicache.plan.workload import ServedRequest, Workload

SHARED, SESSIONS, OWN, BLOCK = 58, 13, 8, 1000


def workload() -> Workload:
    """Prompts of 66 blocks that have the first 58 in common."""
    requests = []
    for session in range(SESSIONS):
        own = SHARED + session * OWN
        blocks = np.array([*range(SHARED), *range(own, own + OWN)], dtype=np.int64)
        requests.append(ServedRequest(float(session), 66 * BLOCK, 10, 1.0, blocks))
    return Workload(tuple(requests), BLOCK, SHARED + SESSIONS * OWN)


def test_br_146_each_way_to_take_snapshots_has_its_hits_and_its_bytes() -> None:
    """All sessions but the first have 58 blocks of KV; only some snapshots make them usable."""
    attention = 12 * 58 / (13 * 66)
    every = snapshot_points(workload(), chunk_tokens=16 * BLOCK)
    assert every == [
        SnapshotPoint("every block of the trace", attention, attention, SHARED + SESSIONS * OWN),
        SnapshotPoint("every chunk", 12 * 48 / (13 * 66), attention, 3 + SESSIONS),
        SnapshotPoint("ends of prompts", 0.0, attention, SESSIONS),
        SnapshotPoint("ends, and where prompts part", 11 * 58 / (13 * 66), attention, SESSIONS + 1),
    ]


def test_the_same_prompt_again_is_found_at_its_end() -> None:
    again = Workload((*workload().requests[:1], *workload().requests[:1]), BLOCK, 66)
    assert [point.hit_ratio for point in snapshot_points(again, chunk_tokens=16 * BLOCK)] == [0.5, 32 / 66, 0.5, 0.5]


def test_a_prompt_shorter_than_a_block_has_no_snapshot() -> None:
    short = ServedRequest(0.0, 10, 1, 1.0, np.array([0], dtype=np.int64))
    assert all(p.snapshots == 0 == p.hit_ratio for p in snapshot_points(Workload((short,), BLOCK, 1), chunk_tokens=1))


def test_the_plan_of_a_hybrid_model_shows_them(tmp_path: Path) -> None:
    lines = [{"timestamp": at, "input_length": 1024, "output_length": 9, "hash_ids": [1, 2]} for at in (0, 1000)]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, count in (("kimi-linear-48b", 4), ("llama-3-8b", 0)):
        plan = ["plan", name, "--trace", str(trace)]
        found = json.loads(CliRunner().invoke(cli, [*plan, "--json", "-"]).output)
        assert len(found["tiers"]["snapshots"]) == count
        assert ("snapshots of the state at" in CliRunner().invoke(cli, plan).output) is bool(count)
        for point in found["tiers"]["snapshots"]:
            assert point["state_bytes"] == point["snapshots"] * 20 * (3 * 32 * 128 * 3 * 2 + 32 * 128 * 128 * 4)
