"""How many bytes of weights a model has, counted from its config: an estimate that published sizes are held against."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.plan.hf_fields import Config, section, whole
from hicache.plan.model import Attention, Experts, Recurrence, Weights

_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_MXFP4_BYTES = 0.5 + 1 / 32  # two elements a byte, a scale byte for 32
_NVFP4_BYTES = 0.5 + 1 / 16
_MATRICES_GATED = 3  # up, gate and down


def read_weights(
    config: Config,
    text: Config,
    *,
    attention: Sequence[Attention],
    recurrence: Sequence[Recurrence],
    experts: Experts | None,
) -> Weights:
    """Bytes by how they are cut over GPUs. Norms and biases are left out: they are less than 0.1 %."""
    hidden, layers = whole(text, "hidden_size"), whole(text, "num_hidden_layers", "n_layer")
    embeddings = whole(text, "vocab_size", default=0, at_least=0) * hidden
    head = 0 if text.get("tie_word_embeddings") else embeddings
    mixing = sum(len(group.layers) * _attention_parameters(group, text, hidden) for group in attention)
    mixing += sum(len(group.layers) * _recurrence_parameters(group, hidden) for group in recurrence)
    moe_layers = _moe_layers(text, layers) if experts else 0
    width = whole(text, "intermediate_size", default=0, at_least=0)
    expert = _MATRICES_GATED * hidden * whole(text, "moe_intermediate_size", default=width)
    shared = moe_layers * (_shared_experts(text) * expert + (hidden * experts.count if experts else 0))
    dense = (layers - moe_layers) * _MATRICES_GATED * hidden * width
    routed = moe_layers * experts.count * expert if experts else 0
    active = mixing + shared + dense + (moe_layers * experts.top_k * expert if experts else 0)
    copied = sum(len(group.layers) * _latent_parameters(group, text, hidden) for group in attention if group.is_mla)
    copied += moe_layers * hidden * experts.count if experts else 0  # routers
    dense_bytes, expert_bytes = _element_bytes(config, text)
    return Weights(
        expert_bytes=routed * expert_bytes,
        sharded_bytes=(mixing + shared + dense - copied) * dense_bytes + (embeddings + head) * 2,
        copied_bytes=copied * dense_bytes,
        active_parameters=active,
        parameters=mixing + shared + dense + routed + embeddings + head,
    )


def _attention_parameters(attention: Attention, text: Config, hidden: int) -> int:
    heads, qk, v = attention.query_heads, attention.head_dim, attention.v_head_dim
    output = heads * v * hidden
    if not attention.is_mla:
        gate = heads * qk * hidden if "linear_num_value_heads" in text else 0  # Qwen3-Next gates its output
        return hidden * (heads * qk + attention.kv_heads * (qk + v)) + output + gate
    query = (whole(text, "q_lora_rank", default=0, at_least=0) or hidden) * heads * qk
    values_and_keys = attention.latent_dim * heads * (qk - attention.rope_dim + v)
    return query + values_and_keys + output + _latent_parameters(attention, text, hidden)


def _latent_parameters(attention: Attention, text: Config, hidden: int) -> int:
    """The ways into MLA's latents: of no head, so that every attention rank has them whole."""
    query_rank = whole(text, "q_lora_rank", default=0, at_least=0)
    return hidden * (attention.latent_dim + attention.rope_dim + query_rank)


def _recurrence_parameters(recurrence: Recurrence, hidden: int) -> int:
    """Projections into values, keys and queries, gates of the values' size, and the way out."""
    values, keys = recurrence.heads * recurrence.head_dim, recurrence.groups * recurrence.state_dim
    conv = (values + 2 * keys) * recurrence.conv_kernel
    if recurrence.kind == "kda":  # its gates go through a rank of one head
        gates = 2 * recurrence.head_dim * (hidden + values) + hidden * recurrence.heads
        return hidden * (2 * values + 2 * keys) + gates + conv
    return hidden * (3 * values + 2 * keys + 2 * recurrence.heads) + conv


def _moe_layers(text: Config, layers: int) -> int:
    """Layers with experts: by a letter or a mark for each layer, or all behind the first ones, every so many."""
    pattern, marks = text.get("hybrid_override_pattern"), text.get("moe_layer_freq")
    if pattern:
        return int(pattern.count("E"))
    if isinstance(marks, list):
        return sum(bool(mark) for mark in marks[:layers])
    dense_first = whole(text, "first_k_dense_replace", default=0, at_least=0, at_most=layers)
    return (layers - dense_first) // whole(text, "decoder_sparse_step", "moe_layer_freq", default=1)


def _shared_experts(text: Config) -> float:
    """How many experts' width the shared ones have."""
    count = whole(text, "n_shared_experts", "num_shared_experts", default=0, at_least=0)
    width = whole(text, "shared_expert_intermediate_size", default=0, at_least=0)
    return count or (width / whole(text, "moe_intermediate_size") if width else 0.0)


def _element_bytes(config: Config, text: Config) -> tuple[float, float]:
    """Bytes of a weight outside of the experts, and within."""
    plain = _DTYPE_BYTES.get(str(text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype")), 2.0)
    quantized = section(config, "quantization_config") or section(text, "quantization_config")
    method = quantized.get("quant_method")
    if method == "fp8":
        return 1.0, 1.0
    if method == "mxfp4":  # GPT-OSS: the experts alone
        return plain, _MXFP4_BYTES
    if method in ("modelopt", "nvfp4", "modelopt_fp4"):
        return plain, _NVFP4_BYTES
    return plain, plain
