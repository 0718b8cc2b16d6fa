"""Tiny models of random weights, one for each kind of memory that vLLM keeps: made where they are missing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 512
COMMON: dict[str, Any] = {  # Any: keyword arguments of a configuration
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Model:
    """How a model is made, and what vLLM needs to be told to run it here."""

    name: str
    dtype: str
    page_tokens: int  # of the prefixes that can be restored
    block_size: int | None  # as it is asked for; None: the engine's to choose
    make: Callable[[int], Any]  # Any: a model of transformers; from a seed


def llama(seed: int, *, kv_heads: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    _seed(seed)
    return LlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=kv_heads, head_dim=32))


def gemma3(seed: int) -> Any:
    """Embeddings are tied and much larger than what the layers add, and attention is near even.

    The last token alone would say what is next: the norms behind each layer, and of queries and keys, are raised.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    _seed(seed)
    settings = COMMON | {"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64}
    kinds = ["sliding_attention", "full_attention"] * 2
    model = Gemma3ForCausalLM(Gemma3TextConfig(**settings, layer_types=kinds))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
                weight.fill_(8.0)
            elif "q_norm" in name or "k_norm" in name:
                weight.fill_(3.0)
    return model


def qwen3_next(seed: int) -> Any:
    """Two layers of gated delta net and two of attention, in turn; head sizes are those that the CPU kernels take."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    _seed(seed)
    settings = COMMON | {"initializer_range": 0.1}
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **settings,
            num_key_value_heads=4,
            head_dim=256,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            full_attention_interval=2,
        )
    )


def nemotron_h(seed: int) -> Any:
    """Mamba2, attention, Mamba2, feed-forward.

    What the Mamba layers add is raised to what the others do, and they forget slowly.
    """
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    _seed(seed)
    settings = COMMON | {"hybrid_override_pattern": "M*M-", "num_key_value_heads": 2, "head_dim": 32}
    model = NemotronHForCausalLM(
        NemotronHConfig(
            **settings,
            mamba_num_heads=8,
            mamba_head_dim=32,
            ssm_state_size=16,
            n_groups=1,
            conv_kernel=4,
            chunk_size=32,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mixer.out_proj" in name:
                weight.mul_(11.0)
            elif "A_log" in name:
                weight.fill_(-4.0)
    return model


def deepseek(seed: int) -> Any:
    """MLA: one latent for each token and layer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    _seed(seed)
    settings = COMMON | {"num_hidden_layers": 3, "initializer_range": 0.1}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **settings,
            num_key_value_heads=4,
            moe_intermediate_size=64,
            n_shared_experts=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=3,
            kv_lora_rank=512,
            q_lora_rank=64,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
        )
    )


MODELS = {
    model.name: model
    for model in (
        Model("llama", "float32", 32, 32, lambda seed: llama(seed, kv_heads=2)),
        Model("llama-mha", "float32", 32, 32, lambda seed: llama(seed, kv_heads=4)),
        Model("gemma3", "bfloat16", 32, 32, gemma3),
        Model("qwen3-next", "bfloat16", 128, None, qwen3_next),
        Model("nemotron-h", "bfloat16", 128, None, nemotron_h),
        Model("deepseek", "bfloat16", 16, None, deepseek),
    )
}


def folder_of(name: str, models: Path, *, seed: int = 0) -> Path:
    """The folder of a model below ``models``; made there the first time, by whichever process is the first."""
    folder = models / f"{name}-{seed}"
    if not folder.exists():
        import torch

        model = MODELS[name]
        building = Path(tempfile.mkdtemp(dir=models))
        model.make(seed).to(getattr(torch, model.dtype)).save_pretrained(building)
        try:
            os.rename(building, folder)
        except OSError:  # another process has made the same one meanwhile
            shutil.rmtree(building)
    return folder


def _seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)
