"""What the planner says of every sizing fact that was published or measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hicache.costs.machine import GIB, MACHINES, machine
from hicache.plan import formulas
from hicache.plan.capacity import work_out
from hicache.plan.formula import Ledger, evaluate
from hicache.plan.lengths import LengthMix
from hicache.plan.model import pipeline_stages, stage_counts
from hicache.plan.plan import Plan, make_plan
from hicache.plan.presets import model
from hicache.plan.settings import Settings
from hicache.plan.sizes import StateSizes, kv_sizes, memory_fraction, state_sizes
from hicache.plan.state_pool import share_memory
from hicache.spec import CacheSpec, PagedGroup

FACTS = json.loads((Path(__file__).parent / "planner_facts.json").read_text())
K3, MIB = FACTS["kimi_k3"], 2**20
B300 = machine("b300-hgx")


def k3(**settings: Any) -> Settings:
    return Settings(model=model("kimi-k3"), machine=B300, **{"tp": 8, "state_dtype": "bfloat16", **settings})


def fact(name: str) -> dict[str, Any]:
    """As it was published."""
    return next(found for found in [*K3["facts"], *FACTS["other"]] if found["id"] == name)


def figures(settings: Settings) -> dict[str, Any]:
    """The planner's JSON."""
    return make_plan(settings).as_json()


def with_slots(slots: int, **settings: Any) -> Plan:
    return make_plan(k3(state_slots=slots, **settings))


def pool_gib(plan: Plan, name: str) -> float:
    """GiB of all slots and the one for padding."""
    return float((plan.ledger["state_slots"].value + 1) * plan.ledger[name].value / GIB)


def k3_8() -> dict[str, float]:
    plan = with_slots(51, state_dtype="float32")
    return {
        "conv_gib": pool_gib(plan, "conv_bytes_per_slot_per_rank"),
        "ssm_gib": pool_gib(plan, "ssm_bytes_per_slot_per_rank"),
    }


def k3_9() -> dict[str, float]:
    plan = with_slots(80, kv_dtype="fp8_e4m3")
    return {
        "conv_gib": pool_gib(plan, "conv_bytes_per_slot_per_rank"),
        "ssm_gib": pool_gib(plan, "ssm_bytes_per_slot_per_rank"),
    }


def k3_10() -> dict[str, dict[str, float]]:
    """Tokens of a KV pool of the bytes that were logged: what is left for it beside the slots that were logged."""
    found = {}
    for name, dtype, state_dtype, slots in (("bf16", "bf16", "float32", 51), ("fp8", "fp8", "bfloat16", 80)):
        pool = int(fact("K3-10")["given"][name]["gib"] * GIB)
        states = with_slots(slots, state_dtype=state_dtype).ledger["state_pool_bytes"].value
        plan = with_slots(slots, state_dtype=state_dtype, kv_dtype=dtype, rest_bytes=pool + int(states))
        found[name] = {
            "gib": plan.ledger["kv_pool_bytes"].value / GIB,
            "tokens": plan.ledger["kv_tokens"].value,
        }
    return found


def k3_11() -> dict[str, int]:
    def running(**settings: Any) -> int:
        return int(with_slots(80, **settings).as_json()["max_running_requests"])

    return {
        "extra_buffer": running(),
        "extra_buffer_lazy": running(strategy="extra_buffer_lazy"),
        "extra_buffer_skip_decode_lock": running(skip_decode_lock=True),
    }


def k3_13() -> dict[str, list[float]]:
    found = {}
    for tokens in (8192, 32768, 131072):
        lengths = LengthMix.single(input_tokens=tokens, output_tokens=0)
        plan = figures(k3(kv_dtype="fp8_e4m3", strategy="extra_buffer_lazy", lengths=lengths))
        kv, state = plan["kv_bytes_per_request"], plan["state_bytes_per_request"]
        found[str(tokens)] = [kv / MIB, state / MIB, (kv + state) / MIB]
    return found


def k3_14() -> float:
    lengths = LengthMix.single(input_tokens=32768, output_tokens=0)
    settings = k3(kv_dtype="fp8_e4m3", strategy="extra_buffer_lazy", lengths=lengths)
    return float(figures(settings)["bytes_per_request"] / GIB)


def k3_15() -> dict[str, float]:
    state = evaluate(formulas.STATE_BUDGET, {"rest_bytes": 1, "ratio": 0.75})
    return {"state": state, "kv": 1 - state}


def k3_experts(name: str, gpus: tuple[int, ...]) -> dict[str, float]:
    return {str(count): figures(k3(tp=8, dp=count // 8))[name] for count in gpus}


def k3_16() -> dict[str, float]:
    return {name: value / 1e9 for name, value in k3_experts("weights_bytes_per_gpu", (8, 16, 32, 64)).items()}


def k3_19() -> list[int]:
    shape = model("kimi-k3")
    return stage_counts(shape.state_layers, pipeline_stages(shape.layer_count, 8))


def staged_slots(budget_bytes: int, *, pp: int, ratio: float = 0.75) -> int:
    """Slots of the pool out of a budget for state and KV together, with the charge of the largest stage."""
    settings = k3(tp=1, pp=pp, state_dtype="float32", rest_bytes=budget_bytes, ratio=ratio)
    return work_out(settings).pools.state_slots


def k3_20() -> list[int]:
    budget = next(b for b in range(GIB, 80 * GIB, GIB // 4) if staged_slots(b, pp=1) == fact("K3-20")["given"][0])
    return [staged_slots(budget, pp=1), staged_slots(budget, pp=8)]


def k3_21() -> list[int]:
    found = []
    for slots in fact("K3-20")["given"]:
        settings = k3(tp=1, pp=8, state_slots=slots, strategy="extra_buffer_lazy", rest_bytes=60 * GIB)
        found.append(figures(settings)["max_running_requests"])
    return found


def micro_batches(budget_bytes: int, *, largest_share: bool) -> set[int]:
    """The micro batch of each of 8 stages: with the charge of the largest stage, or with each stage's own."""
    settings = k3(tp=1, pp=8, state_dtype="float32", rest_bytes=budget_bytes, ratio=0.75)
    sizes = state_sizes(settings, Ledger())
    shape = settings.model
    counts = stage_counts(shape.state_layers, pipeline_stages(shape.layer_count, 8))
    budget = evaluate(formulas.STATE_BUDGET, {"rest_bytes": budget_bytes, "ratio": 0.75})
    batches = set()
    for count in counts:
        charged = max(counts) if largest_share else count
        slot = sizes.all_stages_bytes // len(shape.state_layers) * charged
        numbers = {"budget_bytes": budget, "fixed_bytes": 0, "slot_bytes": slot, "ring_bytes": 0}
        batches.add(max(1, evaluate(formulas.SLOTS_BY_RATIO, numbers) // 4 // 8))
    return batches


def k3_22() -> dict[str, int]:
    budgets = [quarter * GIB // 4 for quarter in range(16, 161)]
    assert len(budgets) == 145
    for budget in budgets:  # the planner's own answer is that of the largest share, at every budget
        requests = staged_slots(budget, pp=8) // 4
        assert micro_batches(budget, largest_share=True) == {max(1, requests // 8)}
    return {
        "own_stage_share": sum(len(micro_batches(budget, largest_share=False)) > 1 for budget in budgets),
        "max_stage_share": sum(len(micro_batches(budget, largest_share=True)) > 1 for budget in budgets),
    }


def k3_23() -> bool:
    """A state of its own: conv (4096, 3) in bf16 and temporal (64, 128, 128) in float32, in K3's layers."""
    shape = model("kimi-k3")
    per_layer, layers = 4096 * 3 * 2 + 64 * 128 * 128 * 4, len(shape.state_layers)
    slots = {}
    for pp in (1, 8):
        share = max(stage_counts(shape.state_layers, pipeline_stages(shape.layer_count, pp))) / layers
        sizes = StateSizes(per_layer * layers, share, int(per_layer * layers * share), 0, True)
        settings = k3(tp=1, pp=pp, ratio=0.5)
        slots[pp] = share_memory(settings, sizes, 8 * GIB, Ledger()).state_slots
    return slots[8] > 5 * slots[1]


def o_1() -> dict[str, int]:
    names = {"bf16": "bfloat16", "fp8_plain": "fp8_e4m3", "fp8_ds_mla": "fp8_ds_mla"}
    r1 = Settings(model=model("deepseek-r1"), machine=B300)
    return {name: kv_sizes(replace(r1, kv_dtype=dtype), Ledger()).row_bytes for name, dtype in names.items()}


def o_2() -> dict[str, int]:
    names = {"bf16": "bfloat16", "fp8_plain": "fp8_e4m3", "fp8_ds_mla": "fp8_ds_mla"}
    r1 = Settings(model=model("deepseek-r1"), machine=B300)
    return {name: figures(replace(r1, kv_dtype=dtype))["kv_bytes_per_token_per_rank"] for name, dtype in names.items()}


def o_6() -> dict[str, float]:
    def tokens(dtype: str) -> int:
        settings = Settings(model=model("qwen3-235b"), machine=B300, kv_dtype=dtype, rest_bytes=40 * GIB, page_tokens=1)
        return int(figures(settings)["kv_tokens"])

    return {"bf16": tokens("fp4_e2m1") / tokens("bfloat16"), "fp8": tokens("fp4_e2m1") / tokens("fp8_e4m3")}


def requests_at_136k(rest_gb: float) -> int:
    """One page a token, and all requests alike; GB as engines log them, which are GiB."""
    lengths = LengthMix.single(input_tokens=136_000, output_tokens=0)
    r1 = Settings(
        model=model("deepseek-r1"),
        machine=machine("gb200-nvl72"),
        kv_dtype="fp8_e4m3",
        rest_bytes=int(rest_gb * GIB),
        page_tokens=1,
        lengths=lengths,
    )
    return int(figures(r1)["concurrent_requests"])


def o_7() -> int:
    return int(figures(Settings(model=model("deepseek-v3"), machine=B300, tp=2, dp=4))["physical_cores"])


def o_9() -> int:
    """Slices in which TP4 and TP8 replicas share heads."""
    group = PagedGroup("kv", (0,), heads=8, head_dim=128, dtype="bfloat16")
    counts = {
        tp: CacheSpec(model="m", revision="r", groups=(group,), tp_size=tp, tp_lcm=8).slice_counts[0] for tp in (4, 8)
    }
    assert set(counts.values()) == {8}
    return counts[4]


def o_10() -> bool:
    settings = Settings(
        model=model("llama-3-8b"), machine=machine("h100"), engine="vllm", page_tokens=16, context_tokens=8192
    )
    plan = make_plan(settings)
    blocks = plan.ledger["kv_blocks"].value + 1
    logged = plan.ledger["logged_kv_cache_tokens"].value
    warned = [sentence for sentence in plan.warnings if "GPU KV cache size" in sentence and "no promise" in sentence]
    return logged == int(blocks / (8192 // 16) * 8192) and len(warned) == 1


def o_11() -> dict[str, float]:
    return {"gb300": requests_at_136k(216 - 40), "gb200_pool_gb": 104, "gb200": requests_at_136k(104)}


def o_13() -> bool:
    """The same share of all memory and of free memory leave different rests."""
    base = Settings(model=model("llama-3-70b"), machine=machine("h200"), tp=2, memory_fraction=0.92, engine="vllm")
    total, free = work_out(base).rest_bytes, work_out(replace(base, fraction_of="free")).rest_bytes
    weights = figures(base)["weights_bytes_per_gpu"]
    assert memory_fraction(Settings(model=base.model, machine=base.machine, engine="vllm"), Ledger()) == 0.92
    assert total == int(149e9 * 0.92 - weights)
    assert free == int((149e9 - weights) * 0.92)
    return free > total


GOT: dict[str, Callable[[], Any]] = {
    "K3-1": lambda: figures(k3())["kv_bytes_per_token_per_rank"],
    "K3-2": lambda: figures(k3(kv_dtype="fp8_e4m3"))["kv_bytes_per_token_per_rank"],
    "K3-3": lambda: figures(k3())["ssm_bytes_per_slot_per_rank"],
    "K3-4": lambda: figures(k3())["conv_bytes_per_slot_per_rank"],
    "K3-5": lambda: figures(k3())["state_bytes_per_slot_per_rank"],
    "K3-6": lambda: 8 * figures(k3())["state_bytes_per_slot_per_rank"],
    "K3-7": lambda: 100 * 8 * figures(k3(radix_cache=False))["state_bytes_per_request"],
    "K3-8": k3_8,
    "K3-9": k3_9,
    "K3-10": k3_10,
    "K3-11": k3_11,
    "K3-12": lambda: figures(k3(chunk_tokens=6144, lengths=LengthMix.single(input_tokens=13600, output_tokens=512)))[
        "states_stored_per_request"
    ],
    "K3-13": k3_13,
    "K3-14": k3_14,
    "K3-15": k3_15,
    "K3-16": k3_16,
    "K3-17": lambda: k3_experts("expert_ranks_per_token", (16, 32, 64)),
    "K3-18": lambda: k3_experts("expert_ranks_on_other_nodes", (16, 32, 64)),
    "K3-19": k3_19,
    "K3-20": k3_20,
    "K3-21": k3_21,
    "K3-22": k3_22,
    "K3-23": k3_23,
    "K3-24": lambda: figures(k3(draft_tokens=8, replay_ring=True, max_running_requests=8))["replay_ring_depth"],
    "O-1": o_1,
    "O-2": o_2,
    "O-3": lambda: o_1()["fp8_ds_mla"] / o_1()["fp8_plain"] - 1,
    "O-4": lambda: figures(Settings(model=model("qwen3-235b"), machine=B300))["kv_bytes_per_token_per_rank"],
    "O-5": lambda: figures(Settings(model=model("qwen3-235b"), machine=B300, tp=8))["kv_heads_per_rank"],
    "O-6": o_6,
    "O-7": o_7,
    "O-8": lambda: figures(Settings(model=model("deepseek-v3"), machine=B300, dp=8, chunk_tokens=49152))[
        "chunk_tokens_per_rank"
    ],
    "O-9": o_9,
    "O-10": o_10,
    "O-11": o_11,
    "O-12": lambda: [MACHINES[name].gpu_gb for name in ("b300-sheet", "b300-nvl72", "b300-hgx")],
    "O-13": o_13,
}
