"""What the planner says of sizes, against what was worked out by hand, and of requests that cannot all run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.costs.machine import GIB, machine
from hicache.plan import capacity
from hicache.plan.lengths import LengthMix
from hicache.plan.nearest import wanted
from hicache.plan.plan import make_plan
from hicache.plan.presets import CONFIGS, model
from hicache.plan.settings import Settings
from tests.plan.test_plan import applied, plan_of

ROOT = Path(__file__).parents[2]
B300 = machine("b300-hgx")
SHORT = LengthMix.single(input_tokens=16, output_tokens=1)


def with_state_slots(engine: str, slots: int) -> dict[str, Any]:
    """Settings of a hybrid under which memory is left for just so many states."""
    if engine == "sglang":
        return {"engine": engine, "rest_bytes": 60 * GIB, "state_slots": slots}
    base = Settings(model=model("qwen3-next-80b"), machine=B300, tp=2, engine="vllm", rest_bytes=60 * GIB)
    block_bytes = int(make_plan(base).ledger["block_bytes"].value)
    return {
        "engine": engine,
        "rest_bytes": (3 * slots + 1) * block_bytes,
    }  # one is never given out, and its three groups of states draw blocks alike


@pytest.mark.parametrize(("slots", "asked"), [(969, 1024), (161, 256)])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_br_096_more_requests_than_states_is_said_to_be_infeasible_with_what_would_do(
    engine: str, slots: int, asked: int
) -> None:
    settings = {"tp": 2, "concurrency": asked, **with_state_slots(engine, slots)}
    plan = plan_of("qwen3-next-80b", **settings)
    assert plan.capacity.pools.state_slots == slots
    assert not plan.is_feasible
    assert plan.verdict.startswith(f"infeasible: {plan.capacity.concurrent_requests} requests of these lengths")
    [fewer] = [it for it in plan.proposals if it.changes[0].startswith("--concurrency")]
    most = int(fewer.changes[0].split()[1])
    assert plan.capacity.concurrent_requests <= most < asked
    for proposal in plan.proposals:
        found = capacity.work_out(
            again := Settings(model=plan.settings.model, machine=B300, **applied(proposal, settings))
        )
        assert found.concurrent_requests >= wanted(again), proposal
    by_length = {it.change: it.requests for it in plan.sensitivity}
    assert {"prompts x 0.5", "prompts x 1.25"} <= by_length.keys(), "what shorter and longer prompts make of it"
    assert by_length["prompts x 0.5"] >= by_length["prompts x 1.25"]
    assert plan_of("qwen3-next-80b", **{**settings, **applied(fewer, settings)}).is_feasible


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("place", ["b300-hgx", "a100"])
def test_br_096_no_request_is_too_much_for_the_planner_to_answer(name: str, engine: str, place: str) -> None:
    for asked in ({"concurrency": 5000, "lengths": SHORT}, {"concurrency": 100_000}, {"rest_bytes": 10**7}):
        settings = {"tp": 8, "engine": engine, **asked}
        plan = make_plan(Settings(model=model(name), machine=machine(place), **settings))
        assert not plan.is_feasible
        assert plan.verdict.startswith("infeasible: ")
        for proposal in plan.proposals:
            again = Settings(model=model(name), machine=machine(place), **applied(proposal, settings))
            assert capacity.work_out(again).concurrent_requests >= wanted(again), proposal


def test_br_096_an_engines_default_of_sequences_that_binds_is_named_as_what_to_change() -> None:
    """vLLM runs 256 beside each other on such a GPU unless it is told another number."""
    settings = Settings(
        model=model("llama-3-8b"), machine=machine("a100"), engine="vllm", lengths=SHORT, concurrency=512
    )
    plan = make_plan(settings)
    assert (plan.capacity.bound_by, plan.capacity.concurrent_requests) == ("engine", 256)
    assert plan.proposals[0].changes == ("--max-running-requests 512",)
    assert make_plan(replace(settings, max_running_requests=512)).is_feasible


def test_br_096_the_planner_answers_without_a_gpu_and_without_loading_anything_for_one() -> None:
    code = """
import sys
from click.testing import CliRunner
from hicache.cli import cli
done = CliRunner().invoke(cli, "plan qwen3-next-80b --tp 2 --rest-gib 30 --state-slots 969 --concurrency 1024".split())
print(done.exit_code, sorted({"torch", "triton", "vllm", "sglang"} & sys.modules.keys()), done.output)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("3 [] "), done.stderr
    assert "infeasible: " in done.stdout
    assert "--concurrency" in done.stdout
