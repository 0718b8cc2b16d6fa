"""Rigs whose times were published, each with its source: what a replay is priced with."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.costs.machine import GB, Tier
from hicache.costs.model import ModelCosts, Prefill, PrefillTable
from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rig:
    """A model on a machine. Tier names are those of the replayer: L2 is host memory, L3 what is below or beside it."""

    name: str
    costs: ModelCosts
    source: str


_LLAMA_8B_FLOPS = 13.96e9 / 2  # active parameters without embeddings
_LLAMA_8B_PAIR_FLOPS = 2 * 32 * 32 * 128  # layers, query heads, head size
_LLAMA_8B_BYTES = 2 * 32 * 8 * 128 * 2
_LLAMA_8B = Prefill.roofline(parameters=_LLAMA_8B_FLOPS, pair_flops=_LLAMA_8B_PAIR_FLOPS, flops_per_s=593e12)
_DRAM = Tier(bytes_per_s=43.5 * GB, latency_s=0.010)

RIGS = {
    rig.name: rig
    for rig in (
        Rig(
            "llama-8b-h100",
            ModelCosts(
                _LLAMA_8B,
                {"L2": _DRAM, "L3": Tier(bytes_per_s=6.9 * GB, latency_s=0.010, shared=True)},
                _LLAMA_8B_BYTES,
            ),
            "vLLM blog, 'Inside vLLM's New KV Offloading Connector' (2026-01-08), Fig. 1: 593 TFLOP/s, 43.5 GB/s and"
            " 10 ms fitted to it; L3: the peak of one SSD in the PegaFlow post",
        ),
        Rig(
            "gpt-oss-120b-h200",
            ModelCosts(
                Prefill(token_s=2.485e-5, pair_s=3.075e-10, fixed_s=0.0248),
                {"L3": Tier(bytes_per_s=73_728 / 4.316e-6, latency_s=0.0219)},
                73_728,  # 36 layers, 8 heads of 64, keys and values, bf16: only its quotient with the bandwidth counts
            ),
            "llm-d, P2P pulls: both fitted to its table of recompute and pull times",
        ),
        Rig(
            "qwen3-30b-h20",
            ModelCosts(
                PrefillTable(((1024, 0.078), (65536, 15.2))),
                {"L2": Tier(bytes_per_s=54 * GB, latency_s=0.015)},
                98_304,  # 48 layers, 4 heads of 128, keys and values, bf16
            ),
            "agentic-kvc, H20 and vLLM 0.18.1: misses of 1k and 64k tokens, host to device at 54 GB/s, and what a hit"
            " in host memory takes more than one in the GPU at 1k",
        ),
    )
}


def rig(name: str) -> Rig:
    """A rig by name. Raises ConfigError."""
    if name not in RIGS:
        raise ConfigError("hardware", name, f"one of {', '.join(RIGS)}")
    return RIGS[name]
