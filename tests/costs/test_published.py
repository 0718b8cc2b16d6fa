"""Published curves, by the cost model and the queueing engine: each with its source, and how far off it may be."""

from __future__ import annotations

import random

import pytest

from bench.admission.queueing import Arrival, Overlap, Queueing, QueueResult, Reads, run_queueing
from hicache.costs.machine import GB, Tier
from hicache.costs.model import ModelCosts, Prefill, PrefillTable
from hicache.costs.rigs import RIGS, rig

LLAMA = rig("llama-8b-h100").costs
LENGTHS = range(10_000, 100_001, 10_000)
FIG_1_COMPUTE_MS = (269, 635, 1095, 1658, 2297, 3020, 3855, 4794, 5743, 6851)
FIG_1_LOAD_MS = (43, 71, 100, 128, 156, 193, 222, 250, 278, 315)
FIG_2_HITS = tuple(number / 10 for number in range(1, 11))
FIG_2_KTOKENS_PER_S = (46.7, 52.0, 56.8, 64.6, 74.2, 89.2, 116.3, 158.8, 217.8, 389.4)
FIG_2_BASE = 43.7


# -- vLLM blog 2026-01-08, "Inside vLLM's New KV Offloading Connector": Llama-3.1-8B on an H100 ------------


def test_vllm_fig_1_recompute_is_reproduced_within_4_1_percent() -> None:
    errors = [LLAMA.prefill_s(0, n) * 1e3 / ms - 1 for n, ms in zip(LENGTHS, FIG_1_COMPUTE_MS, strict=True)]
    assert max(map(abs, errors)) <= 0.041
    assert min(errors) < 0 < max(errors), "it is not on one side of all points"


def test_vllm_fig_1_loads_are_reproduced_and_the_ratio_at_100k_is_the_published_22() -> None:
    errors = [LLAMA.load_s("L2", n) * 1e3 / ms - 1 for n, ms in zip(LENGTHS, FIG_1_LOAD_MS, strict=True)]
    assert max(map(abs, errors[1:])) <= 0.03
    assert abs(errors[0]) <= 0.08, "43 ms at 10k, which a straight line through the others misses by 3 ms"
    assert LLAMA.prefill_s(0, 100_000) / LLAMA.load_s("L2", 100_000) == pytest.approx(21.7, abs=0.5)


def throughput(hit_share: float, overlap: Overlap) -> float:
    """Thousand tokens a second of saturated prefills of 512 tokens, of which a share of prompts is in host memory: at
    the published speeds of both ends, 43.7 and 389.4."""
    costs = ModelCosts(
        Prefill(token_s=1 / (FIG_2_BASE * 1e3), pair_s=0.0),
        {"L2": Tier(bytes_per_s=FIG_2_KTOKENS_PER_S[-1] * 1e3)},
        token_bytes=1,
    )
    loaded = round(512 * hit_share)
    reads = Reads(0, (("L2", loaded),))
    how = Queueing(overlap=overlap, sessions=64, layers=10**6)
    return 1e-3 * tokens_per_s(run_queueing([Arrival(0.0, 512)] * 400, lambda number, now_s, wait_s: reads, costs, how))


def tokens_per_s(result: QueueResult) -> float:
    return result.prompt_tokens / result.span_s


def test_vllm_fig_2_is_reproduced_by_serial_loads_within_6_percent() -> None:
    errors = [throughput(hit, "serial") / known - 1 for hit, known in zip(FIG_2_HITS, FIG_2_KTOKENS_PER_S, strict=True)]
    assert max(map(abs, errors)) <= 0.06
    assert FIG_2_KTOKENS_PER_S[-1] / FIG_2_BASE == pytest.approx(8.9, abs=0.05)


def test_vllm_fig_2_rejects_ideal_overlap() -> None:
    known = FIG_2_KTOKENS_PER_S[FIG_2_HITS.index(0.9)]
    assert throughput(0.9, "layerwise") / known - 1 == pytest.approx(0.99, abs=0.05)


# -- Mooncake, FAST'25, Eq. 1 and 2 ------------


@pytest.mark.parametrize(("flops_per_s", "gb_per_s"), [(8 * 312e12, 5.86), (8 * 989e12, 18.57)])
def test_mooncake_eq_2_of_llama_70b_with_8k_reused_tokens(flops_per_s: float, gb_per_s: float) -> None:
    """8 x A800 and 8 x H800; the paper rounds to 6 and 19 GB/s. Eq. 1: flops(n) = layers (a n^2 d + b n d^2)."""
    layers, d, gqa, a, b, element_bytes = 80, 8192, 8, 4, 22, 2
    prefill = Prefill.roofline(parameters=layers * b * d**2 / 2, pair_flops=layers * a * d, flops_per_s=flops_per_s)
    costs = ModelCosts(prefill, {}, token_bytes=2 * layers * d * element_bytes // gqa)
    assert costs.break_even_bytes_per_s(8192) / 1e9 == pytest.approx(gb_per_s, abs=0.01)


# -- llm-d, P2P pulls ------------

P2P_MS = {2048: (78, 35), 8192: (250, 57), 16384: (510, 86), 32768: (1173, 165), 49152: (1988, 235)}


def test_llm_d_p2p_table_of_gpt_oss_120b_is_reproduced() -> None:
    costs = RIGS["gpt-oss-120b-h200"].costs
    for tokens, (compute_ms, pull_ms) in P2P_MS.items():
        computed_ms = 1e3 * (costs.prefill.fixed_s + costs.prefill_s(0, tokens))
        pulled_ms = 1e3 * costs.load_s("L3", tokens)
        assert computed_ms == pytest.approx(compute_ms, rel=0.08), tokens
        assert pulled_ms == pytest.approx(pull_ms, rel=0.13), tokens
        assert pulled_ms < computed_ms, "a pull wins from 2k on"
    assert 1 - pulled_ms / computed_ms == pytest.approx(0.88, abs=0.01), "-88 % at 48k"


def test_llm_d_p2p_crossover_of_glm_is_where_its_floor_is() -> None:
    """A pull floor of 1.2 s and 5.7 s for 45k tokens: the tie lies near 8.7k, -27 % at 12k, -61 % at 24k."""
    floor = Tier(bytes_per_s=1e15, latency_s=8700 * 5.7 / 45_000)
    costs = ModelCosts(Prefill(token_s=5.7 / 45_000, pair_s=0.0), {"L3": floor}, token_bytes=93_000)
    assert costs.break_even_tokens("L3", longest=100_000) == pytest.approx(8700, abs=10)
    assert floor.latency_s == pytest.approx(1.2, abs=0.15), "the published floor of 1.2 to 1.3 s"
    gains = {n: 1 - costs.load_s("L3", n) / costs.prefill_s(0, n) for n in (12_000, 24_000)}
    assert gains[12_000] == pytest.approx(0.27, abs=0.01)
    assert gains[24_000] == pytest.approx(0.61, abs=0.035)


# -- the constant break-even: 77.8 % of a prompt of 8k, 7.8 % of one of 80k (the owner's figures) ------------


@pytest.mark.parametrize(("gb_per_s", "fixed_ms"), [(6.0, 28), (10.0, 82), (13.5, 103)])
def test_the_break_even_is_the_same_6_2k_tokens_whatever_the_prompt(gb_per_s: float, fixed_ms: float) -> None:
    tier = Tier(bytes_per_s=gb_per_s * GB, latency_s=fixed_ms / 1e3)
    costs = ModelCosts(LLAMA.prefill, {"L3": tier}, LLAMA.token_bytes)
    fewest = costs.break_even_tokens("L3", longest=80_000)
    assert fewest is not None
    assert fewest == pytest.approx(6230, rel=0.02)
    for prompt, share in [(8_000, 0.778), (80_000, 0.078)]:
        assert fewest / prompt == pytest.approx(share, rel=0.02)
        saved_s = costs.prefill_s(0, prompt) - costs.prefill_s(fewest, prompt)
        assert saved_s == pytest.approx(costs.load_s("L3", fewest), rel=0.01), "the rest of the prompt does not matter"


@pytest.mark.parametrize(
    ("gb_per_s", "tokens"), [(43.5, 500), (13.5, 800), (6.9, 1900), (6.0, 3300)], ids=["dram", "2 ssd", "ssd", "6"]
)
def test_break_even_of_an_8b_model_on_an_h100_by_tier(gb_per_s: float, tokens: int) -> None:
    costs = ModelCosts(LLAMA.prefill, {"t": Tier(bytes_per_s=gb_per_s * GB, latency_s=0.010)}, LLAMA.token_bytes)
    assert costs.break_even_tokens("t", longest=100_000) == pytest.approx(tokens, abs=100)


def test_bandwidth_from_which_on_a_load_pays() -> None:
    for tokens, gb_per_s in [(1_000, 5.5), (8_000, 4.8), (80_000, 2.2)]:
        assert LLAMA.break_even_bytes_per_s(tokens) / 1e9 == pytest.approx(gb_per_s, abs=0.06)


# -- LMCache on GKE (Google Cloud blog, 2025-10-07), Llama-3.3-70B on 8 x H100: signs, not digits ------------

LLAMA_70B = Prefill.roofline(parameters=69e9, pair_flops=2 * 80 * 64 * 128, flops_per_s=8 * 400e12)
SSD = Tier(bytes_per_s=4.0 * GB, latency_s=0.010, shared=True)  # what a store on a local SSD reaches: a guess
DRAM = Tier(bytes_per_s=8 * 20 * GB, latency_s=0.010)  # of eight GPUs


def served(prompt_tokens: int, tier: Tier, *, hit_share: float, held_share: float = 0.0) -> QueueResult:
    """A shared beginning, 256 tokens of one's own and 512 out, from 12 clients: on average ``hit_share`` is below."""
    costs = ModelCosts(LLAMA_70B, {"L3": tier}, token_bytes=320 * 1024)
    held = round(prompt_tokens * held_share)
    reads = Reads(held, (("L3", round(prompt_tokens * hit_share)),) if hit_share else ())
    how = Queueing(overlap="ahead", sessions=12, decode_token_s=0.03)
    outputs = random.Random(1)  # of different lengths: else all clients would go in step
    arrivals = [Arrival(0.0, prompt_tokens + 256, outputs.randrange(256, 769)) for _ in range(400)]
    return run_queueing(arrivals, lambda number, now_s, wait_s: reads, costs, how)


def gain(prompt_tokens: int, tier: Tier, *, hit_share: float) -> tuple[float, float, float]:
    """TTFT, throughput and total time, as shares over those of computing everything."""
    read, computed = (served(prompt_tokens, tier, hit_share=share) for share in (hit_share, 0.0))
    return (
        sum(read.ttft_s) / sum(computed.ttft_s) - 1,
        tokens_per_s(read) / tokens_per_s(computed) - 1,
        sum(read.total_s) / sum(computed.total_s) - 1,
    )


def test_gke_ttft_gets_worse_while_throughput_and_total_time_get_better() -> None:
    """10k tokens from SSD: +121 % TTFT, +23 % throughput, -19 % end to end."""
    ttft, throughput_gain, total = gain(10_000, SSD, hit_share=0.85)
    assert ttft > 0.5
    assert throughput_gain > 0.1
    assert total < -0.1


def test_gke_all_get_better_with_long_prompts_from_host_memory() -> None:
    """100k tokens that fit host memory: -79 % TTFT, +264 % throughput, -73 % end to end."""
    ttft, throughput_gain, total = gain(100_000, DRAM, hit_share=0.9)
    assert ttft < -0.5
    assert throughput_gain > 1.0
    assert total < -0.5


def test_gke_nothing_is_gained_where_the_gpu_has_it() -> None:
    """1.1 to 1.3 M tokens: HBM alone is best."""
    alone = served(10_000, SSD, hit_share=0.0, held_share=0.9)
    read = served(10_000, SSD, hit_share=0.9)
    assert sum(alone.ttft_s) < sum(read.ttft_s)
    assert tokens_per_s(alone) >= tokens_per_s(read)


# -- agentic-kvc, H20, Qwen3-30B-A3B: a table in place of a formula ------------


def test_a_measured_table_gives_its_points_and_rises_between_them() -> None:
    table = PrefillTable(tuple((n, ms / 1e3) for n, ms in zip(LENGTHS, FIG_1_COMPUTE_MS, strict=True)))
    for tokens, ms in zip(LENGTHS, FIG_1_COMPUTE_MS, strict=True):
        assert table.fixed_s + table.seconds(0, tokens) == pytest.approx(ms / 1e3)
    assert table.seconds(0, 25_000) == pytest.approx((0.635 + 1.095) / 2 - table.fixed_s)
    costs = RIGS["qwen3-30b-h20"].costs
    assert costs.prefill_s(0, 65_536) / costs.load_s("L2", 65_536) > 56, "up to 56 times, with its own overheads"
