"""Pages of every kind of host pool, in SGLang's own classes, through the methods that its controller calls."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolTransfer
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool, LogicalHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost, get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics

from hicache.connectors.sglang import HiCacheStorage
from hicache.errors import ConfigError
from tests.client.hicached import HicachedProcess, token_of
from tests.engines.sglang.devices import PAGE_TOKENS
from tests.engines.sglang.rig import extra_config, server

P = PAGE_TOKENS
PAGES = 6
KEYS = [f"{number:064x}" for number in range(100, 100 + PAGES)]
PAGED = ("layer_first", "page_first", "page_first_direct")
WHOLE = PoolHitPolicy.ALL_PAGES
TRAILING = PoolHitPolicy.TRAILING_PAGES

revisions = itertools.count()


@pytest.fixture
def config(hicached: HicachedProcess) -> dict[str, Any]:
    """Of weights that no other test has."""
    return extra_config(hicached.address, token=token_of(0), model_revision=f"pools {next(revisions)}")


@contextlib.contextmanager
def storage_of(config: dict[str, Any], pools: dict[str, Any], **ranks: Any) -> Iterator[HiCacheStorage]:
    """A storage with these pools; ``kv`` is the anchor."""
    given = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1} | ranks
    with server(config):
        storage = HiCacheStorage(
            HiCacheStorageConfig(
                is_mla_model=False,
                enable_storage_metrics=True,
                is_page_first_layout=False,
                model_name="org/model",
                extra_config=config,
                **given,
            ),
            {},
        )
        try:
            storage.register_mem_pool_host(pools["kv"])
            for name, pool in pools.items():
                storage.register_mem_host_pool_v2(pool, name)
            storage.on_host_pools_registered()
            assert storage._pages is not None
            assert storage._pages.wait_ready(timeout_s=10)
            yield storage
        finally:
            storage.close()


def device_of(pool: Any) -> Any:
    (info,) = pool.get_device_pool_infos()
    return info.buffer_info


def mha_pool(layout: str, *, v_head_dim: int = 16) -> Any:
    device = MHATokenToKVPool(
        size=16 * P,
        page_size=P,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=16,
        v_head_dim=v_head_dim,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device_of(device)
    return get_mha_host_pool_cls(info)(
        info, 2.0, 0, P, layout, pin_memory=False, device_capacity_tokens=16 * P, start_layer=0, end_layer=3
    )


def dsa_pools(layout: str, *, allocator: str = "default") -> dict[str, Any]:
    """Its kernels want pages of 64 tokens."""
    with server(extra_config("unix:///nowhere.sock")):
        device = DSATokenToKVPool(
            size=16 * 64,
            page_size=64,
            kv_lora_rank=32,
            dtype=torch.bfloat16,
            qk_rope_head_dim=8,
            layer_num=3,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=40,
        )
    info = device.get_device_pool_infos()[0].buffer_info
    anchor = MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        64,
        layout,
        pin_memory=False,
        device_capacity_tokens=16 * 64,
        start_layer=0,
        end_layer=3,
        target_layer_num=3,
        allocator_type=allocator,
    )
    indexer = make_dsa_indexer_pool_decl(device)
    return {
        "kv": anchor,
        "indexer": DSAIndexerPoolHost(indexer, anchor, pin_memory=False, allocator_type=allocator),
    }


def paged_pool(name: str, layout: str) -> Any:
    buffers = [torch.zeros(16, 320, dtype=torch.uint8) for _ in range(3)]
    return DeepSeekV4PagedHostPool(name, buffers, 320, 16, P, layout, pin_memory=False)


def state_pool(name: str, layout: str) -> Any:
    scores = [SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(64, 24)), ring_size=4) for _ in "ab"]
    return DeepSeekV4StateHostPool(name, scores, 16, P, layout, pin_memory=False)


def deepseek_v4_pools(layout: str) -> dict[str, Any]:
    """An anchor without bytes, compressed pools at its indices, and window states."""
    return {
        "kv": LogicalHostPool(16 * P, P, layout),
        "deepseek_v4_c4": paged_pool("deepseek_v4_c4", layout),
        "deepseek_v4_c128": paged_pool("deepseek_v4_c128", layout),
        "swa": paged_pool("swa", layout),
        "deepseek_v4_c4_state": state_pool("deepseek_v4_c4_state", layout),
    }


def mamba_pools(layout: str) -> dict[str, Any]:
    """With a state beside the temporal and conv states, which SGLang's own zero copy does not carry."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(3, 8, 4, 16, 16),
        conv=(torch.zeros(3, 8, 64, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros(8, 40, dtype=torch.bfloat16),),
    )
    states = MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout=layout)
    return {"kv": mha_pool(layout), "mamba": states}


def fill(pools: dict[str, Any]) -> None:
    for pool in pools.values():
        for tensor in tensors_of(pool):
            tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))


def tensors_of(pool: Any) -> list[torch.Tensor]:
    """All bytes of a pool."""
    if isinstance(pool, LogicalHostPool):
        return []
    buffers = pool.index_k_with_scale_buffer if isinstance(pool, DSAIndexerPoolHost) else pool.kv_buffer
    return [each.view(torch.uint8) for each in (buffers if isinstance(buffers, list | tuple) else [buffers])]


def indices(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * pool.page_size, (page + 1) * pool.page_size) for page in pages])


def transfer(name: str, pool: Any, pages: Sequence[int], policy: PoolHitPolicy = WHOLE) -> PoolTransfer:
    return PoolTransfer(name, host_indices=indices(pool, pages), keys=KEYS[: len(pages)], hit_policy=policy)


def page_bytes(pool: Any, page: int) -> bytes:
    return bytes(pool.get_data_page(page * pool.page_size).contiguous().view(torch.uint8).flatten().tolist())


KINDS: dict[str, tuple[Callable[[str], dict[str, Any]], tuple[str, ...]]] = {
    "dsa": (dsa_pools, PAGED),
    "deepseek v4": (deepseek_v4_pools, PAGED),
    "mamba with side states": (mamba_pools, PAGED[1:]),
}


@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind, (_, layouts) in KINDS.items() for layout in layouts]
)
def test_pages_of_all_pools_come_back_to_other_slots(config: dict[str, Any], kind: str, layout: str) -> None:
    make, _ = KINDS[kind]
    source, target = make(layout), make(layout)
    fill(source)
    stored, wanted = [5, 2, 7, 0, 3, 4], [1, 6, 0, 5, 2, 7]
    with storage_of(config, source) as storage:
        sides = [transfer(name, pool, stored) for name, pool in source.items() if name != "kv"]
        assert all(map(all, storage.batch_set_v2(sides).values()))
        assert all(storage.batch_set_v1(KEYS, indices(source["kv"], stored)))
    with storage_of(config, target) as storage:
        sides = [transfer(name, pool, wanted) for name, pool in target.items() if name != "kv"]
        assert storage.batch_exists_v2(KEYS, sides).kv_hit_pages == PAGES
        assert all(storage.batch_get_v1(KEYS, indices(target["kv"], wanted)))
        assert all(map(all, storage.batch_get_v2(sides).values()))
    for name in source:
        for there, here in zip(stored, wanted, strict=True):
            assert page_bytes(target[name], here) == page_bytes(source[name], there), name


@pytest.mark.parametrize("kind", ["dsa", "deepseek v4"])
def test_pools_without_a_token_axis_are_shared_wherever_the_attention_pages_are(
    config: dict[str, Any], kind: str
) -> None:
    make, layouts = KINDS[kind]
    source = make(layouts[0])
    fill(source)
    name = "indexer" if kind == "dsa" else "deepseek_v4_c4"
    with storage_of(config, source) as storage:
        assert all(storage.batch_set_v2([transfer(name, source[name], range(PAGES))])[name])
    for layout in layouts[1:]:
        if kind == "dsa" and layout == "page_first":
            continue  # attention lies by tokens there, so that nothing could be restored
        target = make(layout)
        with storage_of(config, target) as storage:
            assert all(storage.batch_get_v2([transfer(name, target[name], range(PAGES))])[name])
        assert [page_bytes(target[name], page) for page in range(PAGES)] == [
            page_bytes(source[name], page) for page in range(PAGES)
        ]


def test_br_100_an_anchor_without_bytes_has_no_pages_of_its_own(config: dict[str, Any]) -> None:
    pools = deepseek_v4_pools("page_first")
    with storage_of(config, pools) as storage:
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_exists_v2(KEYS, []).kv_hit_pages == 0
        assert storage.batch_exists_v2(KEYS, [transfer("swa", pools["swa"], [0, 1], TRAILING)]).kv_hit_pages == 0
        assert all(storage.batch_set_v1(KEYS, indices(pools["kv"], range(PAGES))))
        assert all(storage.batch_get_v1(KEYS, indices(pools["kv"], range(PAGES))))
        assert storage.batch_set(KEYS, [pools["kv"].get_dummy_flat_data_page()] * PAGES)
        assert len(storage.batch_get(KEYS, [pools["kv"].get_dummy_flat_data_page()] * PAGES)) == PAGES


def test_every_boundary_at_which_all_pools_can_go_on_is_told(config: dict[str, Any]) -> None:
    pools = mamba_pools("page_first")
    with storage_of(config, pools) as storage:
        storage.batch_set_v1(KEYS[:5], indices(pools["kv"], range(5)))
        for page in (1, 3, 5):  # the last one lies behind the attention pages
            state = PoolTransfer("mamba", host_indices=torch.tensor([page]), keys=[KEYS[page]])
            assert storage.batch_set_v2([state]) == {"mamba": [True]}
        asked = PoolTransfer("mamba", keys=["__placeholder__"], hit_policy=TRAILING)
        found = storage.batch_exists_v2(KEYS, [asked])
        assert found.restorable_prefix_pages == [2, 4]
        assert found.kv_hit_pages == 4
        assert found.extra_pool_hit_pages == {"kv": 5, "mamba": 4}
        unknown = PoolTransfer("mamba", keys=[], hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        assert storage.batch_exists_v2(KEYS, [unknown]).kv_hit_pages == 5


def test_what_is_stored_costs_a_lookup_and_no_copy(config: dict[str, Any]) -> None:
    pool = mha_pool("page_first_direct")
    fill({"kv": pool})
    with storage_of(config, {"kv": pool}) as storage:
        assert all(storage.batch_set_v1(KEYS, indices(pool, range(PAGES))))
        assert storage.get_stats().backup_pgs == [PAGES]
        assert all(storage.batch_set_v1(KEYS, indices(pool, range(PAGES))))
        assert storage.get_stats() == StorageMetrics()
        assert all(storage.batch_get_v1(KEYS, indices(pool, range(PAGES))))
        stats = storage.get_stats()
        assert stats.prefetch_pgs == [PAGES]
        assert stats.prefetch_bandwidth[0] > 0


def test_a_batch_is_answered_page_by_page(config: dict[str, Any]) -> None:
    pool = mha_pool("layer_first")
    fill({"kv": pool})
    with storage_of(config, {"kv": pool}) as storage:
        storage.batch_set_v1([KEYS[0], KEYS[2]], indices(pool, [0, 2]))
        assert storage.batch_get_v1(KEYS[:4], indices(pool, [4, 5, 6, 7])) == [True, False, True, False]
        assert storage.batch_exists(KEYS) == 1
        assert [storage.exists(key) for key in KEYS[:3]] == [True, False, True]
        target = pool.get_dummy_flat_data_page()
        assert storage.get(KEYS[1], target) is None
        assert storage.get(KEYS[2], target) is target
        assert torch.equal(target.view(torch.uint8), pool.get_data_page(2 * P).view(torch.uint8))
        assert storage.set(KEYS[3], pool.get_data_page(3 * P))
        assert storage.exists(KEYS[3])


def test_k_and_v_of_different_width(config: dict[str, Any]) -> None:
    source, target = mha_pool("page_first", v_head_dim=8), mha_pool("page_first", v_head_dim=8)
    fill({"kv": source})
    with storage_of(config, {"kv": source}) as storage:
        assert all(storage.batch_set_v1(KEYS, indices(source, range(PAGES))))
    with storage_of(config, {"kv": target}) as storage:
        assert all(storage.batch_get_v1(KEYS, indices(target, range(PAGES))))
    for here, there in zip(tensors_of(target), tensors_of(source), strict=True):
        assert torch.equal(here[: PAGES * P], there[: PAGES * P])
    with pytest.raises(ConfigError, match="interface_v1"), storage_of(config | {"interface_v1": 0}, {"kv": source}):
        pass


def test_indices_that_are_no_pages_are_refused_and_nothing_is_touched(config: dict[str, Any]) -> None:
    pool = mha_pool("page_first_direct")
    with storage_of(config, {"kv": pool}) as storage:
        for wrong in (torch.arange(1, P + 1), torch.arange(P - 1), torch.arange(10_000 * P, 10_001 * P)):
            with pytest.raises(ValueError, match="host indices"):
                storage.batch_get_v1(KEYS[:1], wrong)
        with pytest.raises(ValueError, match="contiguous bytes"):
            storage.batch_get(KEYS[:1], [torch.zeros(3)])


def test_a_pool_whose_pages_cannot_be_addressed_is_refused(config: dict[str, Any]) -> None:
    pool = mha_pool("page_first")
    pool.layout = "page_first_kv_split"
    with pytest.raises(ConfigError, match="host pool"), storage_of(config, {"kv": pool}):
        pass


def test_a_pool_that_comes_later_and_has_larger_pages_is_served_too(config: dict[str, Any]) -> None:
    anchor = mha_pool("page_first")
    draft = MHATokenToKVPoolHost(
        device_of(
            MHATokenToKVPool(
                size=16 * P,
                page_size=P,
                dtype=torch.float32,
                head_num=8,
                head_dim=64,
                layer_num=8,
                device="cpu",
                enable_memory_saver=False,
            )
        ),
        2.0,
        0,
        P,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=16 * P,
        start_layer=0,
        end_layer=8,
    )
    with storage_of(config, {"kv": anchor}) as storage:
        storage.register_mem_host_pool_v2(draft, "draft")
        assert storage._pages is not None
        assert storage._pages.wait_ready(timeout_s=10)
        fill({"draft": draft})
        before = page_bytes(draft, 3)
        assert storage.batch_set_v2([transfer("draft", draft, range(PAGES))]) == {"draft": [True] * PAGES}
        draft.kv_buffer.zero_()
        assert storage.batch_get_v2([transfer("draft", draft, range(PAGES))]) == {"draft": [True] * PAGES}
        assert page_bytes(draft, 3) == before


def test_br_077_a_key_twice_in_a_batch_and_an_empty_batch(config: dict[str, Any]) -> None:
    pools = {"kv": mha_pool("page_first_direct")}
    fill(pools)
    twice, nothing = [KEYS[0], KEYS[1], KEYS[0]], torch.empty(0, dtype=torch.int64)
    with storage_of(config, pools) as storage:
        assert storage.batch_set_v1(twice, indices(pools["kv"], [0, 1, 0])) == [True] * 3
        assert storage.batch_get_v1(twice, indices(pools["kv"], [2, 3, 4])) == [True] * 3
        assert [page_bytes(pools["kv"], page) for page in (2, 3, 4)] == [
            page_bytes(pools["kv"], page) for page in (0, 1, 0)
        ]
        assert storage.batch_set_v1([], nothing) == storage.batch_get_v1([], nothing) == []
        assert storage.batch_get_v2([PoolTransfer("kv", host_indices=nothing, keys=None)]) == {"kv": []}
        assert storage.batch_exists([]) == 0


def test_br_067_pages_behind_a_gap_are_no_prefix(config: dict[str, Any]) -> None:
    pools = {"kv": mha_pool("page_first_direct")}
    with storage_of(config, pools) as storage:
        assert all(storage.batch_set_v1(KEYS[2:], indices(pools["kv"], range(2, PAGES))))
        assert storage.batch_exists(KEYS) == 0
        assert all(storage.batch_set_v1(KEYS[:2], indices(pools["kv"], range(2))))
        assert storage.batch_exists(KEYS) == PAGES


def test_a_pool_that_is_registered_again_is_served_once(config: dict[str, Any]) -> None:
    pools = {"kv": mha_pool("page_first_direct")}
    with storage_of(config, pools) as storage:
        assert storage._pages is not None
        links = len(storage._pages._links)
        storage.register_mem_host_pool_v2(pools["kv"], "kv")
        assert len(storage._pages._links) == links
        assert all(storage.batch_set_v1(KEYS, indices(pools["kv"], range(PAGES))))
