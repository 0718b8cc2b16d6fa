"""What bounds a plan, and the defaults that an operator gets: none may promise what an engine would not give."""

from __future__ import annotations

import pytest

from hicache.costs.machine import GIB, MACHINES, machine
from hicache.plan.capacity import work_out
from hicache.plan.hf_config import read_config
from hicache.plan.lengths import LengthMix
from hicache.plan.plan import make_plan
from hicache.plan.presets import CONFIGS, model
from hicache.plan.ratio import solve
from hicache.plan.settings import Settings
from hicache.plan.tiers import TierRequest

B300 = machine("b300-hgx")


def test_experts_are_on_all_gpus_whether_whole_or_cut() -> None:
    """Without expert parallelism each GPU has a part of every expert, not all of them."""
    for engine in ("sglang", "vllm"):
        base = {"model": model("deepseek-v3"), "machine": B300, "engine": engine, "tp": 8}
        cut, whole = (make_plan(Settings(**base, ep=ep)).ledger["weights_bytes_per_gpu"].value for ep in (1, 8))
        assert cut == whole < 100e9


def test_the_fraction_leaves_the_engines_headroom_on_every_machine() -> None:
    for place in MACHINES.values():
        for tp, dp in ((8, 1), (1, 8)):
            plan = make_plan(Settings(model=model("deepseek-v3"), machine=place, tp=tp, dp=dp))
            fraction, headroom = (plan.ledger[name].value for name in ("memory_fraction", "headroom_bytes"))
            assert place.gpu_bytes * (1 - fraction) >= headroom - place.gpu_bytes / 1000
            assert fraction <= 0.85
    assert (
        "memory_fraction"
        not in make_plan(Settings(model=model("llama-3-8b"), machine=B300, memory_fraction=0.9)).ledger
    )


def test_a_request_longer_than_the_context_is_infeasible_and_the_context_is_proposed() -> None:
    plan = make_plan(Settings(model=model("llama-3-8b"), machine=B300, context_tokens=4096))
    assert plan.capacity.bound_by == "context_tokens"
    assert plan.verdict == "infeasible: requests of up to 9,216 tokens are longer than the context of 4,096"
    assert plan.proposals[0].changes == ("--context-tokens 9216",)
    lengths = LengthMix.single(input_tokens=200_000, output_tokens=1)
    longer = make_plan(Settings(model=model("llama-3-8b"), machine=B300, lengths=lengths))
    assert [change for proposal in longer.proposals for change in proposal.changes] == [
        "prompts of at most 131071 tokens"
    ]


def test_vllm_runs_no_more_requests_than_its_default_of_sequences() -> None:
    short = LengthMix.single(input_tokens=16, output_tokens=1)
    for name, sequences in (("h100", 1024), ("a100", 256)):
        plan = make_plan(Settings(model=model("llama-3-8b"), machine=machine(name), engine="vllm", lengths=short))
        assert (plan.capacity.concurrent_requests, plan.capacity.bound_by) == (sequences, "engine")


def test_a_request_holds_no_more_of_a_window_than_the_window() -> None:
    plan = make_plan(Settings(model=model("gpt-oss-120b"), machine=B300))
    assert plan.ledger["kv_bytes_per_request"].value == 18 * 2048 * (8192 + 1024) + 18 * 2048 * (128 + 64)


def test_a_ratio_that_is_as_good_as_any_higher_one_is_one_that_can_be_set() -> None:
    speculative = {"draft_tokens": 4, "max_running_requests": 48}
    solved = solve(Settings(model=model("qwen3-next-80b"), machine=machine("h100"), tp=4, **speculative))
    assert solved is not None
    assert solved.lowest < solved.ratio < 10
    assert solved.span.endswith(" or more")
    assert (
        solve(Settings(model=model("kimi-k3"), machine=B300, tp=8, radix_cache=False, max_running_requests=8)) is None
    )


@pytest.mark.parametrize("page_tokens", [4, 7, 16, 64, 528, 3584])
@pytest.mark.parametrize("name", ["kimi-linear-48b", "gpt-oss-20b"])
def test_br_149_pages_need_no_common_multiple_with_windows_chunks_and_states(name: str, page_tokens: int) -> None:
    plan = make_plan(Settings(model=model(name), machine=B300, page_tokens=page_tokens), TierRequest(l2_bytes=80 * GIB))
    assert plan.is_feasible
    assert plan.capacity.kv_tokens % page_tokens == 0
    assert plan.tiers.held[0].tokens > 0


def test_a_draft_beside_an_indexer_is_on_each_dcp_rank() -> None:
    shape = read_config({**CONFIGS["deepseek-v3"], "index_head_dim": 128}, name="sparse")
    for dcp in (1, 2):
        settings = Settings(model=shape, machine=B300, tp=8, dcp=dcp, draft_layers=1)
        assert work_out(settings).kv.full_cell_bytes == 61 * 1152 + 1152 * dcp + (61 + 1) * 132 * dcp


def test_weights_of_no_head_are_on_each_rank() -> None:
    """MLA's ways into its latents and routers, in fp8: 61 x 7168 x (512 + 64 + 1536) and 58 x 7168 x 256."""
    copied = 61 * 7168 * (512 + 64 + 1536) + 58 * 7168 * 256
    weights = model("deepseek-v3").weights
    assert weights.copied_bytes == copied
    one, eight = (make_plan(Settings(model=model("deepseek-v3"), machine=B300, tp=tp)) for tp in (1, 8))
    share = (one.ledger["weights_bytes_per_gpu"].value - copied) / 8 + copied
    assert eight.ledger["weights_bytes_per_gpu"].value == pytest.approx(share, abs=1)
    staged = make_plan(Settings(model=model("deepseek-v3"), machine=B300, tp=8, pp=61))
    assert staged.ledger["weights_bytes_per_gpu"].value == pytest.approx(share / 61, abs=1)
