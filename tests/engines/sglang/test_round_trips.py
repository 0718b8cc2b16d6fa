"""L1 -> L2 -> L3 -> a fresh engine -> back, bit for bit, in SGLang's own tree and controller."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.client.hicached import HicachedProcess, token_of
from tests.engines.sglang.conftest import Start
from tests.engines.sglang.devices import PAGE_TOKENS, Device, gdn, mha, mla, swa
from tests.engines.sglang.rig import assert_equal, extra_config, tokens

MODELS: dict[str, Callable[[], Device]] = {"mha": mha, "mla": mla, "gdn": gdn, "swa": swa}
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
HAVE = {  # which host layouts SGLang builds for which model
    "mha": LAYOUTS,
    "mla": ("layer_first", "page_first", "page_first_direct"),
    "gdn": ("page_first", "page_first_direct"),
    "swa": ("layer_first", "page_first", "page_first_direct"),
}
MODELS_IN_LAYOUTS = [(model, layout) for model, layouts in HAVE.items() for layout in layouts]
SHARING = {"layer_first": "layers", "page_first_direct": "layers", "page_first": "tokens", "page_head": "heads"}

revisions = itertools.count()


@pytest.fixture
def revision() -> str:
    """Weights that no other test has."""
    return f"round-trips {next(revisions)}"


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize(("model", "layout"), MODELS_IN_LAYOUTS)
def test_what_one_engine_computed_another_restores_bit_for_bit(
    hicached: HicachedProcess, start: Start, revision: str, model: str, layout: str, core: str
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    first = start(MODELS[model](), config, layout=layout, core=core)
    first.connect()
    computed = first.compute(tokens(16))
    first.settle()
    second = start(MODELS[model](), config, layout=layout, core=core)
    second.connect()
    slots = second.host_slots()
    assert second.prefetch(tokens(16)) == 16 * PAGE_TOKENS
    assert_equal(second.load(tokens(16)), computed)
    assert second.prefetch(tokens(16), salt="another tenant") == 0
    second.cache.reset()
    assert second.host_slots() == slots


@pytest.mark.parametrize(("model", "layout"), [each for each in MODELS_IN_LAYOUTS if each[0] in ("mha", "mla")])
def test_without_interface_v1_pages_go_through_tensors_and_are_the_same_objects(
    hicached: HicachedProcess, start: Start, revision: str, model: str, layout: str
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision, interface_v1=0)
    first = start(MODELS[model](), config, layout=layout)
    first.connect()
    computed = first.compute(tokens(16))
    first.settle()
    for interface_v1 in (0, 1):
        second = start(MODELS[model](), config | {"interface_v1": interface_v1}, layout=layout)
        second.connect()
        assert second.prefetch(tokens(16)) == 16 * PAGE_TOKENS
        assert_equal(second.load(tokens(16)), computed)


@pytest.mark.parametrize("writer", LAYOUTS)
def test_engines_share_between_layouts_of_one_byte_order_and_find_nothing_in_others(
    hicached: HicachedProcess, start: Start, revision: str, writer: str
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    first = start(mha(), config, layout=writer)
    first.connect()
    computed = first.compute(tokens(8))
    first.settle()
    for reader in LAYOUTS:
        second = start(mha(), config, layout=reader)
        second.connect()
        if SHARING[reader] == SHARING[writer]:
            assert second.prefetch(tokens(8)) == 8 * PAGE_TOKENS
            assert_equal(second.load(tokens(8)), computed)
        else:
            assert second.prefetch(tokens(8)) == 0


@pytest.mark.parametrize("model", ["mla", "gdn"])
def test_states_and_latents_are_shared_between_layouts_as_far_as_their_bytes_are_equal(
    hicached: HicachedProcess, start: Start, revision: str, model: str
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    first = start(MODELS[model](), config, layout="page_first_direct")
    first.connect()
    first.compute(tokens(8))
    first.settle()
    second = start(MODELS[model](), config, layout="page_first")
    second.connect()
    assert second.prefetch(tokens(8)) == 0  # attention lies by tokens there


def test_another_dtype_is_a_miss(hicached: HicachedProcess, start: Start, revision: str) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    first = start(mha(dtype=torch.bfloat16), config)
    first.connect()
    first.compute(tokens(8))
    first.settle()
    for dtype, found in ((torch.float16, 0), (torch.bfloat16, 8 * PAGE_TOKENS)):
        second = start(mha(dtype=dtype), config)
        second.connect()
        assert second.prefetch(tokens(8)) == found


@pytest.mark.parametrize("model", list(MODELS))
def test_a_shorter_prompt_and_a_longer_one_find_what_they_share(
    hicached: HicachedProcess, start: Start, revision: str, model: str
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision)
    first = start(MODELS[model](), config)
    first.connect()
    computed = first.compute(tokens(16))
    first.settle()
    second = start(MODELS[model](), config)
    second.connect()
    longer = tokens(16) + tokens(4, seed=1)
    assert second.prefetch(longer) == 16 * PAGE_TOKENS
    assert_equal(second.load(tokens(16)), computed)
    third = start(MODELS[model](), config)
    third.connect()
    shorter = tokens(16)[: 10 * PAGE_TOKENS]
    # A state is at the end of what was computed, and nowhere before it.
    assert third.prefetch(shorter) == (0 if model == "gdn" else 10 * PAGE_TOKENS)


def test_hicached_on_another_node(tmp_path: Path, start: Start, revision: str) -> None:
    process = HicachedProcess(tmp_path, tcp=True, has_tenants=True)
    process.start()
    try:
        config = extra_config(process.tcp_address, token=token_of(0), model_revision=revision)
        first = start(gdn(), config)
        first.connect()
        computed = first.compute(tokens(16))
        first.settle()
        second = start(gdn(), config)
        second.connect()
        assert second.prefetch(tokens(16)) == 16 * PAGE_TOKENS
        assert_equal(second.load(tokens(16)), computed)
    finally:
        process.end()


@pytest.mark.parametrize("model", ["mha", "gdn"])
def test_host_memory_of_the_shm_allocator_is_shared_with_hicached(
    hicached: HicachedProcess, start: Start, revision: str, model: str
) -> None:
    config = extra_config(hicached.address, token=token_of(0), model_revision=revision, allocator="shm")
    first = start(MODELS[model](), config)
    first.connect()
    assert first.shares_host_memory()
    computed = first.compute(tokens(16))
    first.settle()
    second = start(MODELS[model](), config)
    second.connect()
    assert second.prefetch(tokens(16)) == 16 * PAGE_TOKENS
    assert_equal(second.load(tokens(16)), computed)
