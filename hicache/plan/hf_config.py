"""A model's shape from the `config.json` beside its weights, hybrid layer patterns included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache.errors import ConfigError
from hicache.plan.hf_fields import Config, first, layer_numbers, section, shortened, strings, whole
from hicache.plan.hf_weights import read_weights
from hicache.plan.model import Attention, Experts, ModelShape, Recurrence

FULL, WINDOW, LINEAR, NONE = "full", "window", "linear", "none"

# What a layer is called by the models that name each of their layers. A layer may be two things (Falcon-H1).
_LAYER_KINDS: dict[str, tuple[str, ...]] = {
    "full_attention": (FULL,),
    "attention": (FULL,),
    "sliding_attention": (WINDOW,),
    "linear_attention": (LINEAR,),
    "mamba": (LINEAR,),
    "hybrid": (LINEAR, FULL),
    "mlp": (NONE,),
    "moe": (NONE,),
}
_PATTERN_KINDS = {"M": (LINEAR,), "*": (FULL,), "-": (NONE,), "E": (NONE,)}
_QWEN_INTERVAL = 4
# Fields of models whose layers are not all alike: without a pattern that is known, they are refused.
_RECURRENT_HINTS = (
    "attn_type_list",
    "compress_ratios",
    "layer_group_size",
    "layernorm_linear",
    "lightning",
    "linear_",
    "mamba",
    "ssm_",
)

LAYERS_MAX = 4096
CONTEXT_TOKENS = 131072  # of a model that does not say


def load_config(path: str | Path) -> dict[str, Any]:
    """The fields of a `config.json`. Raises ConfigError."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", str(path), f"a preset, or the config.json of a model ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError("model", str(path), "a JSON object, as config.json is")
    return config


def read_config(config: Config, *, name: str, source: str = "") -> ModelShape:
    """The shape that a config describes. Raises ConfigError for what it does not say: sizes are never guessed."""
    text = text_config(config)
    whole(text, "hidden_size")
    layer_count = whole(text, "num_hidden_layers", "n_layer", at_most=LAYERS_MAX)
    kinds = layer_kinds(text, layer_count)
    linear = _layers(kinds, LINEAR)
    attention = tuple(
        read_attention(text, _layers(kinds, kind), is_window=kind == WINDOW)
        for kind in (FULL, WINDOW)
        if _layers(kinds, kind)
    )
    recurrence = (read_recurrence(text, linear),) if linear else ()
    experts = _experts(text)
    return ModelShape(
        name=name,
        layer_count=layer_count,
        attention=attention,
        recurrence=recurrence,
        weights=read_weights(config, text, attention=attention, recurrence=recurrence, experts=experts),
        experts=experts,
        context_tokens=whole(text, "max_position_embeddings", "model_max_length", "seq_length", default=CONTEXT_TOKENS),
        state_dtype=text.get("mamba_ssm_dtype") or "float32",
        source=source,
    )


def _experts(text: Config) -> Experts | None:
    """Models without experts leave the fields out, or say 0."""
    count = whole(
        text, "num_local_experts", "n_routed_experts", "num_experts", "num_routed_experts", default=0, at_least=0
    )
    top_k = whole(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk", default=0, at_least=0)
    if top_k > count > 0:
        raise ConfigError("config.num_experts_per_tok", top_k, f"at most {count}, the experts of a layer")
    return Experts(count, top_k) if count and top_k else None


def text_config(config: Config) -> Config:
    """The language model's part: models with vision keep it one level down."""
    for key in ("text_config", "language_config", "llm_config"):
        if isinstance(config.get(key), Mapping):
            return {**{k: v for k, v in config.items() if k == "quantization_config"}, **config[key]}
    return config


def layer_kinds(text: Config, layer_count: int) -> list[tuple[str, ...]]:
    """What each layer keeps, from whichever way the model has of saying so."""
    kinds = _named_kinds(text) or _pattern_kinds(text) or _linear_config_kinds(text, layer_count)
    kinds = kinds or _period_kinds(text, layer_count) or _interval_kinds(text, layer_count)
    kinds = kinds or [_uniform_kind(text)] * layer_count
    if len(kinds) != layer_count:
        raise ConfigError("config.num_hidden_layers", layer_count, f"{len(kinds)}, as its list of layers has")
    return kinds


def _named_kinds(text: Config) -> list[tuple[str, ...]]:
    names = strings(text, "layer_types", "layers_block_type")
    unknown = sorted(set(names) - _LAYER_KINDS.keys())
    if unknown:
        raise ConfigError("config.layer_types", unknown, f"kinds of layers of {', '.join(_LAYER_KINDS)}")
    return [_LAYER_KINDS[name] for name in names]


def _pattern_kinds(text: Config) -> list[tuple[str, ...]]:
    """Nemotron-H: a letter for each layer."""
    pattern = text.get("hybrid_override_pattern") or ""
    if not isinstance(pattern, str):
        raise ConfigError("config.hybrid_override_pattern", shortened(pattern), "a text, a letter for each layer")
    unknown = sorted(set(pattern) - _PATTERN_KINDS.keys())
    if unknown:
        raise ConfigError("config.hybrid_override_pattern", unknown, f"letters of {' '.join(_PATTERN_KINDS)}")
    return [_PATTERN_KINDS[letter] for letter in pattern]


def _linear_config_kinds(text: Config, layer_count: int) -> list[tuple[str, ...]]:
    """Kimi: lists of layers, counted from 1."""
    linear = section(text, "linear_attn_config")
    if not linear.get("kda_layers"):
        return []
    kda = layer_numbers(linear, "kda_layers", start=1, layer_count=layer_count)
    return [(LINEAR,) if layer + 1 in kda else (FULL,) for layer in range(layer_count)]


def _period_kinds(text: Config, layer_count: int) -> list[tuple[str, ...]]:
    """Jamba: attention every so many layers. Bamba: a list of the layers with attention."""
    if text.get("attn_layer_period") and text.get("attn_layer_offset") is not None:
        period = whole(text, "attn_layer_period")
        offset = whole(text, "attn_layer_offset", at_least=0, at_most=period - 1)
        return [(FULL,) if layer % period == offset else (LINEAR,) for layer in range(layer_count)]
    if text.get("attn_layer_indices"):
        indices = layer_numbers(text, "attn_layer_indices", start=0, layer_count=layer_count)
        return [(FULL,) if layer in indices else (LINEAR,) for layer in range(layer_count)]
    return []


def _interval_kinds(text: Config, layer_count: int) -> list[tuple[str, ...]]:
    """Qwen3-Next: the last of every four is attention. Gemma 3: the last of every six is not a window."""
    if _is_gdn(text):
        interval = whole(text, "full_attention_interval", default=_QWEN_INTERVAL)
        return [(FULL,) if (layer + 1) % interval == 0 else (LINEAR,) for layer in range(layer_count)]
    if text.get("sliding_window_pattern") and text.get("sliding_window"):
        interval = whole(text, "sliding_window_pattern")
        return [(FULL,) if (layer + 1) % interval == 0 else (WINDOW,) for layer in range(layer_count)]
    return []


def _uniform_kind(text: Config) -> tuple[str, ...]:
    if text.get("model_type") in ("mamba", "mamba2", "falcon_mamba"):
        return (LINEAR,)
    if text.get("model_type") == "falcon_h1":
        return (LINEAR, FULL)
    hints = [key for key in text if key.startswith(_RECURRENT_HINTS)]
    if hints:
        raise ConfigError(
            "config", sorted(hints), "a list or a pattern of layers beside them: which ones are recurrent?"
        )
    windowed = text.get("sliding_window") and text.get("use_sliding_window", True)
    return (WINDOW,) if windowed else (FULL,)


def read_attention(text: Config, layers: tuple[int, ...], *, is_window: bool) -> Attention:
    """The attention of some layers: MLA where there is a latent, MHA or GQA otherwise."""
    query_heads = whole(text, "num_attention_heads", "n_head")
    window_tokens = whole(text, "sliding_window") if is_window else None
    if text.get("kv_lora_rank"):
        latent, rope = whole(text, "kv_lora_rank"), whole(text, "qk_rope_head_dim")
        return Attention(
            layers,
            query_heads=query_heads,
            head_dim=whole(text, "qk_nope_head_dim", default=latent) + rope,
            v_head_dim=whole(text, "v_head_dim", default=latent),
            latent_dim=latent,
            rope_dim=rope,
            window_tokens=window_tokens,
            index_dim=whole(text, "index_head_dim", default=0, at_least=0),
        )
    hidden = whole(text, "hidden_size")
    head_dim = whole(text, "head_dim", "attention_head_dim", default=hidden // query_heads)
    if first(text, "head_dim", "attention_head_dim") is None and hidden % query_heads:
        raise ConfigError("config.num_attention_heads", query_heads, f"a divisor of hidden_size = {hidden}")
    return Attention(
        layers,
        query_heads=query_heads,
        head_dim=head_dim,
        v_head_dim=whole(text, "v_head_dim", default=head_dim),
        kv_heads=whole(text, "num_key_value_heads", "num_kv_heads", default=query_heads),
        window_tokens=window_tokens,
    )


def read_recurrence(text: Config, layers: tuple[int, ...]) -> Recurrence:
    """The recurrent state of some layers. Raises ConfigError for a kind whose state is not known."""
    if text.get("linear_attn_config"):
        linear = section(text, "linear_attn_config")
        heads, dim = whole(linear, "num_heads"), whole(linear, "head_dim")
        kernel = whole(linear, "short_conv_kernel_size")
        return Recurrence("kda", layers, heads, dim, groups=heads, state_dim=dim, conv_kernel=kernel)
    if _is_gdn(text):
        return Recurrence(
            "gdn",
            layers,
            heads=whole(text, "linear_num_value_heads"),
            head_dim=whole(text, "linear_value_head_dim"),
            groups=whole(text, "linear_num_key_heads"),
            state_dim=whole(text, "linear_key_head_dim"),
            conv_kernel=whole(text, "linear_conv_kernel_dim"),
        )
    if first(text, "mamba_n_heads", "mamba_num_heads", "num_heads"):
        return _mamba2(text, layers)
    if first(text, "mamba_d_state", "state_size"):
        channels = whole(text, "mamba_expand", "expand", default=2) * whole(text, "hidden_size")
        state = whole(text, "mamba_d_state", "state_size")
        kernel = whole(text, "mamba_d_conv", "conv_kernel")
        return Recurrence("mamba1", layers, channels, 1, groups=0, state_dim=state, conv_kernel=kernel)
    raise ConfigError("config.model_type", text.get("model_type"), "KDA, GDN, Mamba or Mamba2: its state is not known")


def _mamba2(text: Config, layers: tuple[int, ...]) -> Recurrence:
    heads = whole(text, "mamba_n_heads", "mamba_num_heads", "num_heads")
    head_dim = first(text, "mamba_d_head", "mamba_head_dim", "head_dim")
    if not isinstance(head_dim, int):  # Granite and Bamba say "auto"
        head_dim = whole(text, "hidden_size") * whole(text, "mamba_expand", "expand", default=2) // heads
    return Recurrence(
        "mamba2",
        layers,
        heads,
        head_dim,
        groups=whole(text, "mamba_n_groups", "n_groups"),
        state_dim=whole(text, "mamba_d_state", "ssm_state_size", "state_size"),
        conv_kernel=whole(text, "mamba_d_conv", "conv_kernel"),
    )


def _is_gdn(text: Config) -> bool:
    return "linear_num_value_heads" in text


def _layers(kinds: Sequence[tuple[str, ...]], kind: str) -> tuple[int, ...]:
    return tuple(layer for layer, found in enumerate(kinds) if kind in found)
