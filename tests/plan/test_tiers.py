"""Reuse of traces, what tiers hold and take, and when loading beats computing."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from hicache.costs.machine import GB, GIB, Machine, Tier, machine
from hicache.errors import ConfigError
from hicache.plan.capacity import work_out
from hicache.plan.formula import Ledger
from hicache.plan.plan import make_plan
from hicache.plan.presets import model
from hicache.plan.reuse import ReuseCurve
from hicache.plan.settings import Settings
from hicache.plan.tiers import TierRequest, breakeven_tokens, pair_flops, plan_tiers, stored_bytes_per_token
from hicache.plan.workload import ServedRequest, Workload, read_workload

BLOCK = 4


def random_workload(seed: int, count: int = 60) -> Workload:
    """Prompts that grow out of one another, as conversations do; blocks are named by their path."""
    draw = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]
    names: dict[Any, int] = {}
    requests = []
    for number in range(count):
        path = draw.choice(paths) + tuple(draw.randrange(3) for _ in range(draw.randrange(1, 4)))
        paths.append(path)
        tokens = len(path) * BLOCK - draw.randrange(BLOCK)
        sizes = [min(BLOCK, tokens - i * BLOCK) for i in range(len(path))]  # a partial block has a name of its own
        blocks = np.array([names.setdefault((path[: i + 1], size), len(names)) for i, size in enumerate(sizes)])
        requests.append(ServedRequest(number * draw.choice([0.5, 1.0]), tokens, 3, 0.2, blocks))
    return Workload(tuple(sorted(requests, key=lambda r: r.at_s)), BLOCK, len(names))


def blocks_of(request: ServedRequest) -> list[int]:
    assert request.blocks is not None
    return [int(block) for block in request.blocks]


def simulated(workload: Workload, ttl_s: float) -> tuple[int, int]:
    """Prompt tokens found by a cache with a TTL, prefix by prefix, and those it had to take in."""
    used: dict[Any, float] = {}
    found = missed = 0
    for request in workload.requests:
        is_prefix = True
        for position, block in enumerate(blocks_of(request)):
            tokens = min(BLOCK, request.input_tokens - position * BLOCK)
            is_prefix = is_prefix and block in used and request.at_s - used[block] <= ttl_s
            found, missed = (found + tokens, missed) if is_prefix else (found, missed + tokens)
            used[block] = request.at_s
    return found, missed


@pytest.mark.parametrize("seed", range(6))
def test_hits_at_a_ttl_are_those_of_a_cache_with_that_ttl(seed: int) -> None:
    workload = random_workload(seed)
    curve = ReuseCurve(workload)
    for ttl_s in (0.0, 0.5, 2.0, 7.5, 20.0, 1e9):
        found, missed = simulated(workload, ttl_s)
        point = curve.at(ttl_s)
        assert point.hit_ratio == pytest.approx(found / (found + missed))
        assert point.written_tokens_per_s == pytest.approx(missed / curve.duration_s)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_held_is_the_mean_over_time(seed: int) -> None:
    workload = random_workload(seed)
    curve = ReuseCurve(workload)
    step, ttl_s = 0.25, 3.0
    end = workload.requests[-1].at_s
    held = 0.0
    for tick in range(int(end / step)):
        now = tick * step + step / 2
        latest: dict[Any, tuple[float, int]] = {}
        for request in workload.requests:
            if request.at_s <= now:
                for position, block in enumerate(blocks_of(request)):
                    latest[block] = request.at_s, min(BLOCK, request.input_tokens - position * BLOCK)
        held += sum(tokens for at, tokens in latest.values() if now - at <= ttl_s) * step
    assert curve.at(ttl_s).resident_tokens == pytest.approx(held / curve.duration_s, rel=0.05)


def test_a_longer_ttl_finds_more_and_holds_more() -> None:
    curve = ReuseCurve(random_workload(1, count=200))
    points = [curve.at(ttl_s) for ttl_s in (0, 1, 3, 10, 30, 100)]
    for less, more in itertools.pairwise(points):
        assert less.hit_ratio <= more.hit_ratio
        assert less.resident_tokens <= more.resident_tokens
        assert less.storage_ratio <= more.storage_ratio
        assert less.written_tokens_per_s >= more.written_tokens_per_s
    for tokens in (1, 50, 400):
        held = curve.holding(tokens)
        assert held.resident_tokens <= tokens
        assert held.ttl_s == curve.duration_s or curve.at(held.ttl_s * 1.01 + 0.01).resident_tokens >= tokens * 0.99
    assert curve.holding(1e12).ttl_s == curve.duration_s


MOONCAKE = [
    {"timestamp": 1000, "input_length": 700, "output_length": 50, "hash_ids": [1, 2]},
    {"timestamp": 0, "input_length": 500, "output_length": 100, "hash_ids": [1]},
]
SESSIONS = [
    {
        "block_size": 64,
        "requests": [
            {"t": 0.0, "in": 100, "out": 10, "hash_ids": [1, 2], "api_time": 2.0},
            {
                "t": 3.0,
                "type": "subagent",
                "requests": [{"t": 0.5, "in": 64, "out": 5, "hash_ids": [1]}],
            },
            {"t": 10.0, "in": 128, "out": 10, "hash_ids": [1, 2], "api_time": 1.0},
        ],
    },
    {"block_size": 64, "requests": [{"t": 0.0, "in": 100, "out": 10, "hash_ids": [1, 2], "api_time": 2.0}]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("packing", ["", ".zst", ".gz"])
def test_traces_of_three_forms_are_read(tmp_path: Path, packing: str) -> None:
    def written(name: str, text: str) -> Path:
        pack = {"": lambda b: b, ".zst": zstandard.ZstdCompressor().compress, ".gz": gzip.compress}[packing]
        path = tmp_path / f"{name}{packing}"
        path.write_bytes(pack(text.encode()))
        return path

    mooncake = read_workload(written("m.jsonl", lines(MOONCAKE)))
    assert [(r.at_s, r.input_tokens, r.service_s) for r in mooncake.requests] == [(0.0, 500, 2.0), (1.0, 700, 1.0)]
    assert mooncake.block_tokens == 512
    assert ReuseCurve(mooncake).at(10).hit_ratio == pytest.approx(512 / 1200)
    sessions = read_workload(written("s.jsonl", lines(SESSIONS)))
    assert [(r.at_s, r.input_tokens) for r in sessions.requests] == [(0.0, 100), (3.5, 64), (10.0, 128), (11.0, 100)]
    assert len({block for r in sessions.requests for block in blocks_of(r)}) == 5  # ids are a conversation's own
    azure = read_workload(written("a.csv", AZURE))
    assert azure.lengths.requests == ((374, 44, 1.0), (396, 109, 1.0))
    with pytest.raises(ConfigError, match="block ids"):
        ReuseCurve(azure)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"requests": 3}', "TIMESTAMP,ContextTokens\n1,2\n", '{"timestamp": 1}\n']
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.jsonl"):
        read_workload(path)
    with pytest.raises(ConfigError, match="a file"):
        read_workload(tmp_path / "none.jsonl")


def eight_b(**tiers: Tier) -> Settings:
    """The rig of vLLM's published loads: Llama 8B on one H100."""
    rig = Machine(name="rig", gpu_gb=80, prefill_tflops=593, tiers=tiers)
    return Settings(model=model("llama-3-8b"), machine=rig)


@pytest.mark.parametrize(("gb_per_s", "thousands"), [(43.5, 0.5), (13.5, 0.8), (6.9, 1.9), (6.0, 3.3), (5.0, 8.7)])
def test_break_even_is_that_of_the_published_loads(gb_per_s: float, thousands: float) -> None:
    """A fixed cost of 10 ms; an SSD of 5 GB/s never pays for prompts of 8k tokens."""
    tier = Tier(bytes_per_s=gb_per_s * GB, latency_s=0.010)
    settings = eight_b(tier=tier)
    found = breakeven_tokens(settings, work_out(settings), tier, TierRequest())
    assert found is not None
    assert math.ceil(found / 100) / 10 == thousands  # published in steps of a hundred tokens


def test_the_prefill_model_is_that_of_the_published_times() -> None:
    shape = model("llama-3-8b")
    assert 2 * shape.weights.active_parameters == pytest.approx(13.96e9, rel=0.001)
    assert pair_flops(eight_b()) == 262144


def test_a_tier_that_never_pays_has_no_break_even() -> None:
    slow = Tier(bytes_per_s=1e8)
    settings = eight_b(slow=slow)
    plan = make_plan(settings)
    assert plan.as_json()["tiers"]["breakeven_tokens"] == {"slow": None}


def test_what_a_token_computes_is_not_guessed() -> None:
    settings = Settings(model=model("kimi-k3"), machine=machine("b300-hgx"), tp=8)
    assert make_plan(settings).tiers.breakeven == []
    told = make_plan(settings, TierRequest(active_parameters=50e9)).tiers.breakeven
    assert [found.tier for found in told] == ["dram", "nvme", "nvme_x2"]
    assert all(found.tokens for found in told)


def test_a_store_keeps_each_byte_once() -> None:
    k3 = Settings(model=model("kimi-k3"), machine=machine("b300-hgx"), tp=8, kv_dtype="fp8", state_dtype="bf16")
    per_token = stored_bytes_per_token(k3)
    assert per_token == 13824 + -(-232316928 // 8192)  # MLA once, a snapshot of the state of all ranks a chunk
    gqa = Settings(model=model("qwen3-235b"), machine=machine("b300-hgx"), tp=8)
    assert stored_bytes_per_token(gqa) == 192512  # four heads once, though eight ranks have one each


def test_writes_wear_drives_as_measured() -> None:
    """41.8 TB an hour on a 7.68 TB drive are 133 drive writes a day: 70B, blocks of 160 MiB, conversation."""
    blocks, seconds = 249_242, 3537
    requests = tuple(ServedRequest(i * seconds / 499, 512, 1, 1.0, np.array([i])) for i in range(500))
    curve = ReuseCurve(Workload(requests, 512, 500))
    settings = Settings(model=model("llama-3-70b"), machine=machine("h200"), tp=4)
    request = TierRequest(l3_bytes=int(7.68e12), curve=curve, rate=blocks / 500)
    tiers = plan_tiers(settings, work_out(settings), request, Ledger())
    assert tiers.drive_writes_per_day == pytest.approx(133, rel=0.01)


def test_l2_is_what_hicache_makes_of_the_bytes() -> None:
    settings = Settings(model=model("kimi-k3"), machine=machine("b300-hgx"), tp=8, kv_dtype="fp8", state_dtype="bf16")
    plan = make_plan(settings, TierRequest(l2_bytes=100 * GIB))
    [held] = plan.tiers.held
    slots = held.slots or {}
    page, state = 13824 * 64, 29_040_640  # a state in whole pages of memory
    assert slots["state0"] == int(100 * GIB * 0.25) // state
    assert slots["attention0"] == (100 * GIB - slots["state0"] * state) // page
    assert held.tokens == slots["attention0"] * 64


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"name": "m"}',
        '{"name": "m", "gpu_gb": 0}',
        '{"name": "m", "gpu_gb": 80, "tiers": {"d": {"bytes_per_s": 0}}}',
        '{"name": "m", "gpu_gb": "80"}',
    ],
)
def test_a_calibrated_machine_is_checked(tmp_path: Path, content: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"machine\.json"):
        machine(str(path))
    with pytest.raises(ConfigError, match="b300-hgx"):
        machine("b400")


def test_a_calibrated_machine_is_read(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"name": "mine", "gpu_gb": 80, "tiers": {"dram": {"bytes_per_s": 5e10}}}))
    assert machine(str(path)) == Machine(name="mine", gpu_gb=80, tiers={"dram": Tier(bytes_per_s=5e10)})
