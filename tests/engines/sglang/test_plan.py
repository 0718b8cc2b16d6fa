"""The planner against SGLang's own sizing: its state pool, its bytes, its pipeline stages, its arguments."""

from __future__ import annotations

import argparse
import contextlib
import random
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups import cuda_graph_hook, memory_hook
from sglang.srt.arg_groups.model_overrides import qwen3_vl
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor import pool_configurator
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator, HybridSWAPoolConfigurator
from sglang.srt.runtime_context import get_context, get_parallel, get_schedule
from sglang.srt.server_args import ServerArgs

from hicache.costs.machine import GIB, machine
from hicache.plan.capacity import work_out
from hicache.plan.engine_flags import VERSIONS, engine_flags
from hicache.plan.formula import Ledger
from hicache.plan.hf_config import read_config
from hicache.plan.model import pipeline_stages
from hicache.plan.presets import CONFIGS, model
from hicache.plan.settings import Settings
from hicache.plan.sizes import memory_fraction

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CASES = 400


def test_the_flags_are_for_the_version_that_is_installed() -> None:
    assert version("sglang") == VERSIONS["sglang"]


def cache_params(settings: Settings) -> Any:
    """The engine's own description of the model's state on one rank."""
    [state] = settings.model.recurrence
    dtype = Mamba2StateDType(conv=DTYPES[settings.conv_dtype], temporal=DTYPES[settings.state_dtype or "float32"])
    if state.kind == "kda":
        shape = KimiLinearStateShape.create(
            tp_world_size=settings.tp,
            num_heads=state.heads,
            head_dim=state.head_dim,
            conv_kernel_size=state.conv_kernel,
        )
        return KimiLinearCacheParams(shape=shape, layers=list(state.layers), dtype=dtype)
    shape = Mamba2StateShape.create(
        tp_world_size=settings.tp,
        intermediate_size=state.heads * state.head_dim,
        n_groups=state.groups,
        num_heads=state.heads,
        head_dim=state.head_dim,
        state_size=state.state_dim,
        conv_kernel=state.conv_kernel,
    )
    return Mamba2CacheParams(shape=shape, layers=list(state.layers), dtype=dtype)


@contextlib.contextmanager
def engine(settings: Settings) -> Iterator[Any]:
    """What the engine's sizing asks of the object that it belongs to, under the same arguments."""
    [state] = settings.model.recurrence
    arguments = {
        "mamba_radix_cache_strategy": settings.strategy,
        "disable_overlap_schedule": not settings.overlap,
        "disable_radix_cache": not settings.radix_cache,
        "mamba_full_memory_ratio": settings.ratio,
        "max_running_requests": settings.max_running_requests,
        "max_mamba_cache_size": settings.state_slots,
        "enable_linear_replayssm_spec": settings.replay_ring,
        "linear_replayssm_cache_len": settings.ring_depth or 16,
    }
    if settings.draft_tokens:
        arguments |= {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": settings.draft_tokens}
    me = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=cache_params(settings)),
        pp_size=settings.pp,
        model_config=SimpleNamespace(num_hidden_layers=settings.model.layer_count, context_len=settings.context),
        fused_entry_bytes=lambda name: None,
        spec_algorithm=SimpleNamespace(is_none=lambda: not settings.draft_tokens),
        hybrid_gdn_config=object() if state.kind == "gdn" else None,
        hybrid_kda_config=object() if state.kind == "kda" else None,
        attn_dp_size=settings.dp,
        extra_mamba_cache_bytes_per_req=0,
    )
    me._calculate_mamba_ratio = types.MethodType(KVCacheConfigurator._calculate_mamba_ratio, me)
    with (
        get_context().override_server_args(**arguments),
        get_parallel().override(tp_rank=0, pp_rank=0, attn_dcp_rank=0),
        envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.override(settings.skip_decode_lock),
    ):
        yield me


def random_settings(draw: random.Random) -> Settings:
    """A hybrid model on some machine, with whatever settings go together."""
    name = draw.choice(["kimi-k3", "kimi-linear-48b", "qwen3-next-80b"])
    draft_tokens = draw.choice([0, 0, 2, 4, 8])
    strategy, overlap = draw.choice(["no_buffer", "extra_buffer", "extra_buffer_lazy"]), draw.random() < 0.7
    replay_ring = bool(draft_tokens) and draw.random() < 0.5
    running = draw.choice([None, 1, 7, 48, 500])
    return Settings(
        model=model(name),
        machine=machine("b300-hgx"),
        tp=draw.choice([1, 2, 4, 8]),
        pp=draw.choice([1, 2, 3, 5, 8]),
        dp=draw.choice([1, 1, 2, 4]),
        state_dtype=draw.choice(["float32", "bfloat16", "float16"]),
        conv_dtype=draw.choice(["float32", "bfloat16"]),
        strategy="extra_buffer" if not overlap and strategy == "extra_buffer_lazy" else strategy,
        overlap=overlap,
        radix_cache=draw.random() < 0.8,
        skip_decode_lock=draw.random() < 0.3,
        draft_tokens=draft_tokens,
        replay_ring=replay_ring,
        ring_depth=draw.choice([8, 16, 32]) if replay_ring else None,
        max_running_requests=48 if draft_tokens and running is None else running,
        state_slots=draw.choice([None, None, 10, 333]),
        ratio=draw.choice([0.1, 0.5, 0.75, 0.9, 1.7, 9.0]),
        rest_bytes=draw.randrange(GIB // 64, draw.choice([GIB // 2, 40 * GIB, 200 * GIB])),
        context_tokens=draw.choice([8192, 32768, 1048576]),
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_pools_are_those_of_the_engine(seed: int) -> None:
    """Slots, bytes left for KV and admitted requests of random settings; too little memory is so for both."""
    draw = random.Random(seed)
    refused = 0
    for _ in range(CASES // 4):
        settings = random_settings(draw)
        ledger = Ledger()
        found = work_out(settings, ledger)
        with engine(settings) as me:
            assert cache_params(settings).mamba_cache_per_req == found.state.all_stages_bytes, settings
            try:
                left = KVCacheConfigurator._handle_max_mamba_cache(me, settings.rest_bytes / GIB)
            except RuntimeError:
                assert found.pools.state_slots <= 0, settings
                refused += 1
                continue
            assert get_schedule().max_mamba_cache_size == found.pools.state_slots, settings
            assert int(left * GIB) == found.pools.kv_pool_bytes, settings
            if found.kv_tokens < 2:
                continue
            try:
                admitted = KVCacheConfigurator.resolve_max_num_reqs(me, found.kv_tokens)
            except RuntimeError:
                admitted = 0
            assert admitted == found.max_running_requests, settings
    assert 0 < refused < CASES // 4


def test_the_rings_are_those_of_the_engine() -> None:
    for name in ("kimi-k3", "qwen3-next-80b"):
        for conv_dtype in ("bfloat16", "float32"):
            settings = Settings(
                model=model(name),
                machine=machine("h200"),
                tp=4,
                conv_dtype=conv_dtype,
                draft_tokens=4,
                replay_ring=True,
                ring_depth=16,
                max_running_requests=8,
            )
            ledger = Ledger()
            work_out(settings, ledger)
            ring = cache_params(settings).replayssm_ring_bytes_per_req(record_len=16)
            assert ledger["replay_ring_bytes_of_all_stages"].value == ring


@pytest.mark.parametrize("layer_count", [1, 27, 48, 61, 93])
def test_the_stages_are_those_of_the_engine(layer_count: int) -> None:
    for pp in range(1, min(17, layer_count + 1)):
        stages = [get_pp_indices(layer_count, rank, pp) for rank in range(pp)]
        assert [(stage.start, stage.stop) for stage in pipeline_stages(layer_count, pp)] == stages


KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_ds_mla": torch.float8_e4m3fn,
    "fp4_e2m1": torch.float4_e2m1fn_x2,
}
INDEX_DIM = 128


def engine_cell_bytes(settings: Settings) -> int:
    """Bytes of a token's row in the engine's pool of one rank, as the engine works them out."""
    [attention] = settings.model.attention
    sparse = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048, "index_head_dim": INDEX_DIM}
    config = SimpleNamespace(
        hf_config=SimpleNamespace(**(sparse if attention.index_dim else {"architectures": ["None"]})),
        kv_lora_rank=attention.latent_dim,
        qk_rope_head_dim=attention.rope_dim,
        head_dim=attention.head_dim,
        v_head_dim=attention.v_head_dim,
        get_num_kv_heads=lambda tp, dcp=1: max(1, attention.kv_heads // (tp // dcp)),
        context_len=settings.context,
        quantization=None,
        num_hidden_layers=settings.model.layer_count,
    )
    me = SimpleNamespace(
        model_config=config,
        kv_cache_dtype=KV_DTYPES[settings.kv_dtype],
        kv_cache_dtype_str="nvfp4" if settings.kv_dtype == "fp4_e2m1" else "auto",
        use_mla_backend=attention.is_mla,
        server_args=SimpleNamespace(enable_hisparse=False),
        layer_info=SimpleNamespace(start_layer=0, end_layer=settings.model.layer_count),
        is_draft_worker=False,
        device="cpu",
        mambaish_config=None,
        pp_size=1,
        page_size=settings.page_tokens,
    )
    sizing = SimpleNamespace(
        kv_cache_dtype_str="auto", _compute_qsa_cell_size=DefaultPoolConfigurator._compute_qsa_cell_size
    )
    sizing._compute_dsa_indexer_cell_size = types.MethodType(
        DefaultPoolConfigurator._compute_dsa_indexer_cell_size, sizing
    )
    with (
        get_context().override_server_args(),
        get_parallel().override(
            tp_rank=0,
            pp_rank=0,
            tp_size=settings.tp,
            moe_tp_size=settings.tp,
            attn_tp_size=settings.tp,
            attn_dcp_size=settings.dcp,
            attn_dcp_rank=0,
        ),
    ):
        return int(DefaultPoolConfigurator._compute_cell_size(sizing, me, len(attention.layers)))


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b", "llama-3-70b", "kimi-k3", "qwen3-next-80b"])
@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (8, 1), (8, 2), (8, 8)])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "fp4_e2m1"])
def test_a_token_takes_the_bytes_of_the_engine(
    name: str, tp: int, dcp: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp4 is that of kernels that read it as it is: those that unpack it for prefill keep scales twice."""
    fp4 = KV_DTYPES["fp4_e2m1"]
    monkeypatch.setattr(pool_configurator, "is_float4_e2m1fn_x2", lambda found: found == fp4)  # it asks for CUDA
    monkeypatch.setattr(
        NVFP4KVCacheMethod,
        "configure_attention_backends_from_server_args",
        lambda self, _: self.configure_attention_backends("trtllm_mha", "trtllm_mha"),
    )
    place = machine("b300-hgx")
    settings = Settings(model=model(name), machine=place, tp=tp, dcp=dcp, kv_dtype=dtype, rest_bytes=64 * GIB)
    assert engine_cell_bytes(settings) == work_out(settings).kv.full_cell_bytes


@pytest.mark.parametrize("dcp", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_ds_mla"])
def test_an_indexer_takes_the_bytes_of_the_engine(dtype: str, dcp: int) -> None:
    """Its keys are on every DCP rank; rows in fp8 are the packed ones of its kernels."""
    shape = read_config({**CONFIGS["deepseek-v3"], "index_head_dim": INDEX_DIM}, name="sparse")
    settings = Settings(model=shape, machine=machine("h200"), tp=8, dcp=dcp, kv_dtype=dtype, rest_bytes=64 * GIB)
    assert engine_cell_bytes(settings) == work_out(settings).kv.full_cell_bytes


@pytest.mark.parametrize("gpu_gb", [16, 24, 48, 85, 149, 270])
@pytest.mark.parametrize("name", ["deepseek-v3", "llama-3-8b"])
def test_the_fraction_is_never_above_the_default_of_the_engine(
    name: str, gpu_gb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_mla = model(name).attention[0].is_mla
    for tp, dp in ((1, 1), (8, 1), (2, 4), (1, 8)):
        place = replace(machine("b300-hgx"), gpu_gb=gpu_gb)
        settings = Settings(model=model(name), machine=place, tp=tp, dp=dp, chunk_tokens=2048)
        found, default = memory_fraction(settings, Ledger()), engine_fraction(settings, monkeypatch)
        assert found <= max(0, default), settings
        assert not is_mla or found == max(0, min(0.85, default)), settings


def engine_fraction(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> float:
    """What the engine sets where `--mem-fraction-static` is not given."""
    graphs = {phase: SimpleNamespace(max_bs=None, bs=None, backend=Backend.FULL) for phase in ("decode", "prefill")}
    arguments = SimpleNamespace(
        attn_dp_size=settings.dp,
        chunked_prefill_size=settings.chunk_tokens,
        cuda_graph_config=SimpleNamespace(**graphs),
        device="cuda",
        disaggregation_mode="null",
        enable_symm_mem=False,
        language_model_only=False,
        language_only=False,
        max_running_requests=settings.max_running_requests,
        max_total_tokens=None,
        mem_fraction_static=None,
        model_path="m",
        moe_a2a_backend="none",
        pp_size=settings.pp,
        tp_size=settings.tp * settings.dp,
    )
    answers: dict[str, Any] = {
        "attn_dp_enabled_of": lambda _: settings.dp > 1,
        "declare_resolution": lambda _, __, **fields: vars(arguments).update(fields),
        "get_device_memory_capacity": lambda _: settings.machine.gpu_bytes / 2**20,
        "model_config_of": lambda _: SimpleNamespace(is_multimodal=False),
        "post_capture_kv_sizing_planned": lambda _: False,
        "reserve_for_deepep_a2a_mb": lambda _: 0,
        "resolved_view": lambda _: arguments,
        "resolving_view": lambda _: arguments,
        "use_mla_backend": lambda _: settings.model.attention[0].is_mla,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(memory_hook, name, answer)
    monkeypatch.setattr(cuda_graph_hook, "generate_decode_cuda_graph_batch_sizes", lambda _, largest: [largest])
    monkeypatch.setattr(qwen3_vl, "expand_multimodal_decode_graph_to_running_limit", lambda *_: None)
    memory_hook.handle_gpu_memory_settings(arguments)
    return float(arguments.mem_fraction_static)


def test_windows_take_the_tokens_of_the_engine() -> None:
    settings = Settings(model=model("gpt-oss-120b"), machine=machine("h100"), rest_bytes=20 * GIB + 4321)
    [full], [window] = settings.model.full_attention, settings.model.window_attention
    ledger = Ledger()
    work_out(settings, ledger)
    row = 2 * full.kv_heads * full.head_dim * 2
    me = SimpleNamespace(
        _full_layers_num=len(full.layers),
        _swa_layers_num=len(window.layers),
        _full_per_token=row,
        _swa_per_token=row,
        _draft_full_layers_num=0,
        _draft_swa_layers_num=0,
        _draft_swa_full_layers_num=0,
        _draft_cell_size=0,
        _fused_full_entry=None,
        _fused_swa_entry=None,
        _swa_full_tokens_ratio=0.8,
        _enable_unified_memory=False,
        _sliding_window_size=window.window_tokens,
        _page_size=64,
        validate_swa_pool_size=HybridSWAPoolConfigurator.validate_swa_pool_size,
        _make_pool_config=lambda full_tokens, swa_tokens: (full_tokens, swa_tokens),
    )
    for name in ("_full_cell_bytes", "_swa_cell_bytes", "_recompute_cell_size", "_solve_pool_sizes"):
        setattr(me, name, types.MethodType(getattr(HybridSWAPoolConfigurator, name), me))
    me._recompute_cell_size()
    tokens = int(settings.rest_bytes // me._cell_size)
    assert me._solve_pool_sizes(tokens, 64) == (ledger["kv_tokens"].value, ledger["window_tokens"].value)


def test_the_layers_of_hybrid_models_are_those_of_the_engine() -> None:
    qwen = Qwen3NextConfig(**{k: v for k, v in CONFIGS["qwen3-next-80b"].items() if k != "model_type"})
    assert tuple(qwen.linear_layer_ids) == model("qwen3-next-80b").state_layers
    for name in ("kimi-k3", "kimi-linear-48b"):
        kimi = KimiLinearConfig(**{k: v for k, v in CONFIGS[name].items() if k != "model_type"})
        assert tuple(kimi.linear_layer_ids) == model(name).state_layers
        assert tuple(kimi.full_attention_layer_ids) == model(name).attention[0].layers


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_engine_takes_the_flags(name: str) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for more in ({}, {"draft_tokens": 4, "replay_ring": True}, {"radix_cache": False, "overlap": False}):
        hybrid = bool(model(name).recurrence)
        if more.get("replay_ring") and not hybrid:
            continue
        settings = Settings(
            model=model(name),
            machine=machine("b300-hgx"),
            tp=2,
            dp=4,
            pp=2,
            dcp=2 if not model(name).window_attention else 1,
            ring_depth=16 if more.get("replay_ring") else None,
            max_running_requests=64,
            **more,
        )
        flags = engine_flags("sglang", settings, work_out(settings), l2_bytes=200 * GIB)
        parsed = parser.parse_args(["--model-path", "m", *flags.arguments])
        assert parsed.tp_size == 8
        assert parsed.hicache_size == 200 * GIB // 10**9
        if hybrid and settings.radix_cache:
            assert parsed.mamba_radix_cache_strategy == "extra_buffer"
        with pytest.raises(SystemExit):
            parser.parse_args(["--model-path", "m", *flags.arguments, "--no-such-flag"])
