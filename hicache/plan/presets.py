"""Built-in models: the fields of their published `config.json` that sizes follow from, read as any other config is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hicache.errors import ConfigError
from hicache.plan.hf_config import load_config, read_config
from hicache.plan.model import ModelShape, Weights


def _kda(layer_count: int, last: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Kimi's pattern, counted from 1: the fourth of every four is attention, and so is what is behind ``last``."""
    kda = [layer for layer in range(1, layer_count + 1) if layer % 4 and layer <= last]
    full = [layer for layer in range(1, layer_count + 1) if layer not in kda]
    return {
        "kda_layers": kda,
        "full_attn_layers": full,
        "num_heads": heads,
        "head_dim": head_dim,
        "short_conv_kernel_size": 4,
    }


_LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "head_dim": 128}
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"},
}

CONFIGS: dict[str, dict[str, Any]] = {
    "kimi-k3": {
        "model_type": "kimi_k3",
        "num_hidden_layers": 93,
        "hidden_size": 7168,
        "num_attention_heads": 96,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_experts": 896,
        "num_shared_experts": 1,
        "num_experts_per_token": 16,
        "max_position_embeddings": 1048576,
        "linear_attn_config": _kda(93, 91, heads=96, head_dim=128),
    },
    "kimi-linear-48b": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 27,
        "hidden_size": 2304,
        "vocab_size": 163840,
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_experts": 256,
        "num_shared_experts": 1,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "intermediate_size": 9216,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 1048576,
        "linear_attn_config": _kda(27, 26, heads=32, head_dim=128),
    },
    "qwen3-next-80b": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "vocab_size": 151936,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
    },
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "qwen3-235b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "vocab_size": 151936,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "max_position_embeddings": 262144,
    },
    "llama-3-8b": {
        **_LLAMA,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
    "llama-3-70b": {
        **_LLAMA,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "hidden_size": 2880,
        "vocab_size": 201088,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}
CONFIGS["gpt-oss-20b"] = {
    **CONFIGS["gpt-oss-120b"],
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_local_experts": 32,
}

# Kimi-K3's published sizes: 1.474 TB of experts, and 2.0 GB of everything else on each GPU. 2 x active parameters is
# not published, so that it has no break-even without --active-parameters.
_PUBLISHED = {"kimi-k3": Weights(expert_bytes=1.474e12, sharded_bytes=0.0, replicated_bytes=2.0e9)}


def model(name: str) -> ModelShape:
    """A built-in model, or that of a `config.json`. Raises ConfigError."""
    if name in CONFIGS:
        shape = read_config(CONFIGS[name], name=name, source="built in, from its published config.json")
        return replace(shape, weights=_PUBLISHED.get(name, shape.weights))
    if "/" not in name and "\\" not in name and not name.endswith(".json"):
        raise ConfigError("model", name, f"one of {', '.join(CONFIGS)}, or a path to a config.json")
    file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    config = load_config(file)
    try:
        return read_config(config, name=file.resolve().parent.name, source=str(file))
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # fields that no model has in that form
        raise ConfigError("model", name, f"a config whose sizes are whole numbers ({error!r})") from error
