"""What of a vLLM engine decides the bytes of its KV cache, as fields of a hicache namespace.

Imports no vLLM: it reads the attributes of ``VllmConfig`` and ``KVCacheConfig``; what only a running vLLM can tell
comes in as ``EngineFacts``. What could fool it: docs/decisions/0035-the-identity-of-a-vllm-engine.md.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hicache.connectors.checkpoint import Depth, fingerprint_checkpoint
from hicache.connectors.config_values import HF_PROVENANCE, as_text, bounded, of_file, plain
from hicache.errors import ConfigError
from hicache.keys import FieldValue, digest_fields

VERSION_FLOOR = (0, 31)
HASH_ALGORITHM = "sha256_cbor"

# Of each part of VllmConfig, the fields that change bytes. One that a release does not have
# stands as "absent"; the release is a field too, so that one with a field unknown here shares with none but itself.
_CONFIG_FIELDS: Mapping[str, tuple[str, ...]] = {
    "model_config": (
        "dtype",
        "quantization",
        "quantization_config",
        "max_model_len",  # long rope and attention temperature switch on it
        "disable_sliding_window",
        "model_impl",
        "code_revision",
        "model_class_overrides",
        "convert",
        "runner",
        "trust_remote_code",
    ),
    "model_config.multimodal_config": (
        "language_model_only",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "mm_device_do_normalize",
        "mm_encoder_only",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "video_pruning_rate",
        "video_pruning_method",
        "mm_hasher_algorithm",
    ),
    "cache_config": (
        "block_size",
        "cache_dtype",
        "kv_cache_dtype_skip_layers",
        "sliding_window",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_cache_mode",
        "use_replayssm",
        "replayssm_buffer_len",
        "use_kda_recoverssm",
        "kv_sharing_fast_prefill",
    ),
    "parallel_config": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "dcp_kv_cache_interleave_size",
        "cp_kv_cache_interleave_size",
    ),
    "attention_config": (
        "backend",
        "backend_per_kind",
        "flash_attn_version",
        "mla_prefill_backend",
        "indexer_kv_dtype",
        "indexer_sparse_logits",
        "hisparse_config",
        "use_non_causal",
        "use_trtllm_attention",
        "use_prefill_query_quantization",
        "disable_flashinfer_q_quantization",
        "flex_attn_kv_block_size",
    ),
    "mamba_config": ("backend", "enable_stochastic_rounding"),
    "lora_config": (
        "lora_dtype",
        "target_modules",
        "default_mm_loras",
        "enable_tower_connector_lora",
        "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras",
    ),
    "speculative_config": (
        "method",
        "num_speculative_tokens",
        "quantization",
        "kv_cache_dtype",
        "attention_backend",
        "disable_eagle_block_drop",
        "parallel_drafting",
        "index_share_for_mtp_iteration",
    ),
}
_CONFIGS_WHOLE = ("additional_config", "engram_config", "diffusion_config")
_KV_CACHE_FIELDS = ("kv_cache_layout", "hash_block_size", "kv_tp_replicas")
_GROUP_FIELDS = ("is_eagle_group", "host_resident", "enable_kv_transfer", "role")

# Of a group's KVCacheSpec, how many blocks a request takes; what is in a block is all the rest.
_SPEC_ALLOCATION = frozenset({"num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"})

# Switches of the process that change stored bytes and are in no config: what is computed, and how exactly, not by which
# kernels.
_ENVIRONMENT = re.compile(
    r"VLLM_(ROCM_.*|MLA_DISABLE|CPU_ATTN_SPLIT_KV|HUMMING_\w+_CONFIG|MXFP\d_EMULATION_DEQUANT_AT_LOAD|BATCH_INVARIANT|"
    r"MOE_ROUTING_SIMULATION_STRATEGY|FLOAT32_MATMUL_PRECISION|CPU_INT4_W4A8|MARLIN_INPUT_DTYPE|USE_DEEP_GEMM_E8M0|"
    r"HUMMING_USE_F16_ACCUM|DEEPEPLL_NVFP4_DISPATCH|B12X_MOE_FP4_FORCE_A16|FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE|"
    r"VIDEO_LOADER_BACKEND)"
)

_FILE_FIELDS = frozenset({"mm_encoder_fp8_scale_path"})  # of configs; what is in the file counts, not where it lies

# What vLLM calls an image or a sound that it has hashed itself, unless it was told a name for it.
_MEDIA_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")

_DUMMY_FORMATS = ("dummy",)
_LOCAL_FORMATS = frozenset(
    {
        *("auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes", "fastsafetensors"),
        *("instanttensor", "sharded_state", "runai_streamer", "runai_streamer_sharded"),
    }
)


class _Attribute(Enum):
    """What a config of another release may have in place of a value."""

    ABSENT = 0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a running vLLM knows and its configs do not (``vllm_facts.py``).

    ``attention_choice`` is what vLLM chooses attention backends by beside its configs: the device and the packages that
    are there. The backend decides how a block is cut into kernel blocks, and only workers know it; engines that might
    have chosen differently are kept apart instead.
    """

    vllm_version: str
    device_type: str
    runner: str  # "v1" | "v2"
    conv_state_layout: str  # "SD" | "DS"
    attention_choice: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """For ``CacheSpec(model=, revision=, identity=)``. Equal on all ranks of a replica; made where the scheduler is."""

    model: str
    revision: str
    fields: tuple[tuple[str, FieldValue], ...]

    @property
    def digest(self) -> bytes:
        """32 bytes of all of it."""
        return digest_fields([("model", self.model), ("revision", self.revision), *self.fields])

    def after_weight_update(self) -> EngineIdentity:
        """The identity of weights that were changed in memory (RLHF): nobody has them, so it is drawn at random."""
        return dataclasses.replace(self, revision=f"updated in memory {os.urandom(16).hex()}")


def engine_identity(vllm_config: Any, kv_cache_config: Any, facts: EngineFacts, *, revision: str) -> EngineIdentity:
    """The identity of what this engine keeps in its KV cache, for weights that are called ``revision``.

    Raises ConfigError for a vLLM below the floor, and for a config with a value that has no stable text.
    """
    check_version(facts.vllm_version)
    pairs = {
        **dict(_config_pairs(vllm_config)),
        **dict(_kv_cache_pairs(kv_cache_config)),
        **dict(_facts_pairs(facts)),
        **{f"env.{name}": of_file(value) for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)},
    }
    hf_config = vllm_config.model_config.hf_config
    architectures = getattr(hf_config, "architectures", None) or [type(hf_config).__name__]
    return EngineIdentity(
        model=str(architectures[0]),
        revision=revision,
        fields=tuple((name, bounded(name, value)) for name, value in sorted(pairs.items())),
    )


def weights_revision(
    vllm_config: Any,
    facts: EngineFacts,
    *,
    find_folder: Callable[[Any], Path | None],
    depth: Depth = "sampled",
    given: str | None = None,
) -> str:
    """What the weights are called: by their content, never by their path.

    ``given`` is the operator's own word for them (``weights_revision``), and is taken as it is. Random weights are the
    model's shape, the seed and the device, and never meet real ones. ``find_folder(model_config)`` says where vLLM
    loads from, None where that is no local folder. With a draft model, its weights count too.

    Raises ConfigError where the content cannot be had and nothing was given.
    """
    if given is not None:
        if not given:
            raise ConfigError("weights_revision", given, "a name that changes with the weights, or none")
        return f"given {given}"
    models = [("main", vllm_config.model_config, vllm_config.load_config)]
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        models.append(("draft", draft, getattr(speculative, "draft_load_config", None) or vllm_config.load_config))
    fields = [(role, _weights_of(model, load, facts, find_folder, depth)) for role, model, load in models]
    return fields[0][1] if len(fields) == 1 else digest_fields(fields).hex()


def check_version(version: str) -> None:
    """Raises ConfigError for a vLLM below the floor. A later one than was tested shares with its own release alone."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or version.startswith("0.0"):
        raise ConfigError("vllm", version, "a released vLLM, whose version tells the layout of its KV cache")
    if (int(numbers[1]), int(numbers[2])) < VERSION_FLOOR:
        floor = ".".join(map(str, VERSION_FLOOR))
        raise ConfigError("vllm", version, f"{floor} or later: earlier ones lay out their KV cache in other ways")


def check_hash_algorithm(algorithm: str) -> None:
    """Raises ConfigError unless equal prompts have equal block hashes in every process, and unequal ones never.

    ``sha256`` hashes a pickle, which differs between equal salts and adapters; ``xxhash`` starts from a random seed, or
    from one with which collisions can be made.
    """
    if algorithm != HASH_ALGORITHM:
        raise ConfigError(
            "prefix_caching_hash_algo",
            algorithm,
            f"{HASH_ALGORITHM}: start vLLM with --prefix-caching-hash-algo {HASH_ALGORITHM}; the block hashes of "
            "others are not the same for the same prompt in every process, or can be made to collide",
        )


def numbers_media(vllm_config: Any) -> bool:
    """Whether images and sounds are numbered as they come, since vLLM itself keeps nothing of them: number 1 is another
    one after each start.
    """
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    keeps_none = media is not None and getattr(media, "mm_processor_cache_gb", None) == 0
    return keeps_none and not vllm_config.cache_config.enable_prefix_caching


def has_media_by_name(request: Any) -> bool:
    """Whether a request has images or sounds by names that somebody gave them, and not by their content."""
    features = getattr(request, "mm_features", None) or ()
    return not all(_MEDIA_HASH.fullmatch(str(each.mm_hash or each.identifier)) for each in features)


def embedded_positions(request: Any) -> bytes | None:
    """Which positions of a prompt with embeddings are embeddings and not tokens, as a digest: vLLM hashes both, and not
    which of them counts. None for a prompt of one kind.
    """
    are_tokens = getattr(request, "prompt_is_token_ids", None)
    if getattr(request, "prompt_embeds", None) is None or are_tokens is None:
        return None
    return blake2b(bytes(map(bool, are_tokens)), digest_size=32).digest()


def _weights_of(
    model: Any, load: Any, facts: EngineFacts, find_folder: Callable[[Any], Path | None], depth: Depth
) -> str:
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format in _DUMMY_FORMATS:
        drawn = [model.seed, facts.device_type, facts.vllm_version, plain("hf_config", _hf_fields(model.hf_config))]
        return f"random {blake2b(as_text(drawn).encode(), digest_size=16).hexdigest()}"
    folder = find_folder(model) if load_format in _LOCAL_FORMATS and not getattr(model, "model_weights", "") else None
    if folder is None:
        raise ConfigError(
            "model",
            f"{model.model} (load_format {load_format})",
            "weights in a local folder, whose content names them; for these, set weights_revision in "
            "kv_connector_extra_config to a name that you change whenever the weights change",
        )
    content = fingerprint_checkpoint(folder, depth=depth)
    options = getattr(load, "model_loader_extra_config", None)
    if not options:
        return content
    fields = [("content", content), ("options", as_text(plain("model_loader_extra_config", options)))]
    return digest_fields(fields).hex()


def _config_pairs(vllm_config: Any) -> Iterator[tuple[str, object]]:
    for part, names in _CONFIG_FIELDS.items():
        config: Any = vllm_config
        for step in part.split("."):
            config = getattr(config, step, None)
        yield f"{part}", config is not None
        if config is not None:
            for name in names:
                value = getattr(config, name, _Attribute.ABSENT)
                stable = plain(f"{part}.{name}", value)
                yield f"{part}.{name}", of_file(stable) if name in _FILE_FIELDS else stable
    for part in _CONFIGS_WHOLE:
        yield part, plain(part, getattr(vllm_config, part, None))
    model = vllm_config.model_config
    yield from _hf_pairs("hf", model.hf_config)
    if model.hf_text_config is not model.hf_config:
        yield from _hf_pairs("hf_text", model.hf_text_config)
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None:
        yield from _hf_pairs("hf_draft", draft.hf_config)


def _hf_pairs(prefix: str, hf_config: Any) -> Iterator[tuple[str, object]]:
    for name, value in _hf_fields(hf_config).items():
        yield f"{prefix}.{name}", plain(f"{prefix}.{name}", value)


def _hf_fields(hf_config: Any) -> dict[str, object]:
    return {str(name): value for name, value in hf_config.to_dict().items() if name not in HF_PROVENANCE}


def _kv_cache_pairs(kv_cache_config: Any) -> Iterator[tuple[str, object]]:
    """Not the names of layers: a rank of a pipeline has its own, which the model and the stages tell."""
    for name in _KV_CACHE_FIELDS:
        yield f"kv_cache.{name}", plain(name, getattr(kv_cache_config, name, _Attribute.ABSENT))
    groups = kv_cache_config.kv_cache_groups
    yield "kv_cache.groups", len(groups)
    for index, group in enumerate(groups):
        prefix = f"group.{index}"
        for name, value in _spec_fields(group.kv_cache_spec):
            yield f"{prefix}.{name}", plain(f"{prefix}.{name}", value)
        for name in _GROUP_FIELDS:
            yield f"{prefix}.{name}", plain(f"{prefix}.{name}", getattr(group, name, _Attribute.ABSENT))


def _spec_fields(spec: Any) -> Iterator[tuple[str, object]]:
    yield "kind", type(spec)
    for each in dataclasses.fields(spec):
        if each.name not in _SPEC_ALLOCATION:
            yield each.name, getattr(spec, each.name)


def _facts_pairs(facts: EngineFacts) -> Iterator[tuple[str, object]]:
    yield "vllm.version", facts.vllm_version
    yield "vllm.device_type", facts.device_type
    yield "vllm.runner", facts.runner
    yield "vllm.conv_state_layout", facts.conv_state_layout
    yield "vllm.hash_seed", os.environ.get("PYTHONHASHSEED")  # engines that differ in it never meet: here it says why
    yield "vllm.attention_choice", ", ".join(facts.attention_choice)
