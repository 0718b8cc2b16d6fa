"""What the planner says of sizes, against what was worked out by hand, and of requests that cannot all run."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.costs.machine import GIB, machine
from hicache.errors import ConfigError
from hicache.plan import capacity
from hicache.plan.hf_config import read_config
from hicache.plan.lengths import LengthMix
from hicache.plan.model import ModelShape
from hicache.plan.nearest import wanted
from hicache.plan.plan import make_plan
from hicache.plan.presets import CONFIGS, model
from hicache.plan.settings import Settings
from hicache.plan.tiers import TierRequest
from hicache.sizing import PAGED_SLOTS_MIN, STATE_SLOTS_MIN, l2_size_bytes, l2_slot_counts, l2_strides, slot_stride
from hicache.spec import CacheSpec, PagedGroup, StateField, StateGroup
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


def test_br_095_tokens_and_sequences_are_bound_apart() -> None:
    """Tokens by the blocks of attention alone, sequences by states: not one divided by the number of groups."""
    settings = Settings(
        model=model("qwen3-next-80b"), machine=B300, engine="vllm", tp=2, page_tokens=16, rest_bytes=20 * GIB
    )
    plan = make_plan(settings)
    blocks, tokens = int(plan.ledger["kv_blocks"].value), int(plan.ledger["block_tokens"].value)
    assert plan.capacity.kv_tokens == blocks * tokens  # one group of attention, three of states
    assert plan.capacity.pools.state_slots == blocks // 3


def test_br_092_the_sizes_of_hybrids_are_those_worked_out_by_hand() -> None:
    """Attention bytes of a token, state bytes of a sequence: of attention layers and of state layers alone."""
    gqa = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    mamba = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 8, "mamba_d_state": 128, "mamba_d_conv": 4}
    attention = [4, 15, 26, 37, 48, 59, 70, 81]
    mamba_hybrid = read_config({"num_hidden_layers": 88, "attn_layer_indices": attention, **gqa, **mamba}, name="m")
    found = figures_of(mamba_hybrid)
    assert found["kv_bytes_per_token_per_rank"] == 8 * 2 * 8 * 128 * 2
    assert found["conv_bytes_per_slot_per_rank"] == 80 * (128 * 64 + 2 * 8 * 128) * 3 * 2
    assert found["ssm_bytes_per_slot_per_rank"] == 80 * 128 * 64 * 128 * 4
    gdn = {**CONFIGS["qwen3-next-80b"], "num_hidden_layers": 64}
    found = figures_of(read_config(gdn, name="m"))
    assert found["kv_bytes_per_token_per_rank"] == 16 * 2 * 2 * 256 * 2
    assert found["state_bytes_per_slot_per_rank"] == 48 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    found = figures_of(model("kimi-linear-48b"), draft_layers=1)  # a draft of one layer: not of all the target's
    assert found["kv_bytes_per_token_per_rank"] == (7 + 1) * 576 * 2
    assert found["state_bytes_per_slot_per_rank"] == 20 * (3 * 32 * 128 * 3 * 2 + 32 * 128 * 128 * 4)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("index_dim", [0, 128])
@pytest.mark.parametrize(
    ("dtype", "row"), [("bf16", 1152), ("fp8_e4m3", 576), ("fp8_ds_mla", 656), ("fp4_e2m1", 288 + 36)]
)
def test_br_093_rows_of_every_format_have_their_bytes_at_every_tp(
    dtype: str, row: int, index_dim: int, tp: int
) -> None:
    config = {**CONFIGS["deepseek-v3"], "index_head_dim": index_dim}
    found = figures_of(read_config(config, name="m"), tp=tp, kv_dtype=dtype)
    assert found["kv_row_bytes"] == row
    assert found["kv_bytes_per_token_per_rank"] == 61 * (row + (132 if index_dim else 0))


def figures_of(shape: ModelShape, **more: Any) -> dict[str, Any]:
    return make_plan(Settings(model=shape, machine=B300, **more)).as_json()


@pytest.mark.parametrize("dtype", ["nvfp4_ds_mla", "int3", "fp8_with_scales"])
def test_br_093_a_format_that_is_not_known_is_an_error_and_no_guess(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_dtype = '{dtype}': expected one of .*fp8_ds_mla"):
        Settings(model=model("deepseek-v3"), machine=B300, kv_dtype=dtype)


def test_br_098_host_memory_is_counted_on_each_node_by_its_own_ranks() -> None:
    """Eight ranks over two nodes: four of them on each, all slots used, as many tokens as on one node."""
    found = {}
    for per_node in (4, 8):
        place = replace(B300, gpus_per_node=per_node)
        plan = make_plan(Settings(model=model("kimi-k3"), machine=place, tp=8), TierRequest(l2_bytes=80 * GIB))
        assert plan.ledger["l2_bytes_per_node"].value == per_node * 80 * GIB
        assert plan.ledger["physical_cores"].value == 2 + per_node
        found[per_node] = plan.tiers.held[0]
    assert found[4] == found[8]
    spread = make_plan(Settings(model=model("deepseek-v3"), machine=B300, tp=2, dp=16))
    assert spread.ledger["physical_cores"].value == 4 + 4 + 8 + 1  # four DP ranks on a node


GROUPS = {
    "pages": PagedGroup("pages", (0, 1), heads=2, head_dim=64, dtype="bfloat16"),
    "tiny": PagedGroup("tiny", (2,), heads=1, head_dim=1, dtype="int8"),
    "state": StateGroup("state", (3,), (StateField("temporal", (64, 130), "float32"),)),
    "small state": StateGroup("small state", (4,), (StateField("conv", (3,), "int8"),)),
}


@given(
    names=st.lists(st.sampled_from(sorted(GROUPS)), min_size=1, unique=True),
    l2_bytes=st.integers(1, 1 << 33),
    state_share=st.floats(0, 1),
    page_tokens=st.sampled_from([1, 4, 16, 33, 64, 528, 3584]),
)
def test_br_090_slots_never_take_more_than_was_given_and_leave_less_than_one_of_each(
    names: list[str], l2_bytes: int, state_share: float, page_tokens: int
) -> None:
    spec = CacheSpec("m", "1", tuple(GROUPS[name] for name in names), page_tokens=page_tokens)
    states = [isinstance(group, StateGroup) for group in spec.groups]
    try:
        counts = l2_slot_counts(spec, l2_bytes, state_share)
    except ConfigError as error:
        (minimum,) = re.findall(r"at least (\d+) bytes", str(error))
        assert l2_bytes < int(minimum)
        l2_slot_counts(spec, int(minimum), state_share)  # what it tells is enough
        return
    strides = [slot_stride(size) for size in spec.object_bytes]
    one_of_each = sum(stride for stride, is_state in zip(strides, states, strict=True) if not is_state or all(states))
    assert l2_bytes - one_of_each < l2_size_bytes(spec.rank(), counts) <= l2_bytes
    for kind, minimum_slots in ((False, PAGED_SLOTS_MIN), (True, STATE_SLOTS_MIN)):
        of_kind = {count for count, is_state in zip(counts, states, strict=True) if is_state is kind}
        assert len(of_kind) <= 1
        assert all(count >= minimum_slots for count in of_kind)


REPLICA = CacheSpec(
    "m",
    "1",
    (GROUPS["pages"], GROUPS["tiny"], GROUPS["state"], GROUPS["small state"]),
    tp_size=2,
    tp_lcm=2,
    pp_layers=(2, 2, 1),  # pages of one group | of the other, and a state | the other state alone
)


@given(l2_bytes=st.integers(1, 1 << 33), state_share=st.floats(0, 1))
def test_br_090_every_rank_of_a_replica_has_equally_many_slots_and_takes_no_more_than_was_given(
    l2_bytes: int, state_share: float
) -> None:
    try:
        counts = l2_slot_counts(REPLICA, l2_bytes, state_share)
    except ConfigError as error:
        (minimum,) = re.findall(r"at least (\d+) bytes", str(error))
        assert l2_bytes < int(minimum)
        l2_slot_counts(REPLICA, int(minimum), state_share)
        return
    assert counts[0] == counts[1] >= PAGED_SLOTS_MIN
    assert counts[2] == counts[3] >= STATE_SLOTS_MIN
    sizes = [l2_size_bytes(REPLICA.rank(rank), counts) for rank in range(6)]
    assert max(sizes) <= l2_bytes
    strides = [l2_strides(REPLICA.rank(rank)) for rank in range(6)]
    more_pages = [size + sum(stride[:2]) for size, stride in zip(sizes, strides, strict=True)]
    assert max(more_pages) > l2_bytes, "one page more would not fit on some rank"
