"""Asks a running vLLM what its configs do not say; the one module of the identity that imports it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.platforms import current_platform

from hicache.connectors.vllm_identity import EngineFacts

_CHOOSES_BY = ("flashinfer-python", "flash-attn", "flash-attn-3", "flash-mla", "amd-aiter", "triton")


def engine_facts(vllm_config: Any) -> EngineFacts:
    """The facts of this process. The same in scheduler and workers, whichever of them vLLM runs in one process."""
    return EngineFacts(
        vllm_version=vllm.__version__,
        device_type=str(current_platform.device_type),
        runner="v2" if vllm_config.use_v2_model_runner else "v1",
        conv_state_layout=str(get_conv_state_layout()),
        attention_choice=(f"torch {torch.__version__}", _capability(), *_packages()),
    )


def weights_folder(model_config: Any, download_dir: str | None = None) -> Path | None:
    """Where vLLM loads a model from: the folder itself, or its snapshot in the Hugging Face cache; None for neither."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model_config.model, revision=model_config.revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _capability() -> str:
    if current_platform.is_cpu():
        return f"cpu {torch.backends.cpu.get_cpu_capability()} amx {torch.cpu._is_amx_tile_supported()}"
    return str(current_platform.get_device_capability())


def _packages() -> list[str]:
    found = []
    for name in _CHOOSES_BY:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found
