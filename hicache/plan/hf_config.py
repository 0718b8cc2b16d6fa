"""A model's shape from the `config.json` beside its weights, hybrid layer patterns included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache.errors import ConfigError
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

Config = Mapping[str, Any]  # JSON: checked where it is read


def load_config(path: str | Path) -> dict[str, Any]:
    """The fields of a `config.json`. Raises ConfigError."""
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("model", str(path), f"a preset, or the config.json of a model ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError("model", str(path), "a JSON object, as config.json is")
    return config


def read_config(config: Config, *, name: str, source: str = "") -> ModelShape:
    """The shape that a config describes. Raises ConfigError for what it does not say: sizes are never guessed."""
    text = text_config(config)
    _whole(text, "hidden_size")
    layer_count = _whole(text, "num_hidden_layers", "n_layer")
    kinds = layer_kinds(text, layer_count)
    linear = _layers(kinds, LINEAR)
    attention = tuple(
        read_attention(text, _layers(kinds, kind), window_tokens=window)
        for kind, window in ((FULL, None), (WINDOW, text.get("sliding_window")))
        if _layers(kinds, kind)
    )
    recurrence = (read_recurrence(text, linear),) if linear else ()
    experts_count = _first(text, "num_local_experts", "n_routed_experts", "num_experts", "num_routed_experts")
    top_k = _first(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk")
    experts = Experts(int(experts_count), int(top_k)) if experts_count and top_k else None
    return ModelShape(
        name=name,
        layer_count=layer_count,
        attention=attention,
        recurrence=recurrence,
        weights=read_weights(config, text, attention=attention, recurrence=recurrence, experts=experts),
        experts=experts,
        context_tokens=int(_first(text, "max_position_embeddings", "model_max_length", "seq_length") or 131072),
        state_dtype=text.get("mamba_ssm_dtype") or "float32",
        source=source,
    )


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
    names = _first(text, "layer_types", "layers_block_type") or []
    unknown = sorted(set(names) - _LAYER_KINDS.keys())
    if unknown:
        raise ConfigError("config.layer_types", unknown, f"kinds of layers of {', '.join(_LAYER_KINDS)}")
    return [_LAYER_KINDS[name] for name in names]


def _pattern_kinds(text: Config) -> list[tuple[str, ...]]:
    """Nemotron-H: a letter for each layer."""
    pattern = text.get("hybrid_override_pattern") or ""
    unknown = sorted(set(pattern) - _PATTERN_KINDS.keys())
    if unknown:
        raise ConfigError("config.hybrid_override_pattern", unknown, f"letters of {' '.join(_PATTERN_KINDS)}")
    return [_PATTERN_KINDS[letter] for letter in pattern]


def _linear_config_kinds(text: Config, layer_count: int) -> list[tuple[str, ...]]:
    """Kimi: lists of layers, counted from 1."""
    linear = text.get("linear_attn_config") or {}
    if not linear.get("kda_layers"):
        return []
    kda = set(linear["kda_layers"])
    return [(LINEAR,) if layer + 1 in kda else (FULL,) for layer in range(layer_count)]


def _period_kinds(text: Config, layer_count: int) -> list[tuple[str, ...]]:
    """Jamba: attention every so many layers. Bamba: a list of the layers with attention."""
    period, offset = text.get("attn_layer_period"), text.get("attn_layer_offset")
    if period and offset is not None:
        return [(FULL,) if layer % period == offset else (LINEAR,) for layer in range(layer_count)]
    indices = text.get("attn_layer_indices")
    if indices:
        return [(FULL,) if layer in indices else (LINEAR,) for layer in range(layer_count)]
    return []


def _interval_kinds(text: Config, layer_count: int) -> list[tuple[str, ...]]:
    """Qwen3-Next: the last of every four is attention. Gemma 3: the last of every six is not a window."""
    if _is_gdn(text):
        interval = text.get("full_attention_interval") or _QWEN_INTERVAL
        return [(FULL,) if (layer + 1) % interval == 0 else (LINEAR,) for layer in range(layer_count)]
    interval = text.get("sliding_window_pattern")
    if interval and text.get("sliding_window"):
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


def read_attention(text: Config, layers: tuple[int, ...], *, window_tokens: int | None) -> Attention:
    """The attention of some layers: MLA where there is a latent, MHA or GQA otherwise."""
    query_heads = _whole(text, "num_attention_heads", "n_head")
    if text.get("kv_lora_rank"):
        rope = _whole(text, "qk_rope_head_dim")
        return Attention(
            layers,
            query_heads=query_heads,
            head_dim=int(text.get("qk_nope_head_dim") or text["kv_lora_rank"]) + rope,
            v_head_dim=int(text.get("v_head_dim") or text["kv_lora_rank"]),
            latent_dim=_whole(text, "kv_lora_rank"),
            rope_dim=rope,
            window_tokens=window_tokens,
            index_dim=int(text.get("index_head_dim") or 0),
        )
    head_dim = int(_first(text, "head_dim", "attention_head_dim") or _whole(text, "hidden_size") // query_heads)
    return Attention(
        layers,
        query_heads=query_heads,
        head_dim=head_dim,
        v_head_dim=int(text.get("v_head_dim") or head_dim),
        kv_heads=int(_first(text, "num_key_value_heads", "num_kv_heads") or query_heads),
        window_tokens=window_tokens,
    )


def read_recurrence(text: Config, layers: tuple[int, ...]) -> Recurrence:
    """The recurrent state of some layers. Raises ConfigError for a kind whose state is not known."""
    if text.get("linear_attn_config"):
        linear = text["linear_attn_config"]
        heads, dim = _whole(linear, "num_heads"), _whole(linear, "head_dim")
        kernel = _whole(linear, "short_conv_kernel_size")
        return Recurrence("kda", layers, heads, dim, groups=heads, state_dim=dim, conv_kernel=kernel)
    if _is_gdn(text):
        return Recurrence(
            "gdn",
            layers,
            heads=_whole(text, "linear_num_value_heads"),
            head_dim=_whole(text, "linear_value_head_dim"),
            groups=_whole(text, "linear_num_key_heads"),
            state_dim=_whole(text, "linear_key_head_dim"),
            conv_kernel=_whole(text, "linear_conv_kernel_dim"),
        )
    if _first(text, "mamba_n_heads", "mamba_num_heads", "num_heads"):
        return _mamba2(text, layers)
    if _first(text, "mamba_d_state", "state_size"):
        channels = int(_first(text, "mamba_expand", "expand") or 2) * _whole(text, "hidden_size")
        state = _whole(text, "mamba_d_state", "state_size")
        kernel = _whole(text, "mamba_d_conv", "conv_kernel")
        return Recurrence("mamba1", layers, channels, 1, groups=0, state_dim=state, conv_kernel=kernel)
    raise ConfigError("config.model_type", text.get("model_type"), "KDA, GDN, Mamba or Mamba2: its state is not known")


def _mamba2(text: Config, layers: tuple[int, ...]) -> Recurrence:
    heads = _whole(text, "mamba_n_heads", "mamba_num_heads", "num_heads")
    head_dim = _first(text, "mamba_d_head", "mamba_head_dim", "head_dim")
    if not isinstance(head_dim, int):  # Granite and Bamba say "auto"
        head_dim = _whole(text, "hidden_size") * int(_first(text, "mamba_expand", "expand") or 2) // heads
    return Recurrence(
        "mamba2",
        layers,
        heads,
        head_dim,
        groups=_whole(text, "mamba_n_groups", "n_groups"),
        state_dim=_whole(text, "mamba_d_state", "ssm_state_size", "state_size"),
        conv_kernel=_whole(text, "mamba_d_conv", "conv_kernel"),
    )


def _is_gdn(text: Config) -> bool:
    return "linear_num_value_heads" in text


def _layers(kinds: Sequence[tuple[str, ...]], kind: str) -> tuple[int, ...]:
    return tuple(layer for layer, found in enumerate(kinds) if kind in found)


def _first(config: Config, *names: str) -> Any:
    """The first of several names of one field that the config has: Any, as JSON is."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _whole(config: Config, *names: str) -> int:
    value = _first(config, *names)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.{names[0]}", value, "a whole number of at least 1")
    return value
