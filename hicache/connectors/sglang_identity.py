"""Everything that two SGLang engines must have equal to share pages: what bytes depend on, and which rank's they are.

Imports no SGLang: it reads the attributes of its server arguments and of its storage config.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from hicache.connectors.checkpoint import fingerprint_adapter, fingerprint_checkpoint, fingerprint_path
from hicache.connectors.config_values import HF_PROVENANCE, bounded, of_file, plain
from hicache.connectors.sglang_pools import Part, PoolLayout
from hicache.connectors.sglang_settings import StorageSettings
from hicache.errors import ConfigError
from hicache.keys import FieldValue, digest_fields

FORMAT_VERSION = 1
VERSION_FLOOR = (0, 5, 22)

# Of the server: what changes cached numbers and is neither in the weights nor in a pool's geometry. How exactly kernels
# compute counts, which of them do does not.
_ARGUMENTS = (
    *("dtype", "quantization", "kv_cache_dtype", "json_model_override_args", "model_loader_extra_config"),
    *("model_impl", "model_config_parser", "trust_remote_code", "is_embedding"),
    "context_length",  # models see it in their config
    *("modelopt_quant", "quantize_and_serve", "qsa_indexer_dtype"),
    *("enable_deterministic_inference", "rl_on_policy_target", "enable_tf32_matmul"),
    *("enable_mis", "dllm_algorithm"),  # other masks for the same tokens
    *("enable_encoder_swa_bounded_replay", "enable_decoder_swa_bounded_replay"),
    *("enable_hisparse", "hisparse_config", "enable_deepseek_v4_fp4_indexer"),
    "prefill_kv_cache_dequant_dtype",
    *("enable_mamba_cache_stochastic_rounding", "enable_int8_mamba_checkpoint", "enable_linear_replayssm"),
    *("flashinfer_mxfp4_moe_precision", "enable_w4a4_mxfp4_megamoe", "deepep_dispatcher_output_dtype"),
    *("flashinfer_a2a_dispatch_type", "enable_quant_communications"),
    *("kt_method", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token"),
    *("enable_dsa_cache_layer_split", "cp_strategy"),
    *("mm_process_config", "image_processor_backend", "disable_fast_image_processor"),
    *("enable_precise_embedding_interpolation", "trust_mm_content_hashes"),
    *("lora_target_modules", "experts_shared_outer_loras"),
    *("forward_hooks", "debug_tensor_dump_input_file"),
)
_DRAFT_ARGUMENTS = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_window_size",
    "speculative_draft_sink_size",
    "speculative_enable_w4a4_mxfp4_megamoe",
    "enable_multi_layer_eagle",
)

# Files beside the checkpoint, which count by what is in them.
_FILES = (
    "quantization_param_path",  # scales of the KV cache
    "decrypted_config_file",
    "rl_quant_profile",
    "modelopt_checkpoint_restore_path",
    "kt_weight_path",
    "dllm_algorithm_config",
)
_DRAFT_FILES = ("decrypted_draft_config_file", "uno_lora_path")

# Switches of the process that change cached numbers and are no arguments.
_ENVIRONMENT = re.compile(
    r"SGLANG_\w*(QUANT|FP8|FP4|INT4|W4A|MXFP|F16_ACCUM|DTYPE|DETERMINISTIC|SAGE_ATTENTION|SKIP_SOFTMAX|DENSE|DISABLE_MSA|"
    r"TOPK_FREQ|SIMULATE_\w*EXPERTS|PERTURB|REVERT_PR|KV_LAYOUT|KVCACHE|KV_CACHE_LAYOUT|BOUNDARY_KV|ROPE_CACHE_FP32|"
    r"IMAGE_MAX_PIXELS|RESIZE_RESAMPLE|EXTERNAL_M|BF16_DISPATCH|BF16_ROUTER|ONLINE_C|PRESHUFFLE|INDEX_K_PAGE)\w*"
)

# Of ``load_format``: random numbers, and those that read the files that are there, as they are there.
_RANDOM_FORMAT = "dummy"
_LOCAL_FORMATS = frozenset(
    {
        *("auto", "pt", "safetensors", "instanttensor", "fastsafetensors", "npcache", "mistral", "gguf", "layered"),
        *("bitsandbytes", "sharded_state", "runai_streamer", "expert_pack"),
    }
)


@dataclass(frozen=True, slots=True)
class Rank:
    """Where an engine process stands in its replica. ``heads_lcm``: slices that heads are stored in, over all ranks."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    heads_lcm: int | None

    @classmethod
    def of(cls, config: Any) -> Rank:
        """From a ``HiCacheStorageConfig``; what a release does not have counts as one rank."""
        return cls(
            tp_rank=int(config.tp_rank),
            tp_size=int(config.tp_size),
            pp_rank=int(config.pp_rank),
            pp_size=int(config.pp_size),
            cp_rank=int(getattr(config, "attn_cp_rank", 0)),
            cp_size=int(getattr(config, "attn_cp_size", 1)),
            heads_lcm=getattr(config, "tp_lcm_size", None),
        )

    @property
    def head_slices(self) -> int:
        """In how many objects this rank stores the heads of a plane."""
        return 1 if not self.heads_lcm else self.heads_lcm // self.tp_size


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """One engine, the same on all of its ranks. ``fields`` are for all to read; ``draft`` is of its draft model."""

    fields: tuple[tuple[str, FieldValue], ...]
    draft: tuple[tuple[str, FieldValue], ...]
    salt: str

    @classmethod
    def of(cls, arguments: Any, config: Any, settings: StorageSettings, *, version: str) -> EngineIdentity:
        """From the server arguments and the ``HiCacheStorageConfig`` of a running engine.

        Raises ConfigError where nothing tells which weights these are, and for a release that is too old.
        """
        check_version(version)
        path = str(arguments.model_path)
        folder = weights_folder(path, getattr(arguments, "revision", None), arguments)
        load_format = str(getattr(arguments, "load_format", "auto"))
        fields: list[tuple[str, FieldValue]] = [
            ("engine", "sglang"),
            ("engine_version", settings.engine_version or version),
            ("format_version", FORMAT_VERSION),
            ("model", str(config.model_name)),
            ("revision", _revision(folder, path, load_format, arguments, settings)),
            ("config", _config_digest(folder)),
            ("pp_size", int(config.pp_size)),
            ("cp_size", int(getattr(config, "attn_cp_size", 1))),
        ]
        fields += [(name, _stable(name, getattr(arguments, name, None))) for name in _ARGUMENTS]
        fields += [(name, _content(name, getattr(arguments, name, None), settings)) for name in _FILES]
        fields += [
            (f"env {name}", bounded(name, of_file(value)))
            for name, value in sorted(os.environ.items())
            if _ENVIRONMENT.fullmatch(name)
        ]
        fields += _adapter_fields(arguments, settings)
        if torch.version.hip:
            fields.append(("platform", "hip"))  # its indexers lay out their keys in another order
        return cls(tuple(fields), tuple(_draft_fields(arguments, settings)), settings.salt)

    def described(self, anchor: PoolLayout, rank: Rank) -> tuple[tuple[str, FieldValue], ...]:
        """The namespace that hicached shows and compares: ``fields``, and what of attention pages all ranks share."""
        heads = "all" if anchor.is_replicated else f"in {rank.heads_lcm or rank.tp_size}"
        shape: dict[str, FieldValue] = {name: anchor.identity.get(name) for name in ("dtype", "byte_order")}
        return (
            *self.fields,
            *sorted((f"kv.{name}", value) for name, value in shape.items()),
            ("kv.heads", heads),
            ("page_tokens", anchor.page_tokens),
        )

    def root(self, layout: PoolLayout, rank: Rank, part: Part) -> bytes:
        """What the key of every object of this pool, rank and part begins with: 32 bytes."""
        fields: list[tuple[str, FieldValue]] = [("pool", layout.name), ("salt", self.salt), *self.fields]
        fields += sorted(layout.identity.items())
        fields += [(name, getattr(rank, name)) for name in ("pp_rank", "pp_size", "cp_rank", "cp_size")]
        fields += [("heads", _heads(layout, rank, part)), ("plane", part.plane), ("object_bytes", part.size_bytes)]
        if has_draft_layers(layout):
            fields += self.draft
        return digest_fields(fields)


def _stable(name: str, value: object) -> FieldValue:
    return bounded(name, plain(name, value))


def has_draft_layers(layout: PoolLayout) -> bool:
    """Whether a draft model's cache is in these pages: in a pool of its own, or behind the layers of the target."""
    target = layout.identity.get("target_layer_num")
    return layout.name.startswith("draft") or (target is not None and target != layout.identity.get("layer_num"))


def check_version(version: str) -> None:
    """Raises ConfigError for a release before the floor: its keys have no tenant salt."""
    numbers = tuple(int(part) for part in version.partition("+")[0].split(".")[:3] if part.isdecimal())
    if len(numbers) == 3 and numbers < VERSION_FLOOR:
        floor = ".".join(map(str, VERSION_FLOOR))
        raise ConfigError("sglang", version, f"{floor} or later")


def weights_folder(path: str, revision: str | None, arguments: Any) -> Path | None:
    """Where weights lie: the folder itself, or its snapshot in the Hugging Face cache; None for neither."""
    if Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        cache = getattr(arguments, "download_dir", None)
        return Path(snapshot_download(path, revision=revision, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _revision(folder: Path | None, model: str, load_format: str, arguments: Any, settings: StorageSettings) -> str:
    """What the weights are called. Random ones never meet others, whatever they are called."""
    if load_format == _RANDOM_FORMAT:
        return f"random, in place of {settings.model_revision or model}"
    if settings.model_revision:
        return settings.model_revision
    is_of_files = load_format in _LOCAL_FORMATS and getattr(arguments, "weight_cache_mode", "off") != "client"
    return _weights(folder if is_of_files else None, f"{model} (load_format {load_format})")


def _weights(folder: Path | None, model: str) -> str:
    if folder is None:
        expected = f"a name of the weights of {model}, since no files here are them: the same on all engines that share"
        raise ConfigError("model_revision", "", expected)
    return f"weights {fingerprint_checkpoint(folder)}"


def _draft_fields(arguments: Any, settings: StorageSettings) -> Iterator[tuple[str, FieldValue]]:
    for name in _DRAFT_ARGUMENTS:
        yield name, _stable(name, getattr(arguments, name, None))
    for name in _DRAFT_FILES:
        yield name, _content(name, getattr(arguments, name, None), settings)
    if path := getattr(arguments, "speculative_draft_model_path", None):
        folder = weights_folder(str(path), getattr(arguments, "speculative_draft_model_revision", None), arguments)
        own_format = getattr(arguments, "speculative_draft_load_format", None)
        load_format = str(own_format or getattr(arguments, "load_format", "auto"))
        yield "draft_revision", _revision(folder, str(path), load_format, arguments, settings)


def _content(name: str, path: object, settings: StorageSettings) -> FieldValue:
    """What is in a file, or in a folder of weights. Raises ConfigError where that cannot be told, and no
    ``model_revision`` stands for it."""
    if path is None:
        return None
    try:
        return fingerprint_path(Path(str(path)))
    except (OSError, ConfigError) as error:
        if settings.model_revision:
            return bounded(name, str(path))
        expected = f"a name of the weights, since what {name} names cannot be read here ({error})"
        raise ConfigError("model_revision", "", expected) from error


def _adapter_fields(arguments: Any, settings: StorageSettings) -> Iterator[tuple[str, FieldValue]]:
    """LoRA adapters of the command line, by content: SGLang's keys have them by name and path.

    Those that are loaded later have an id there that no other process has.
    """
    for adapter in sorted(getattr(arguments, "lora_paths", None) or (), key=lambda each: str(each.lora_name)):
        folder = weights_folder(str(adapter.lora_path), None, arguments)
        if folder is None and not settings.model_revision:
            expected = f"a name of the weights, since no files of the adapter {adapter.lora_path} are here"
            raise ConfigError("model_revision", "", expected)
        yield f"adapter {adapter.lora_name}", None if folder is None else fingerprint_adapter(folder).hex()


def _config_digest(folder: Path | None) -> str | None:
    """What ``config.json`` says about the computation: rope, windows, norms."""
    if folder is None or not (folder / "config.json").is_file():
        return None
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in HF_PROVENANCE}
    return blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()


def _heads(layout: PoolLayout, rank: Rank, part: Part) -> str:
    """Whose heads these are. Engines with one ``tp_lcm_size`` share slices, whatever their TP size."""
    if layout.is_replicated:
        return "all"
    if rank.heads_lcm and layout.identity.get("byte_order") == "heads":
        return f"slice {rank.tp_rank * layout.head_slices + part.head_slice} of {rank.heads_lcm}"
    return f"rank {rank.tp_rank} of {rank.tp_size}"
