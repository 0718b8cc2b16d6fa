"""The pools of small models on the device, as SGLang makes them: attention, latents, windows and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType

PAGE_TOKENS = 8
DEVICE_TOKENS = 512
STATE_LAYERS = [0, 1, 3]


@dataclass
class Device:
    """The pools of one model on the device."""

    components: tuple[ComponentType, ...]
    allocator: Any
    requests: Any
    tensors: Sequence[torch.Tensor]  # [tokens, ...] of attention, each layer's K and V or latents
    window: Sequence[torch.Tensor] = ()  # the same of layers with a sliding window
    states: Sequence[torch.Tensor] = ()  # [layers, slots, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def randomise(self) -> None:
        for tensor in (*self.tensors, *self.window, *self.states):
            tensor.normal_()


def mha(*, dtype: torch.dtype = torch.bfloat16, heads: int = 2, size: int = DEVICE_TOKENS) -> Device:
    pool = MHATokenToKVPool(
        size=size,
        page_size=PAGE_TOKENS,
        dtype=dtype,
        head_num=heads,
        head_dim=16,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return Device((ComponentType.FULL,), _paged(pool, size), _requests(), [*pool.k_buffer, *pool.v_buffer])


def mla(*, size: int = DEVICE_TOKENS) -> Device:
    pool = MLATokenToKVPool(
        size=size,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return Device((ComponentType.FULL,), _paged(pool, size), _requests(), list(pool.kv_buffer))


def gdn() -> Device:
    """One attention layer between three of a recurrent state, with the rings of ReplaySSM on."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=2,
        num_heads=4,
        head_dim=16,
        state_size=16,
        conv_kernel=4,
    )
    dtypes = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    requests = HybridReqToTokenPool(
        size=8,
        mamba_size=24,
        mamba_spec_state_size=8,
        max_context_len=1024,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=STATE_LAYERS, dtype=dtypes),
        mamba_layer_ids=STATE_LAYERS,
        enable_mamba_extra_buffer=True,
        enable_linear_replayssm=True,
        linear_replayssm_cache_len=16,
    )
    pool = HybridLinearKVPool(
        size=DEVICE_TOKENS,
        dtype=torch.bfloat16,
        page_size=PAGE_TOKENS,
        head_num=2,
        head_dim=16,
        full_attention_layer_ids=[2],
        device="cpu",
        mamba_pool=requests.mamba_pool,
    )
    states = requests.mamba_pool.mamba_cache
    return Device(
        (ComponentType.FULL, ComponentType.MAMBA),
        _paged(pool, DEVICE_TOKENS),
        requests,
        [*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer],
        states=[states.temporal, *states.conv],
        options={"enable_mamba_extra_buffer": True},
    )


def swa() -> Device:
    """Two layers of full attention and two with a window of two pages."""
    pool = SWAKVPool(
        size=DEVICE_TOKENS,
        size_swa=DEVICE_TOKENS // 2,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=16,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3],
        device="cpu",
    )
    allocator = SWATokenToKVPoolAllocator(
        DEVICE_TOKENS, DEVICE_TOKENS // 2, PAGE_TOKENS, torch.bfloat16, "cpu", pool, need_sort=False
    )
    return Device(
        (ComponentType.FULL, ComponentType.SWA),
        allocator,
        _requests(),
        [*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer],
        window=[*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer],
        options={"sliding_window_size": 2 * PAGE_TOKENS},
    )


def _paged(pool: Any, size: int) -> Any:
    return PagedTokenToKVPoolAllocator(size, PAGE_TOKENS, torch.bfloat16, "cpu", pool, need_sort=False)


def _requests() -> Any:
    return ReqToTokenPool(size=8, max_context_len=1024, device="cpu", enable_memory_saver=False)
