"""Models from their config.json: which layers keep what, how many parameters, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import ConfigError
from hicache.plan.hf_config import read_config
from hicache.plan.model import ModelShape
from hicache.plan.presets import CONFIGS, model

BASE = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1000,
}
GDN = {
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
MAMBA2 = {
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
}


def read(**config: Any) -> ModelShape:
    return read_config({**BASE, **config}, name="m")


def layers_of(shape: ModelShape) -> str:
    """A letter for each layer: f, w, s, b for both attention and state, - for none."""
    full = {layer for group in shape.full_attention for layer in group.layers}
    window = {layer for group in shape.window_attention for layer in group.layers}
    states = set(shape.state_layers)
    return "".join(
        "b" if i in full & states else "s" if i in states else "f" if i in full else "w" if i in window else "-"
        for i in range(shape.layer_count)
    )


@pytest.mark.parametrize(
    ("config", "letters"),
    [
        ({"num_hidden_layers": 4}, "ffff"),
        ({"num_hidden_layers": 8, **GDN}, "sssfsssf"),
        ({"num_hidden_layers": 6, "full_attention_interval": 3, **GDN}, "ssfssf"),
        (
            {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], **GDN},
            "sfs",
        ),
        (
            {
                "num_hidden_layers": 5,
                "linear_attn_config": {
                    "kda_layers": [1, 2, 4],
                    "full_attn_layers": [3, 5],
                    "num_heads": 8,
                    "head_dim": 32,
                    "short_conv_kernel_size": 4,
                },
            },
            "ssfsf",
        ),
        (
            {
                "num_hidden_layers": 7,
                "hybrid_override_pattern": "M-M*-ME",
                "mamba_num_heads": 16,
                "mamba_head_dim": 32,
                "n_groups": 2,
                "ssm_state_size": 64,
                "conv_kernel": 4,
            },
            "s-sf-s-",
        ),
        ({"num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"], **MAMBA2}, "ssfs"),
        ({"num_hidden_layers": 4, "attn_layer_indices": [1], **MAMBA2}, "sfss"),
        (
            {
                "num_hidden_layers": 8,
                "attn_layer_period": 4,
                "attn_layer_offset": 2,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
            },
            "ssfsssfs",
        ),
        ({"num_hidden_layers": 3, "model_type": "falcon_h1", **MAMBA2}, "bbb"),
        ({"num_hidden_layers": 7, "sliding_window": 64, "sliding_window_pattern": 6}, "wwwwwfw"),
        (
            {"num_hidden_layers": 2, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
            "wf",
        ),
        ({"num_hidden_layers": 2, "sliding_window": 64, "use_sliding_window": False}, "ff"),
        ({"num_hidden_layers": 2, "sliding_window": 64}, "ww"),
    ],
)
def test_the_layers_are_told_from_whatever_pattern_a_model_has(config: dict[str, Any], letters: str) -> None:
    assert layers_of(read(**config)) == letters
    assert layers_of(read_config({"text_config": {**BASE, **config}}, name="m")) == letters  # beside a vision model


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention", "perceiver"]}, "perceiver"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"]}, "num_hidden_layers"),
        ({"num_hidden_layers": 2, "hybrid_override_pattern": "MX"}, "X"),
        ({"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}, "state is not known"),
        ({"num_hidden_layers": 2, **MAMBA2}, "which ones are recurrent"),
        ({"num_hidden_layers": 2, "num_attention_heads": None}, "num_attention_heads"),
        ({"num_hidden_layers": 2, "attn_type_list": [0, 1]}, "which ones are recurrent"),
        ({"num_hidden_layers": 2, "hidden_size": "256"}, "hidden_size"),
        ({"num_hidden_layers": 8, **GDN, "linear_conv_kernel_dim": None}, "linear_conv_kernel_dim"),
    ],
)
def test_what_a_config_does_not_say_is_refused_and_not_guessed(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**config)


PUBLISHED_BILLIONS = {  # parameters as their authors state them
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "deepseek-v3": 671,
    "qwen3-235b": 235,
    "qwen3-next-80b": 80,
    "kimi-linear-48b": 49.1,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
}


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_the_parameters_are_those_that_are_published(name: str) -> None:
    assert model(name).weights.parameters / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=0.005)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("gpt-oss-120b", 65.2), ("gpt-oss-20b", 13.8), ("deepseek-v3", 673), ("llama-3-70b", 141.1)],
)
def test_quantised_weights_take_what_their_checkpoints_take(name: str, gigabytes: float) -> None:
    weights = model(name).weights
    assert (weights.expert_bytes + weights.sharded_bytes + weights.copied_bytes) / 1e9 == pytest.approx(
        gigabytes, rel=0.01
    )


def test_a_local_config_is_read_as_a_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-next-80b"]))
    read_back = model(f"{tmp_path}/config.json")
    assert model(f"{tmp_path}/") == read_back
    built_in = model("qwen3-next-80b")
    assert (read_back.attention, read_back.recurrence) == (built_in.attention, built_in.recurrence)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 200_000, "\x00", "NaN"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        model(str(tmp_path / "config.json"))
    with pytest.raises(ConfigError, match="kimi-k3"):
        model("kimi-k4")


LINEAR_CONFIG = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("hostile", "named"),
    [
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"intermediate_size": [512, 256]}, "intermediate_size"),
        ({"intermediate_size": -1}, "intermediate_size"),
        ({"vocab_size": -100}, "vocab_size"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings"),
        ({"max_position_embeddings": -5}, "max_position_embeddings"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"sliding_window": "many"}, "sliding_window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": [["a"], {}]}, "layer_types"),
        ({"hybrid_override_pattern": 5}, "hybrid_override_pattern"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"head_dim": -8}, "head_dim"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"num_experts": -4, "num_experts_per_tok": 2}, "num_experts"),
        ({"num_experts": 8.7, "num_experts_per_tok": 2}, "num_experts"),
        ({"num_experts": 4, "num_experts_per_tok": 20}, "num_experts_per_tok"),
        ({**EXPERTS, "shared_expert_intermediate_size": 64, "moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({**EXPERTS, "first_k_dense_replace": 100}, "first_k_dense_replace"),
        ({"linear_attn_config": "x"}, "linear_attn_config"),
        ({"linear_attn_config": {**LINEAR_CONFIG, "kda_layers": [1, "x"]}}, "kda_layers"),
        ({"linear_attn_config": {**LINEAR_CONFIG, "kda_layers": [100]}}, "kda_layers"),
        ({"attn_layer_period": -2, "attn_layer_offset": 0, "mamba_d_state": 4}, "attn_layer_period"),
        ({"attn_layer_indices": [7], "mamba_d_state": 4}, "attn_layer_indices"),
        ({**GDN, "full_attention_interval": -4}, "full_attention_interval"),
        ({"kv_lora_rank": "big", "qk_rope_head_dim": 64}, "kv_lora_rank"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": "x"}, "q_lora_rank"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": -128}, "index_head_dim"),
    ],
)
def test_a_hostile_field_is_named(tmp_path: Path, hostile: dict[str, Any], named: str) -> None:
    sane = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sane, "intermediate_size": 128, **hostile}))
    with pytest.raises(ConfigError, match=rf"^config\.{named} = .{{1,100}}: expected"):
        model(str(tmp_path / "config.json"))


def test_experts_in_some_layers_are_counted_by_their_marks() -> None:
    marked = read(**EXPERTS, moe_intermediate_size=64, num_hidden_layers=4, moe_layer_freq=[0, 1, 1, 1])
    every = read(**EXPERTS, moe_intermediate_size=64, num_hidden_layers=4, first_k_dense_replace=1)
    assert marked.weights == every.weights
