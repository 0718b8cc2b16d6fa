"""The plan as a whole: each figure explains itself, what is infeasible says so, and traps are named."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.costs.machine import GIB, machine
from hicache.errors import ConfigError
from hicache.plan import capacity, formulas, nearest
from hicache.plan.formula import FUNCTIONS, Formula, Ledger
from hicache.plan.hf_config import read_config
from hicache.plan.lengths import LengthMix, requests_that_fit, tokens_needed
from hicache.plan.nearest import Proposal, wanted
from hicache.plan.plan import Plan, make_plan
from hicache.plan.presets import CONFIGS, model
from hicache.plan.ratio import solve
from hicache.plan.report import explain_lines
from hicache.plan.settings import Settings
from hicache.plan.tiers import TierRequest

B300 = machine("b300-hgx")
NAMES = (
    "kv_bytes_per_token_per_rank",
    "state_bytes_per_slot_per_rank",
    "conv_bytes_per_slot_per_rank",
    "ssm_bytes_per_slot_per_rank",
    "slots_per_request",
    "state_slots",
    "kv_tokens",
    "max_running_requests",
    "bound_by",
    "replay_ring_bytes",
    "weights_bytes_per_gpu",
)


def plan_of(name: str, **more: Any) -> Plan:
    tiers = more.pop("tiers", None)
    return make_plan(Settings(model=model(name), machine=B300, **{"tp": 8, **more}), tiers)


def many_plans() -> Iterator[Plan]:
    for name in CONFIGS:
        yield plan_of(name)
        yield plan_of(name, engine="vllm", page_tokens=16)
    yield plan_of("kimi-k3", draft_tokens=8, draft_layers=1, replay_ring=True, max_running_requests=64, pp=4, dcp=4)
    yield plan_of("qwen3-next-80b", tp=2, draft_tokens=4, replay_ring=True, max_running_requests=64)
    yield plan_of("qwen3-next-80b", tp=2, dp=4, draft_tokens=4, max_running_requests=64, radix_cache=False)
    yield plan_of("deepseek-v3", kv_dtype="fp8_ds_mla", fraction_of="free")
    yield plan_of("deepseek-v3", kv_dtype="fp4_e2m1", tiers=TierRequest(l2_bytes=90 * GIB, l3_bytes=10**13))
    yield plan_of("qwen3-235b", kv_dtype="fp4_e2m1")
    yield plan_of("kimi-k3", state_slots=500, tp=4, dp=2)
    yield plan_of("kimi-k3", draft_tokens=4, max_running_requests=16)


PLANS = list(many_plans())


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.settings.model.name}-{plan.settings.engine}")
def test_the_explanation_of_a_figure_is_arithmetic_that_gives_it(plan: Plan) -> None:
    for figure in plan.ledger.values():
        shown = eval(figure.numbers, {"__builtins__": {}}, dict(FUNCTIONS))
        assert shown == pytest.approx(figure.value, rel=1e-12), figure
        value, *rest = explain_lines(figure)
        assert value.startswith(f"{figure.name} = {figure.value!r} {figure.formula.unit}, per ")
        assert rest[-1].strip() == figure.formula.source


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.settings.model.name}-{plan.settings.engine}")
def test_the_json_has_its_names_with_unit_and_scope(plan: Plan) -> None:
    found = json.loads(json.dumps(plan.as_json()))
    for name in NAMES:
        assert name in found
        if name not in ("bound_by", "max_running_requests"):
            assert found["figures"][name]["value"] == found[name]
            assert found["figures"][name]["unit"]
            assert found["figures"][name]["scope"]
            assert found["figures"][name]["source"]
    assert found["bound_by"] in found["limits"]


def test_every_formula_is_used_and_names_its_source() -> None:
    every = {value for value in vars(formulas).values() if isinstance(value, Formula)}
    used = {figure.formula.text for plan in PLANS for figure in plan.ledger.values()}
    elsewhere = {
        "prefill_s",
        "load_s",
        "write_bytes_per_s",
        "drive_writes_per_day",
        "index_row_bytes",
    }  # see test_tiers
    assert {formula.figure for formula in every if formula.text not in used} <= elsewhere
    assert all(formula.source and formula.unit and formula.names for formula in every)


def test_an_infeasible_request_names_the_bound_and_what_would_do() -> None:
    """BR-096: the planner says so before anything is started, with the concurrency and the lengths that fit."""
    plan = plan_of("kimi-k3", concurrency=100)
    assert not plan.is_feasible
    assert plan.verdict.startswith("infeasible: 72 requests of these lengths")
    changes = [proposal.changes for proposal in plan.proposals]
    assert any("--concurrency" in change[0] for change in changes)
    assert any("prompts of at most" in change[0] for change in changes)
    assert changes[0][0].startswith("--")


FIELDS = {
    "--strategy": "strategy",
    "--kv-dtype": "kv_dtype",
    "--state-dtype": "state_dtype",
    "--dcp": "dcp",
    "--tp": "tp",
    "--pp": "pp",
    "--ratio": "ratio",
    "--state-slots": "state_slots",
    "--concurrency": "concurrency",
    "--max-running-requests": "max_running_requests",
    "--skip-decode-lock": "skip_decode_lock",
    "--replay-ring": "replay_ring",
}


def applied(proposal: Proposal, original: dict[str, Any]) -> dict[str, Any]:
    """The settings that a proposal's flags stand for."""
    changed = dict(original)
    for change in proposal.changes:
        flag, _, value = change.partition(" ")
        if change.startswith("prompts of at most "):
            tokens = int(change.split()[4])
            changed["lengths"] = LengthMix.single(input_tokens=tokens, output_tokens=1024)
        elif flag in FIELDS:
            name = FIELDS[flag]
            whole = name in ("dcp", "tp", "pp", "state_slots", "concurrency", "max_running_requests")
            changed[name] = True if not value else int(value) if whole else float(value) if name == "ratio" else value
        else:
            changed["rest_bytes"] = math.ceil(float(change.split()[0]) * GIB)
    return changed


@pytest.mark.parametrize(
    "asked",
    [
        {"concurrency": 150},
        {"concurrency": 1000},
        {"tp": 1},
        {"rest_bytes": 10**8},
        {"draft_tokens": 4, "max_running_requests": 16, "concurrency": 60},
        {"lengths": LengthMix.single(input_tokens=10**6, output_tokens=1024), "concurrency": 8},
    ],
    ids=str,
)
def test_every_proposal_does_what_it_says(asked: dict[str, Any]) -> None:
    plan = plan_of("kimi-k3", **asked)
    assert not plan.is_feasible
    assert plan.proposals
    for proposal in plan.proposals:
        fields = applied(proposal, {"tp": 8, **asked})
        again = Settings(model=model("kimi-k3"), machine=B300, **fields)
        assert capacity.work_out(again).concurrent_requests >= wanted(again), proposal


def test_a_search_for_proposals_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capacity is some tens of formulas: a few thousand of them stay well under a second."""
    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return capacity.work_out(*arguments)

    monkeypatch.setattr(nearest, "work_out", counted)
    assert not plan_of("kimi-k3", tp=1, concurrency=10**4).proposals  # the longest search: nothing is found
    assert 0 < calls < 2500


def test_weights_that_do_not_fit_are_said_to_be_what_is_missing() -> None:
    plan = plan_of("kimi-k3", tp=1)
    assert "weights leave no memory, 1160.9 GiB are missing on each GPU" in plan.verdict
    assert plan.capacity.bound_by == "weights"


def test_the_solved_ratio_is_no_worse_than_any_other() -> None:
    mix = LengthMix.parse("2048:0.5,16384:0.3,131072:0.2", output_tokens=700)
    for name, tp in (("kimi-k3", 8), ("qwen3-next-80b", 2), ("kimi-linear-48b", 2)):
        base = {"model": model(name), "machine": B300, "tp": tp, "lengths": mix}
        solved = solve(Settings(**base))
        assert solved is not None
        found = {
            ratio: capacity.work_out(Settings(**base, ratio=ratio)).concurrent_requests
            for ratio in [
                solved.ratio,
                solved.lowest * 1.0001,
                solved.highest * 0.9999,
                *(0.01 * 1.1**i for i in range(80)),
            ]
        }
        assert found[solved.ratio] == solved.requests == max(found.values())
        assert [found[solved.lowest * 1.0001], found[solved.highest * 0.9999]] == [solved.requests] * 2
        assert capacity.work_out(Settings(**base, ratio=solved.highest * 1.05)).concurrent_requests < solved.requests


def test_a_ratio_that_starves_requests_of_state_is_warned_of() -> None:
    """The operators' trap: 16 requests, with a small part of the KV pool used."""
    plan = plan_of("kimi-k3", state_dtype="bfloat16", kv_dtype="fp8", state_slots=80)
    assert plan.capacity.concurrent_requests == 16
    [warning] = [sentence for sentence in plan.warnings if sentence.startswith("state slots bind: 16 requests")]
    assert "use 5% of its KV tokens: ratio 1.1" in warning
    solved = make_plan(plan.settings, solve_ratio=True)
    assert solved.capacity.concurrent_requests > 9 * 16
    assert not any(sentence.startswith("state slots bind") for sentence in solved.warnings)


def warned(plan: Plan, text: str) -> bool:
    return any(text in sentence for sentence in plan.warnings)


@pytest.mark.parametrize(
    ("text", "near", "far"),
    [
        ("only mirrors", {"tiers": TierRequest(l2_bytes=8 * GIB)}, {"tiers": TierRequest(l2_bytes=80 * GIB)}),
        ("is divided by dp = 4", {"tp": 2, "dp": 4}, {"tp": 8}),
        ("8 copies of each token", {}, {"dcp": 8}),
        ("13.9 % more", {"kv_dtype": "fp8"}, {"kv_dtype": "fp8_ds_mla"}),
        ("the memory fraction 0.85 is of total memory", {}, {"rest_bytes": 30 * GIB}),
        (
            "vLLM sets its block size to 5760 tokens",
            {"engine": "vllm", "tp": 1, "rest_bytes": 30 * GIB},
            {"engine": "vllm", "tp": 8},
        ),
        ("'GPU KV cache size: ", {"engine": "vllm"}, {}),
        ("SGLang will log max_total_num_tokens=", {}, {"engine": "vllm"}),
        ("nothing is reserved for them", {"engine": "vllm"}, {"engine": "vllm", "reserved_bytes": GIB}),
        ("nothing is reserved for them", {"engine": "vllm"}, {}),
    ],
)
def test_a_known_trap_is_warned_of_where_it_is_near(text: str, near: dict[str, Any], far: dict[str, Any]) -> None:
    assert warned(plan_of("kimi-k3", **near), text)
    assert not warned(plan_of("kimi-k3", **far), text)


def test_the_sheet_and_the_cores_of_a_machine_are_warned_of() -> None:
    sheet = make_plan(Settings(model=model("kimi-k3"), machine=machine("b300-sheet"), tp=8))
    assert warned(sheet, "an HGX board 270 GB")
    for cores, is_warned in ((16, True), (17, False)):
        small = replace(B300, physical_cores=cores)
        plan = make_plan(Settings(model=model("deepseek-v3"), machine=small, tp=2, dp=4))
        assert warned(plan, "17 physical cores") is is_warned


def test_a_model_without_attention_is_bound_by_its_states() -> None:
    config = {"model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 2560, "num_heads": 80, "head_dim": 64}
    shape = read_config({**config, "n_groups": 1, "state_size": 128, "conv_kernel": 4}, name="m")
    slot = 64 * ((80 * 64 + 2 * 128) * 3 * 2 + 80 * 64 * 128 * 4)
    tiers = TierRequest(l2_bytes=8 * GIB)
    for engine, slots, each in (
        ("sglang", int(20 * GIB * 0.9 / 1.9) // slot - 1, 5),
        ("vllm", 20 * GIB // slot - 1, 2),
    ):
        plan = make_plan(Settings(model=shape, machine=B300, engine=engine, rest_bytes=20 * GIB), tiers)
        assert plan.ledger["state_bytes_per_slot_per_rank"].value == slot
        assert plan.ledger["state_slots"].value == slots
        assert plan.capacity.concurrent_requests == slots // each
        assert plan.capacity.bound_by == "state_slots"
        [held] = plan.tiers.held
        assert held.tokens == 8 * GIB // slot * 8192  # a slot is whole pages of memory here


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 93"):
        plan_of("kimi-k3", pp=94)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tp": 7}, "tp = 7"),
        ({"dcp": 3}, "dcp = 3"),
        ({"ep": 3}, "ep = 3"),
        ({"kv_dtype": "fp7"}, "kv_dtype = 'fp7'"),
        ({"state_dtype": "fp8"}, "state_dtype = 'fp8'"),
        ({"memory_fraction": 1.2}, "memory_fraction = 1.2"),
        ({"ratio": 0}, "ratio = 0"),
        ({"draft_tokens": 4}, "max_running_requests = None"),
        ({"replay_ring": True}, "replay_ring = True"),
        ({"strategy": "extra_buffer_lazy", "overlap": False}, "strategy = 'extra_buffer_lazy'"),
        ({"strategy": "buffers"}, "strategy = 'buffers'"),
        ({"concurrency": 0}, "concurrency = 0"),
        ({"page_tokens": True}, "page_tokens = True"),
        ({"engine": "llama.cpp"}, "engine = 'llama.cpp'"),
    ],
)
def test_settings_that_cannot_be_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Settings(model=model("kimi-k3"), machine=B300, **{"tp": 8, **fields})
    assert str(raised.value).startswith(named)


def test_packed_rows_of_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="the packed format is for MLA"):
        Settings(model=model("qwen3-235b"), machine=B300, kv_dtype="fp8_ds_mla")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**7), st.floats(1, 10**6), st.floats(0, 10**6))
def test_requests_that_fit_are_the_most(tokens: int, mean: float, deviation: float) -> None:
    count = requests_that_fit(tokens, mean, deviation)
    assert count == 0 or tokens_needed(count, mean, deviation) <= tokens
    assert tokens_needed(count + 1, mean, deviation) > tokens


def test_a_mix_counts_long_decodes_more_often() -> None:
    mix = LengthMix(((1000, 100, 1.0), (3000, 300, 1.0)))
    mean, deviation = mix.held_tokens(page_tokens=1)
    assert mean == pytest.approx((1100 * 100 + 3300 * 300) / 400)
    assert deviation == pytest.approx(2200 * math.sqrt(0.25 * 0.75))
    assert mix.mean_input_tokens == 2000
    assert LengthMix.of_requests([(5, 1), (5, 1), (7, 2)]).requests == ((5, 1, 2.0), (7, 2, 1.0))


@pytest.mark.parametrize("text", ["", "8192", "8192:x", "0:1", "8192:0", "8192:-1", "8192:inf"])
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        LengthMix.parse(text, output_tokens=1)


def test_a_formula_refuses_numbers_that_it_does_not_know() -> None:
    with pytest.raises(AssertionError, match="dp"):
        Ledger().work_out(formulas.CHUNK_PER_DP, chunk_tokens=1)
