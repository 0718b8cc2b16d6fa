"""The cache of a vLLM engine as a CacheSpec: every byte of a block moves, and none beside it, in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hicache.connectors.vllm_spec import BlockGroup, EngineSpec, adoptable, described, engine_spec
from hicache.copies import PoolCopies
from hicache.errors import ConfigError
from hicache.groups import PagedGroup, StateGroup
from hicache.pools import L1Pool, L2Pool
from tests.connectors.vllm_fakes import (
    LAYOUTS,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KvCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformSpecs,
    attention_tensors,
    state_tensors,
)

BLOCKS = 6
NAMES = ["model.layers.0.attn", "model.layers.1.attn"]


def spec_of(config: KvCacheConfig, tensors: Mapping[str, torch.Tensor], *, page_tokens: int) -> EngineSpec:
    layers = described(config, tensors, tp_size=1)
    return engine_spec([layers], tp_size=1, page_tokens=page_tokens, model="m", revision="r")


def moved(
    config: KvCacheConfig, tensors: dict[str, torch.Tensor], blank: dict[str, torch.Tensor], *, page_tokens: int
) -> EngineSpec:
    """Block 4 of ``tensors`` goes through L2 into block 1 of ``blank``, in every group."""
    engine = spec_of(config, tensors, page_tokens=page_tokens)
    assert spec_of(config, blank, page_tokens=page_tokens) == engine
    l2 = L2Pool(engine.spec, [2] * len(engine.groups))
    for source, pool in ((True, tensors), (False, blank)):
        views = adoptable(engine, pool, rank=0, num_blocks=config.num_blocks)
        copies = PoolCopies(L1Pool.adopt(engine.spec, views), l2, setting="reference")
        for group in range(len(engine.groups)):
            copies.backup(group, [4], [1]) if source else copies.load(group, [1], [1])
    l2.close()
    return engine


def check_moved(source: torch.Tensor, target: torch.Tensor, before: torch.Tensor) -> None:
    assert torch.equal(target[1], source[4])
    rest = [block for block in range(BLOCKS) if block != 1]
    assert torch.equal(target[rest], before[rest])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_moves_to_the_byte_in_every_layout(layout: str, dtype: torch.dtype) -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES, FullAttentionSpec(16, dtype=dtype))])
    tensors = attention_tensors(NAMES, (BLOCKS, 2, 16, 24), dtype, layout)
    blank = attention_tensors(NAMES, (BLOCKS, 2, 16, 24), dtype, layout)
    for tensor in blank.values():
        tensor.neg_()
    before = {name: tensor.clone() for name, tensor in blank.items()}
    engine = moved(config, tensors, blank, page_tokens=16)
    for name in NAMES:
        check_moved(tensors[name], blank[name], before[name])
    (group,) = engine.spec.groups
    assert isinstance(group, PagedGroup)
    assert group.page_bytes(16) == 2 * 2 * 16 * 24 * dtype.itemsize
    assert group.heads == (2 if layout in ("LHBNC", "BHLNC") else 1)


def test_br_015_layouts_are_other_namespaces() -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES, FullAttentionSpec(16))])
    found = {
        layout: spec_of(
            config, attention_tensors(NAMES, (BLOCKS, 2, 16, 24), torch.float32, layout), page_tokens=16
        ).spec.namespace
        for layout in ("LBHNC", "LBNHC", "LHBNC")
    }
    assert len(set(found.values())) == len(found)


def test_packed_blocks_are_no_other_namespace_than_those_layer_by_layer() -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES, FullAttentionSpec(16))])
    namespaces = {
        spec_of(
            config, attention_tensors(NAMES, (BLOCKS, 2, 16, 24), torch.float32, layout), page_tokens=16
        ).spec.namespace
        for layout in ("LBHNC", "BLHNC")
    }
    assert len(namespaces) == 1


def test_fp8_mla_rows_of_656_bytes_move_and_are_one_head() -> None:
    spec = MLAAttentionSpec(64, cache_dtype_str="fp8_ds_mla")
    config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES, spec)])
    tensors = attention_tensors(NAMES, (BLOCKS, 1, 64, 656), torch.uint8)
    blank = attention_tensors(NAMES, (BLOCKS, 1, 64, 656), torch.uint8)
    for tensor in blank.values():
        tensor.bitwise_not_()
    before = {name: tensor.clone() for name, tensor in blank.items()}
    moved(config, tensors, blank, page_tokens=64)
    for name in NAMES:
        check_moved(tensors[name], blank[name], before[name])
    layers = described(config, tensors, tp_size=4)
    replica = engine_spec([layers] * 4, tp_size=4, page_tokens=64, model="m", revision="r").spec
    assert replica.slice_counts == (1,)
    assert [replica.rank(rank).shards[0][0].is_written for rank in range(4)] == [True, False, False, False]


def test_a_state_moves_without_its_padding() -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES, MambaSpec(16))])
    tensors = state_tensors(NAMES, BLOCKS, 176, 256)
    blank = state_tensors(NAMES, BLOCKS, 176, 256)
    memory = {name: torch.empty(0, dtype=torch.int8).set_(t.untyped_storage()).clone() for name, t in blank.items()}
    engine = moved(config, tensors, blank, page_tokens=16)
    (group,) = engine.spec.groups
    assert isinstance(group, StateGroup)
    assert group.object_bytes(16) == 2 * 176
    for name in NAMES:
        after = torch.empty(0, dtype=torch.int8).set_(blank[name].untyped_storage())
        expected = memory[name].clone()
        expected[256 : 256 + 176] = tensors[name][4].flatten()
        assert torch.equal(after, expected)


def test_groups_that_overlay_the_same_bytes_are_adopted_side_by_side() -> None:
    memory = torch.randint(-128, 128, (BLOCKS * 4096,), dtype=torch.int8)
    attention = memory.view(torch.float32).view(BLOCKS, 2, 16, 32)
    state = memory.as_strided((BLOCKS, 1, 1, 1000), (4096, 1000, 1000, 1))
    config = KvCacheConfig(BLOCKS, [GroupSpec(["s"], MambaSpec(16)), GroupSpec(["a"], FullAttentionSpec(16))])
    engine = spec_of(config, {"s": state, "a": attention}, page_tokens=16)
    views = adoptable(engine, {"s": state, "a": attention}, rank=0, num_blocks=BLOCKS)
    pool = L1Pool.adopt(engine.spec, views)
    assert pool.slot_counts == (BLOCKS, BLOCKS)
    assert engine.groups == (BlockGroup(0, 0, 1, is_state=True), BlockGroup(1, 0, 1, is_state=False))
    assert engine.spec.object_bytes == (1000, 4096)


def test_blocks_smaller_than_a_page_are_parts_of_it() -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES[:1], FullAttentionSpec(16)), GroupSpec(NAMES[1:], MambaSpec(32))])
    tensors = attention_tensors(NAMES[:1], (BLOCKS, 2, 16, 24), torch.float32) | state_tensors(
        NAMES[1:], BLOCKS, 40, 64
    )
    engine = spec_of(config, tensors, page_tokens=32)
    assert engine.groups == (
        BlockGroup(0, 0, 2, is_state=False),
        BlockGroup(0, 1, 2, is_state=False),
        BlockGroup(1, 0, 1, is_state=True),
    )
    assert [engine.groups[1].block_index(page) for page in range(3)] == [1, 3, 5]
    assert engine.spec.object_bytes == (2 * 16 * 24 * 4, 2 * 16 * 24 * 4, 40)


def test_a_state_block_smaller_than_a_page_is_the_one_at_its_end() -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES, MambaSpec(16))])
    engine = spec_of(config, state_tensors(NAMES, BLOCKS, 40, 64), page_tokens=48)
    assert [engine.groups[0].block_index(page) for page in range(2)] == [2, 5]


def test_kernel_blocks_are_grouped_to_those_of_the_manager() -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES, FullAttentionSpec(64))])
    tensors = attention_tensors(NAMES, (BLOCKS * 4, 2, 16, 24), torch.float32)
    blank = attention_tensors(NAMES, (BLOCKS * 4, 2, 16, 24), torch.float32)
    for tensor in blank.values():
        tensor.neg_()
    moved(config, tensors, blank, page_tokens=64)
    for name in NAMES:
        assert torch.equal(blank[name].unflatten(0, (BLOCKS, 4))[1], tensors[name].unflatten(0, (BLOCKS, 4))[4])


def test_windows_reach_as_far_as_vllm_keeps_them() -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES, SlidingWindowSpec(16, sliding_window=65))])
    engine = spec_of(config, attention_tensors(NAMES, (BLOCKS, 2, 16, 24), torch.float32), page_tokens=16)
    assert engine.spec.reach_pages == (4,)


def test_layers_of_one_group_with_other_sizes_are_groups_of_their_own() -> None:
    specs = UniformSpecs(16, {NAMES[0]: FullAttentionSpec(16), NAMES[1]: FullAttentionSpec(16, num_kv_heads=4)})
    tensors = attention_tensors(NAMES[:1], (BLOCKS, 2, 16, 24), torch.float32)
    tensors |= attention_tensors(NAMES[1:], (BLOCKS, 4, 16, 24), torch.float32)
    engine = spec_of(KvCacheConfig(BLOCKS, [GroupSpec(NAMES, specs)]), tensors, page_tokens=16)
    assert [block.group for block in engine.groups] == [0, 0]
    assert [group.layers for group in engine.spec.groups] == [(0,), (1,)]


def test_br_028_heads_are_shards_of_ranks_and_replicated_ones_are_stored_once() -> None:
    tensors = attention_tensors(NAMES, (BLOCKS, 1, 16, 24), torch.float32)
    for known, shards, written in ((None, 4, [True] * 4), (2, 2, [True, False, True, False])):
        config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES, FullAttentionSpec(16, num_kv_heads=1, max_tp_shards=known))])
        layers = described(config, tensors, tp_size=4)
        spec = engine_spec([layers] * 4, tp_size=4, page_tokens=16, model="m", revision="r").spec
        assert spec.slice_counts == (shards,)
        assert [spec.rank(rank).shards[0][0].is_written for rank in range(4)] == written
        for rank in range(4):
            assert spec.rank(rank).shards[0][0].size_bytes == 2 * 16 * 24 * 4


def test_pipeline_stages_have_their_own_layers_of_common_groups() -> None:
    first, second = ["l.0.state", "l.1.attn"], ["l.2.state", "l.3.state", "l.4.attn"]
    ranks = []
    for names in (first, second):
        states, attention = [name for name in names if "state" in name], [name for name in names if "attn" in name]
        config = KvCacheConfig(BLOCKS, [GroupSpec(states, MambaSpec(16)), GroupSpec(attention, FullAttentionSpec(16))])
        tensors = state_tensors(states, BLOCKS, 176, 4096)
        tensors |= attention_tensors(attention, (BLOCKS, 2, 16, 24), torch.float32)
        layers = described(config, tensors, tp_size=2)
        ranks += [(config, tensors, layers)] * 2
    engine = engine_spec([layers for _, _, layers in ranks], tp_size=2, page_tokens=16, model="m", revision="r")
    assert engine.spec.pp_layers == (2, 3)
    for rank, (config, tensors, _) in enumerate(ranks):
        views = adoptable(engine, tensors, rank=rank, num_blocks=config.num_blocks)
        pool = L1Pool.adopt(engine.spec, views, rank=rank)
        assert pool.slot_counts == (BLOCKS, BLOCKS)
    assert engine.layers == ((("l.0.state",), ("l.1.attn",)), (("l.2.state", "l.3.state"), ("l.4.attn",)))


def test_ranks_that_differ_are_refused() -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(NAMES, FullAttentionSpec(16))])
    ranks = [
        described(config, attention_tensors(NAMES, (BLOCKS, 2, 16, row), torch.float32), tp_size=2) for row in (24, 32)
    ]
    with pytest.raises(ConfigError, match="rank 1"):
        engine_spec(ranks, tp_size=2, page_tokens=16, model="m", revision="r")


@pytest.mark.parametrize(
    ("spec", "shape", "complaint"),
    [
        (ChunkedLocalAttentionSpec(16), (BLOCKS, 2, 16, 24), "ChunkedLocalAttentionSpec.*disable-hybrid"),
        (MambaSpec(16, mamba_cache_mode="none"), (BLOCKS, 1, 1, 176), "mamba-cache-mode align"),
        (FullAttentionSpec(16), (BLOCKS + 1, 2, 16, 24), "6 blocks"),
        (FullAttentionSpec(16), (BLOCKS, 2, 15, 1), "multiple of 16"),
    ],
)
def test_br_015_br_149_what_cannot_be_stored_is_refused_with_the_way_out(
    spec: Any, shape: tuple[int, ...], complaint: str
) -> None:
    tensors = {"a": torch.zeros(shape)}
    with pytest.raises(ConfigError, match=complaint):
        spec_of(KvCacheConfig(BLOCKS, [GroupSpec(["a"], spec)]), tensors, page_tokens=16)


def test_a_layer_of_several_tensors_is_refused() -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(["a"], MambaSpec(16))])
    with pytest.raises(ConfigError, match="one tensor"):
        described(config, {"a": [torch.zeros(1)]}, tp_size=1)  # type: ignore[dict-item]


def test_host_groups_are_refused() -> None:
    config = KvCacheConfig(BLOCKS, [GroupSpec(["a"], FullAttentionSpec(16), host_resident=True)])
    with pytest.raises(ConfigError, match="HiSparse"):
        described(config, {}, tp_size=1)
