"""What a rank has, reads and writes follows from the spec of the replica; what cannot be shared out is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import SpecError
from hicache.spec import CacheSpec, Group, HeadSplit, PagedGroup, StateField, StateGroup

ATTENTION = PagedGroup("attn", (3, 7, 11), heads=2, head_dim=256, dtype="bfloat16")
LATENT = PagedGroup.mla("mla", layers=(0, 1), latent_dim=512, rope_dim=64, dtype="bfloat16")


def spec_of(*groups: Group, **settings: object) -> CacheSpec:
    return CacheSpec("model", "revision", groups, **settings)  # type: ignore[arg-type]


def gdn(*, key_heads: int, value_heads: int, layers: tuple[int, ...] = (0, 1, 2)) -> StateGroup:
    """The state of a gated delta rule (Qwen3-Next), heads of 128 elements, a convolution over 4 tokens."""
    sections = ((key_heads, 128), (key_heads, 128), (value_heads, 128))
    channels = 128 * (2 * key_heads + value_heads)
    return StateGroup(
        "gdn",
        layers,
        (
            StateField("conv", (3, channels), "bfloat16", split=HeadSplit(1, sections)),
            StateField("temporal", (value_heads, 128, 128), "float32", split=HeadSplit(0)),
        ),
    )


def mamba2(*, heads: int, head_dim: int, groups: int, state_dim: int) -> StateGroup:
    """The state of a Mamba2 mixer (Nemotron-H, Zamba2), channels first, as vLLM can be told to keep it."""
    sections = ((heads, head_dim), (groups, state_dim), (groups, state_dim))
    channels = heads * head_dim + 2 * groups * state_dim
    return StateGroup(
        "mamba",
        (0, 1),
        (
            StateField("conv", (channels, 3), "bfloat16", split=HeadSplit(0, sections)),
            StateField("temporal", (heads, head_dim, state_dim), "float32", split=HeadSplit(0)),
        ),
    )


def local_shapes(spec: CacheSpec, rank: int) -> dict[str, tuple[int, ...]]:
    group = spec.rank(rank).groups[0]
    assert isinstance(group, StateGroup)
    return {field.name: field.shape for field in group.fields}


# -- a rank's part ---------------------------------------------------------------------------------------------------


def test_the_only_rank_has_all() -> None:
    spec = spec_of(ATTENTION, LATENT, gdn(key_heads=4, value_heads=8, layers=(4, 5)))
    rank = spec.rank()
    assert [len(shards) for shards in rank.shards] == [1, 1, 1]
    for group, shards, size in zip(spec.groups, rank.shards, spec.object_bytes, strict=True):
        assert shards[0].index == 0
        assert shards[0].is_written
        assert shards[0].size_bytes == size == group.object_bytes(64)
    assert [group.object_bytes(64) for group in rank.groups if group] == list(spec.object_bytes)
    assert spec.rank(0) == rank


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
def test_gdn_states_have_the_shapes_of_vllm_and_sglang(tp_size: int) -> None:
    """Both divide all q, k and v channels, and the value heads, by the number of ranks."""
    spec = spec_of(gdn(key_heads=16, value_heads=32), tp_size=tp_size)
    for rank in range(tp_size):
        assert local_shapes(spec, rank) == {
            "conv": (3, (2 * 16 * 128 + 32 * 128) // tp_size),
            "temporal": (32 // tp_size, 128, 128),
        }


@pytest.mark.parametrize(("groups", "tp_size"), [(8, 1), (8, 8), (8, 2), (1, 1), (1, 2), (1, 8)])
def test_mamba2_states_have_the_shapes_of_vllm_and_sglang(groups: int, tp_size: int) -> None:
    """Both add groups until every rank has one: B and C of one group are on all ranks that have heads of it."""
    replicated = groups if groups % tp_size == 0 else tp_size
    spec = spec_of(mamba2(heads=128, head_dim=64, groups=groups, state_dim=128), tp_size=tp_size)
    for rank in range(tp_size):
        assert local_shapes(spec, rank) == {
            "conv": ((128 * 64 + 2 * replicated * 128) // tp_size, 3),
            "temporal": (128 // tp_size, 64, 128),
        }


def test_a_slice_of_a_convolution_has_its_part_of_each_section() -> None:
    spec = spec_of(gdn(key_heads=4, value_heads=8), tp_size=2, tp_lcm=4)
    first, second = spec.rank(1).shards[0]  # of slices 2 and 3
    assert (first.index, second.index) == (2, 3)
    assert first.spans == (((0, 128), (256, 384), (512, 768)), ((0, 2),))
    assert second.spans == (((128, 256), (384, 512), (768, 1024)), ((2, 4),))
    whole = spec_of(gdn(key_heads=4, value_heads=8), tp_size=4).rank(3).shards[0]
    assert [shard.spans for shard in whole] == [(((0, 512),), ((0, 2),))]


def test_groups_of_a_convolution_that_ranks_share_are_in_every_slice() -> None:
    spec = spec_of(mamba2(heads=8, head_dim=4, groups=1, state_dim=16), tp_lcm=4)
    spans = [shard.spans[0] for shard in spec.rank().shards[0]]
    assert spans == [((0, 8), (32, 64)), ((8, 16), (32, 64)), ((16, 24), (32, 64)), ((24, 64),)]
    conv_bytes, temporal_bytes = (8 + 32) * 3 * 2, 2 * 4 * 16 * 4
    assert {shard.size_bytes for shard in spec.rank().shards[0]} == {2 * (conv_bytes + temporal_bytes)}


def test_uneven_stages_have_their_own_layers_and_some_lack_a_group() -> None:
    spec = spec_of(ATTENTION, gdn(key_heads=2, value_heads=2), tp_size=2, pp_layers=(4, 5, 3))
    layers = [[group and group.layers for group in spec.rank(rank).groups] for rank in range(6)]
    assert layers[0] == layers[1] == [(3,), (0, 1, 2)]
    assert layers[2] == layers[3] == [(7,), None]
    assert layers[4] == layers[5] == [(11,), None]
    assert spec.shards == ((0, 1, 2, 3, 4, 5), (0, 1))
    assert [spec.rank(rank).lacks(1) for rank in range(6)] == [False, False, True, True, True, True]
    assert spec.rank(5).shards[1] == ()
    assert (spec.rank(5).stage, spec.rank(5).tp_rank) == (2, 1)
    for group in (-1, 2):
        with pytest.raises(IndexError):
            spec.rank(0).lacks(group)


@given(
    heads=st.integers(1, 16),
    others=st.integers(1, 16),
    slices=st.integers(1, 16),
    tp_size=st.integers(1, 16),
    stages=st.sampled_from([None, (4, 4), (1, 6, 1)]),
)
def test_every_shard_is_written_by_one_rank_and_read_by_all_that_have_its_heads(
    heads: int, others: int, slices: int, tp_size: int, stages: tuple[int, ...] | None
) -> None:
    attention = PagedGroup("attn", (0, 3, 7), heads, 8, "bfloat16")
    state = StateGroup(
        "s", (2, 4), (StateField("f", (heads + others,), "int8", split=HeadSplit(0, ((heads, 1), (others, 1)))),)
    )
    described = {"tp_size": tp_size, "tp_lcm": slices, "pp_layers": stages}
    is_possible = slices % tp_size == 0 and all(
        count % parts == 0 or parts % count == 0 for count in (heads, others) for parts in (tp_size, slices)
    )
    if not is_possible:
        with pytest.raises(SpecError):
            spec_of(attention, state, **described)
        return
    spec = spec_of(attention, state, **described)
    ranks = [spec.rank(rank) for rank in range(spec.rank_count)]
    for group in range(2):
        read = Counter(shard.index for rank in ranks for shard in rank.shards[group])
        written = Counter(shard.index for rank in ranks for shard in rank.shards[group] if shard.is_written)
        assert written == Counter(spec.shards[group])
        assert set(read) == set(written)
        assert len(set(read.values())) == 1
        sizes = {shard.index: shard.size_bytes for rank in ranks for shard in rank.shards[group]}
        assert sum(sizes.values()) == spec.object_bytes[group]
        assert max(sizes.values()) <= spec.object_bytes_max
    for rank in ranks:  # what a rank has is what its shards have, each head of attention in one of them
        local = rank.groups[0]
        if local is not None:
            assert isinstance(local, PagedGroup)
            spans = [shard.spans[0][0] for shard in rank.shards[0]]
            assert spans[0][0] == 0
            assert spans[-1][1] == local.heads
            assert all(left[1] == right[0] for left, right in pairwise(spans))
            assert sum(shard.size_bytes for shard in rank.shards[0]) == local.object_bytes(64)


# -- the namespace ---------------------------------------------------------------------------------------------------


def test_replicas_with_common_slices_share_a_namespace_whatever_their_size() -> None:
    specs = [spec_of(ATTENTION, LATENT, tp_size=tp_size, tp_lcm=8) for tp_size in (1, 2, 4, 8)]
    assert len({spec.namespace for spec in specs}) == 1
    assert {spec.slice_counts for spec in specs} == {(2, 1)}
    assert spec_of(ATTENTION, LATENT, tp_size=8).namespace == specs[0].namespace
    assert spec_of(ATTENTION, LATENT, tp_size=1).namespace != specs[0].namespace


def test_one_stage_is_the_same_as_none() -> None:
    assert spec_of(ATTENTION, pp_layers=(12,)).namespace == spec_of(ATTENTION).namespace
    assert spec_of(ATTENTION, pp_layers=(4, 8)).namespace != spec_of(ATTENTION, pp_layers=(5, 7)).namespace


def test_heads_of_an_axis_are_the_same_as_one_section_of_them() -> None:
    field = StateField("f", (4, 2), "int8", split=HeadSplit(0))
    spelled = dataclasses.replace(field, split=HeadSplit(0, ((4, 1),)))
    wider = dataclasses.replace(field, split=HeadSplit(0, ((2, 2),)))
    namespaces = [spec_of(StateGroup("g", (0,), (each,))).namespace for each in (field, spelled, wider)]
    assert namespaces[0] == namespaces[1] != namespaces[2]


# -- what is refused -------------------------------------------------------------------------------------------------

FIELD = StateField("conv", (3, 10), "int8")


def state_of(split: HeadSplit, **settings: object) -> CacheSpec:
    return spec_of(StateGroup("gdn", (0,), (dataclasses.replace(FIELD, split=split),)), **settings)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: spec_of(dataclasses.replace(ATTENTION, heads=6), tp_size=4),
            r"attn\.heads = 6: expected a multiple or a divisor of tp_size = 4: 6 heads go with 1, 2, 3, 6 or k \* 6",
        ),
        (
            lambda: spec_of(dataclasses.replace(ATTENTION, heads=4), tp_size=2, tp_lcm=6),
            r"attn\.heads = 4: expected a multiple or a divisor of tp_lcm = 6",
        ),
        (lambda: spec_of(ATTENTION, tp_size=2, tp_lcm=3), "tp_lcm = 3: expected a multiple of tp_size = 2, or None"),
        (lambda: spec_of(ATTENTION, tp_lcm=0), "tp_lcm = 0"),
        (lambda: spec_of(ATTENTION, pp_layers=()), r"pp_layers = \(\): expected at least 1 layer in each"),
        (lambda: spec_of(ATTENTION, pp_layers=(12, 0)), r"pp_layers = \(12, 0\)"),
        (lambda: spec_of(ATTENTION, pp_layers=(4, 6)), r"attn\.layers = \[11\]: expected layers within \[0, 10\)"),
        (lambda: spec_of(ATTENTION, pp_layers=(2, 10)), r"pp_layers = \(2, 10\): expected .* stage 0 has none"),
        (
            lambda: spec_of(dataclasses.replace(ATTENTION, heads=1 << 16), tp_lcm=1 << 16, pp_layers=(4, 8)),
            "shards of a page = 131072: expected at most 65536 .* a smaller tp_lcm",
        ),
        (lambda: spec_of(ATTENTION, tp_size=2).rank(), "rank = None: expected one of the 2 ranks of the replica"),
        (lambda: spec_of(ATTENTION, tp_size=2).rank(2), "rank = 2: expected one of the 2 ranks"),
        (lambda: spec_of(ATTENTION).rank(-1), "rank = -1"),
        (lambda: state_of(HeadSplit(2)), r"conv\.split\.axis = 2: expected an axis of the shape \(3, 10\)"),
        (lambda: state_of(HeadSplit(-1)), r"conv\.split\.axis = -1"),
        (
            lambda: state_of(HeadSplit(1, ((2, 3), (2, 3)))),
            r"conv\.split\.sections = .*: expected sections of 10 elements together, as axis 1 has, not of 12",
        ),
        (
            lambda: state_of(HeadSplit(1, ((0, 3), (2, 5)))),
            r"conv\.split\.sections = .* heads and elements of at least",
        ),
        (
            lambda: state_of(HeadSplit(1, ((3, 2), (2, 2))), tp_size=2),
            r"gdn\.conv\.split\.sections = 3: expected a multiple or a divisor of tp_size = 2: 3 heads go with 1, 3",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_shared_out_is_refused_with_its_value_the_limit_and_what_would_do(
    make: object, named: str
) -> None:
    with pytest.raises(SpecError, match=named):
        make()  # type: ignore[operator]


def test_lists_as_configuration_files_give_them_are_the_same_as_tuples() -> None:
    lists = CacheSpec("m", "r", [dataclasses.replace(ATTENTION, layers=[0, 3])], pp_layers=[2, 2])  # type: ignore[arg-type]
    assert lists == CacheSpec("m", "r", (dataclasses.replace(ATTENTION, layers=(0, 3)),), pp_layers=(2, 2))


def test_transient_fields_follow_the_ranks_and_no_slices() -> None:
    """A ring never leaves L1: slices that would not divide it are no reason to refuse."""
    ring = StateField("ring", (2, 6), "int8", transient=True, split=HeadSplit(1))
    kept = StateField("kept", (4,), "int8", split=HeadSplit(0))
    group = StateGroup("gdn", (0,), (ring, kept))
    assert local_shapes(spec_of(group, tp_size=2, tp_lcm=4), 1) == {"ring": (2, 3), "kept": (2,)}
    with pytest.raises(SpecError, match=r"gdn\.ring\.split\.sections = 6"):
        spec_of(group, tp_size=4)


def test_a_spec_and_its_ranks_need_no_torch() -> None:
    code = (
        "import json, sys\n"
        "from hicache.spec import CacheSpec, PagedGroup\n"
        "spec = CacheSpec('m', '1', (PagedGroup('g', (0, 1), 8, 128, 'bfloat16'),), tp_size=2, tp_lcm=4)\n"
        "print(json.dumps([[shard.index for shard in spec.rank(1).shards[0]], 'torch' in sys.modules]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(answer.stdout) == [[2, 3], False]
