"""hicache's plugin in SGLang as released: memory that can never shrink, and frees that wait for hicached."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.pool_host.common import ShmHostTensorAllocator
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.plugins.hook_registry import HookRegistry

from hicache.connectors import sglang_plugin
from hicache.connectors.host_pages import HostPages, PageItem, PagesSpec
from hicache.connectors.host_pages_holds import holds_of
from hicache.connectors.sglang_pools import pool_layout
from hicache.outcome import Outcome
from tests.client.small_daemon import SmallDaemon
from tests.client.support import QUICK, wait_until
from tests.engines.sglang import rig


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As SGLang loads it, and gone after the test."""
    from sglang.srt.mem_cache.pool_host import base, common, mamba

    for owner, name in (
        (common.ShmHostTensorAllocator, "allocate"),
        (base.HostKVCache, "free"),
        (base.HostKVCache, "clear"),
        (mamba.MambaPoolHost, "free"),
        (mamba.MambaPoolHost, "clear"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    HookRegistry.reset()
    sglang_plugin.register()
    HookRegistry.apply_hooks()
    assert len(HookRegistry._patched) == 5, "SGLang has moved something that the plugin hooks"
    yield
    HookRegistry.reset()


def host_pool(layout: str = "page_first_direct", *, allocator: str = "shm") -> Any:
    device = rig.mha().allocator.get_kvcache()
    (info,) = device.get_device_pool_infos()
    return MHATokenToKVPoolHost(
        info.buffer_info,
        2.0,
        0,
        rig.PAGE_TOKENS,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=rig.DEVICE_TOKENS,
        start_layer=0,
        end_layer=3,
        allocator_type=allocator,
    )


def test_the_shm_allocator_gives_sealed_memory_of_the_right_shape() -> None:
    allocator = ShmHostTensorAllocator()
    tensor = allocator.allocate((2, 3, 5000), torch.bfloat16, "cpu")
    assert (tensor.shape, tensor.dtype) == (torch.Size((2, 3, 5000)), torch.bfloat16)
    assert fcntl.fcntl(allocator.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    tensor.normal_()
    assert bytes(allocator.mm[:8]) == tensor.view(torch.uint8).reshape(-1)[:8].numpy().tobytes()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_host_pools_have_holds_and_descriptors(layout: str) -> None:
    pool = host_pool(layout)
    [memory] = pool_layout(pool, "kv").memory
    assert memory.fd == pool.fd
    assert memory.holds is holds_of(pool)
    assert pool.available_size() == pool.size
    assert pool_layout(host_pool(allocator="default"), "kv").memory[0].fd is None


def test_a_page_in_doubt_is_not_handed_out_and_comes_back(daemon: SmallDaemon) -> None:
    pool = host_pool()
    layout = pool_layout(pool, "kv")
    holds = holds_of(pool)
    assert holds is not None
    pages = HostPages(
        daemon.address,
        spec=PagesSpec((("model", "m"),), 1 << 20),
        pools=layout.memory,
        settings=QUICK,
    )
    try:
        assert pages.wait_ready(timeout_s=20)
        indices = pool.alloc(2 * pool.page_size)
        address, size_bytes = pool.get_page_buffer_meta(indices)[0][0], pool.get_page_buffer_meta(indices)[1][0]
        item = PageItem(b"page", ((address, size_bytes),))
        pool.kv_buffer.normal_()
        assert pages.shares(address)
        assert pages.put([item]) == [Outcome.OK]
        release = daemon.faults.hang(where="before_bytes", operation="get")
        assert pages.get([item], deadline_s=0.2) == [Outcome.DEADLINE]
        assert pool.free(indices) == len(indices)
        assert pool.available_size() == pool.size - pool.page_size
        pool.clear()
        assert pool.available_size() == pool.size - pool.page_size
        assert int(indices[0]) not in pool.alloc(pool.available_size()).tolist()
        release.set()
        wait_until(lambda: pool.available_size() == pool.page_size)
        assert pool.alloc(pool.page_size).tolist() == indices[: pool.page_size].tolist()
    finally:
        pages.close()


def test_state_pools_have_holds_too() -> None:
    with rig.server(rig.extra_config("unix:///nowhere")) as arguments:
        engine = rig.Engine(arguments, rig.gdn())
        try:
            for entry in engine.cache.host_pool_group.entries:
                assert holds_of(entry.host_pool) is not None, entry.name
        finally:
            engine.close()
