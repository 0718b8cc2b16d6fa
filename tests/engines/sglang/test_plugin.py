"""hicache's plugin in SGLang as released: memory that can never shrink, and frees that wait for hicached."""

from __future__ import annotations

import fcntl
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool
from sglang.srt.mem_cache.pool_host.common import ShmHostTensorAllocator
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.plugins.hook_registry import HookRegistry

from hicache.connectors import sglang_plugin
from hicache.connectors.host_pages import HostPages, PageItem, PagesSpec
from hicache.connectors.host_pages_holds import OwnedPage, holds_of
from hicache.connectors.sglang_pools import pool_layout
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from tests.client.small_daemon import SmallDaemon
from tests.client.support import QUICK, wait_until
from tests.engines.sglang import devices, rig
from tests.engines.sglang.test_pools import KEYS, dsa_pools, storage_of

P = devices.PAGE_TOKENS


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As SGLang loads it, and gone after the test."""
    for target in sglang_plugin.TARGETS:
        owner, _, name = target.rpartition(".")
        monkeypatch.setattr(pkgutil.resolve_name(owner), name, getattr(pkgutil.resolve_name(owner), name))
    HookRegistry.reset()
    sglang_plugin.register()
    HookRegistry.apply_hooks()
    assert HookRegistry._patched == set(sglang_plugin.TARGETS), "SGLang has moved something that the plugin hooks"
    yield
    HookRegistry.reset()


def host_pool(layout: str = "page_first_direct", *, allocator: str = "shm") -> Any:
    device = devices.mha().allocator.get_kvcache()
    (info,) = device.get_device_pool_infos()
    return MHATokenToKVPoolHost(
        info.buffer_info,
        2.0,
        0,
        devices.PAGE_TOKENS,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=devices.DEVICE_TOKENS,
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
    assert holds_of(pool) is holds_of(pool)
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
        item = PageItem(b"page", ((address, size_bytes),), OwnedPage(holds, int(indices[0]) // pool.page_size))
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
        engine = rig.Engine(arguments, devices.gdn())
        try:
            for entry in engine.cache.host_pool_group.entries:
                assert holds_of(entry.host_pool) is not None, entry.name
        finally:
            engine.close()


def shm_mamba_pools() -> dict[str, Any]:
    """With a state beside the others, of which SGLang itself tells no address."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(3, 8, 4, 16, 16),
        conv=(torch.zeros(3, 8, 64, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros(8, 40, dtype=torch.bfloat16),),
    )
    layout = "page_first_direct"
    states = MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout=layout, allocator_type="shm")
    return {"kv": host_pool(), "mamba": states}


def shm_dsa_pools() -> dict[str, Any]:
    return dsa_pools("page_first_direct", allocator="shm")


def shm_v4_pools() -> dict[str, Any]:
    buffers = [torch.zeros(16, 320, dtype=torch.uint8) for _ in range(3)]
    compressed = DeepSeekV4PagedHostPool(
        "deepseek_v4_c4", buffers, 320, 16, P, "page_first_direct", pin_memory=False, allocator_type="shm"
    )
    return {"kv": LogicalHostPool(16 * P, P, "page_first_direct"), "deepseek_v4_c4": compressed}


@pytest.mark.parametrize(
    ("make", "name", "owner"),
    [
        (shm_mamba_pools, "mamba", "mamba"),
        (shm_dsa_pools, "indexer", "kv"),
        (shm_v4_pools, "deepseek_v4_c4", "kv"),
    ],
)
def test_a_page_in_doubt_is_kept_where_its_index_is_given_out(
    daemon: SmallDaemon, make: Callable[[], dict[str, Any]], name: str, owner: str
) -> None:
    pools = make()
    config = rig.extra_config(daemon.address, deadline_s=0.3, allocator="shm")
    with storage_of(config, pools) as storage:
        assert storage._pages is not None
        page_tokens = pools[owner].page_size
        indices = pools[owner].alloc(2 * page_tokens)
        source = None if owner == name else owner
        moved = PoolTransfer(name, host_indices=indices, keys=KEYS[:2], indices_from_pool=source)
        assert storage.batch_set_v2([moved]) == {name: [True, True]}
        free = pools[owner].available_size()
        release = daemon.faults.hang(where="before_bytes", operation="get", times=100)
        assert storage.batch_get_v2([moved]) == {name: [False, False]}
        pools[owner].free(indices)
        assert pools[owner].available_size() == free, "pages that hicached may still write to can be given out"
        pools[owner].clear()
        assert pools[owner].available_size() == pools[owner].size - 2 * page_tokens
        release.set()
        wait_until(lambda: pools[owner].available_size() == pools[owner].size, what="the end of the holds")


def test_an_allocator_that_has_changed_gives_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_plugin, "_allocate_sealed", lambda allocator: None)
    allocator = ShmHostTensorAllocator()
    assert allocator.allocate((2, 3), torch.bfloat16, "cpu").shape == (2, 3)
    assert len(allocator.fds) == 1
    assert not fcntl.fcntl(allocator.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_br_062_weights_that_change_in_place_end_the_use_of_what_is_stored(
    daemon: SmallDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    monkeypatch.setattr(sglang_plugin.LIVE_WEIGHTS, "_has_changed", False)
    pools = {"kv": host_pool()}
    config = rig.extra_config(daemon.address)
    indices = pools["kv"].alloc(2 * P)
    with storage_of(config, pools) as storage:
        assert storage.batch_set_v1(KEYS[:2], indices) == [True, True]
        assert storage.batch_exists(KEYS[:2]) == 2
        with pytest.raises(AttributeError):  # of what is no updater, behind the hook
            SchedulerWeightUpdaterManager.update_weights_from_tensor(object(), None)
        assert sglang_plugin.LIVE_WEIGHTS.has_changed
        assert storage.batch_exists(KEYS[:2]) == 0
        assert storage.batch_get_v1(KEYS[:2], indices) == [False, False]
        assert storage.batch_set_v1(KEYS[2:4], indices) == [False, False]
    with pytest.raises(ConfigError, match="given in place"), storage_of(config | {"model_revision": ""}, pools):
        pass
    with storage_of(config | {"model_revision": "after"}, pools) as storage:
        assert storage.batch_exists(KEYS[:2]) == 0
    with storage_of(config, pools) as storage:
        assert storage.batch_exists(KEYS[:2]) == 2, "who goes back to the weights may say so"
