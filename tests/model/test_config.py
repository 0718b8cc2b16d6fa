"""What the model says it keeps in a cache, and the sizes it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.tiny_hybrid import TinyHybrid
from hicache.errors import ConfigError
from hicache.spec import PagedGroup, StateGroup
from tests.model.sequences import DEFAULT, SMALL, computed, model_of


def test_the_spec_has_a_full_a_window_and_a_state_group_with_the_layers_of_each() -> None:
    spec = model_of(DEFAULT).spec()
    attention, window, state = spec.groups
    assert attention == PagedGroup("attn", (3, 5), heads=2, head_dim=16, dtype="float32")
    assert window == PagedGroup("swa", (1,), heads=2, head_dim=16, dtype="float32", window_tokens=40)
    assert isinstance(state, StateGroup)
    assert (state.name, state.layers) == ("gdn", (0, 2, 4))
    assert spec.page_tokens == 16


def test_only_conv_and_temporal_leave_l1() -> None:
    state = model_of(DEFAULT).spec().groups[2]
    assert isinstance(state, StateGroup)
    assert [field.name for field in state.persistent_fields] == ["conv", "temporal"]
    rings = ("d", "k", "g", "rawv", "rawk", "beta", "conv", "count")
    assert [field.name for field in state.fields if field.transient] == [f"ring_{ring}" for ring in rings]
    assert state.object_bytes(16) == 3 * 4 * (3 * 192 + 4 * 16 * 16)


def test_the_spec_describes_the_tensors_that_the_model_writes() -> None:
    run = computed(SMALL, 20)
    for boundary in run.boundaries.values():
        state = next(group for group in model_of(SMALL).spec().groups if isinstance(group, StateGroup))
        for field in state.persistent_fields:
            assert boundary[field.name].shape == (len(state.layers), *field.shape)
            assert boundary[field.name].dtype == getattr(torch, field.dtype)


def test_a_group_without_layers_is_left_out() -> None:
    config = dataclasses.replace(DEFAULT, layers=("full", "full"))
    assert [group.name for group in TinyHybrid(config, seed=1).spec().groups] == ["attn"]


def test_models_that_compute_other_bits_have_other_namespaces() -> None:
    changed = [
        dataclasses.replace(SMALL, **change)
        for change in (
            {"layers": ("swa", "gdn", "full", "gdn", "full")},
            {"hidden": 64},
            {"mlp_hidden": 64},
            {"vocab": 98},
            {"block_tokens": 32},
            {"context_block_tokens": 64},
            {"page_tokens": 8},
            {"window_tokens": 11},
            {"conv_tokens": 3},
        )
    ]
    namespaces = [TinyHybrid(config, seed=1).spec().namespace for config in (SMALL, *changed)]
    namespaces.append(TinyHybrid(SMALL, seed=2).spec().namespace)
    namespaces.append(TinyHybrid(SMALL, seed=1).spec(revision="other").namespace)
    assert len(set(namespaces)) == len(namespaces)
    assert TinyHybrid(SMALL, seed=1).spec().namespace == namespaces[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "layers = .*one or more of full, swa, gdn"),
        ({"layers": ("mamba",)}, "layers = .*one or more of full, swa, gdn"),
        ({"query_heads": 3}, "query_heads = 3: expected a multiple of kv_heads = 2"),
        ({"page_tokens": 24}, "block_tokens = 64: expected a multiple of page_tokens = 24"),
        ({"context_block_tokens": 96}, "context_block_tokens = 96: expected a multiple of block_tokens = 64"),
        ({"tokens_max": 100}, "tokens_max = 100: expected a multiple of context_block_tokens"),
        ({"head_dim": 15}, "head_dim = 15: expected an even number"),
        ({"conv_tokens": 1}, "conv_tokens = 1: expected at least 2"),
        ({"ring_tokens": 0}, "ring_tokens = 0: expected at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(DEFAULT, **change)
