"""Planned bytes are the bytes that real pools allocate for the same model, on the rank that has most."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.costs.machine import GIB, machine
from hicache.plan.capacity import work_out
from hicache.plan.formula import Ledger
from hicache.plan.lengths import LengthMix
from hicache.plan.model import Attention, ModelShape, Recurrence, Weights
from hicache.plan.ratio import solve
from hicache.plan.settings import Settings
from hicache.plan.sizes import kv_sizes, state_sizes
from hicache.plan.tiers import TierRequest, cache_spec, plan_tiers
from hicache.pools.l1 import L1Pool
from hicache.pools.l2 import L2Pool
from hicache.sizing import l2_size_bytes
from hicache.spec import StateGroup

PAGES, SLOTS = 5, 3
H200 = machine("h200")


@st.composite
def tiny_models(draw: st.DrawFn, *, attention: str | None = None) -> ModelShape:
    """Layers of attention, MHA to MQA or MLA, with or without windows and recurrent state of any kind."""
    layer_count = draw(st.integers(2, 9))
    kinds = draw(st.lists(st.sampled_from("fws"), min_size=layer_count, max_size=layer_count))
    kinds[draw(st.integers(0, layer_count - 1))] = "f"
    is_mla = draw(st.booleans()) if attention is None else attention == "mla"
    layers = {kind: tuple(i for i, found in enumerate(kinds) if found == kind) for kind in "fws"}
    if is_mla:
        layers["f"], layers["w"] = tuple(sorted(layers["f"] + layers["w"])), ()
    geometry: dict[str, Any] = {"query_heads": 8, "head_dim": 16, "v_head_dim": 16}
    if is_mla:
        geometry |= {"latent_dim": 128 * draw(st.integers(1, 3)), "rope_dim": 16 * draw(st.integers(1, 3))}
    else:
        geometry |= {"kv_heads": draw(st.sampled_from([1, 2, 4, 8]))}
    found = [Attention(layers["f"], **geometry)]
    if layers["w"]:
        found.append(Attention(layers["w"], window_tokens=100, **geometry))
    return ModelShape(
        name="tiny",
        layer_count=layer_count,
        attention=tuple(found),
        recurrence=(draw(recurrences(layers["s"])),) if layers["s"] else (),
        weights=Weights(0.0, 0.0),
        experts=None,
        context_tokens=4096,
    )


@st.composite
def recurrences(draw: st.DrawFn, layers: tuple[int, ...]) -> Recurrence:
    kind = draw(st.sampled_from(["gdn", "kda", "mamba2", "mamba1", "lightning"]))
    heads, dim = draw(st.sampled_from([4, 8])), draw(st.sampled_from([8, 16]))
    return Recurrence(
        kind,
        layers,
        heads=heads,
        head_dim=1 if kind == "mamba1" else dim,
        groups={"kda": heads, "mamba1": 0, "lightning": 0}.get(kind, 2),
        state_dim=dim,
        conv_kernel=1 if kind == "lightning" else 4,
    )


@st.composite
def tiny_settings(draw: st.DrawFn) -> Settings:
    model = draw(tiny_models())
    mla = model.attention[0].is_mla
    dtypes = ["bfloat16", "float32", "fp8_e4m3", "fp4_e2m1"] + (["fp8_ds_mla"] if mla else [])
    return Settings(
        model=model,
        machine=H200,
        tp=draw(st.sampled_from([1, 2, 4])),
        pp=draw(st.integers(1, min(3, model.layer_count))),
        kv_dtype=draw(st.sampled_from(dtypes)),
        state_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        conv_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        page_tokens=draw(st.sampled_from([1, 16, 64])),
        lengths=LengthMix.single(input_tokens=100, output_tokens=20),
    )


def tensor_bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(tensor_bytes(tensor) for tensor in (tensors.values() if isinstance(tensors, dict) else tensors))


@settings(max_examples=60, deadline=None)
@given(tiny_settings())
def test_a_page_and_a_slot_take_the_bytes_of_l1(planned: Settings) -> None:
    spec = cache_spec(planned)
    kv, state = kv_sizes(planned, Ledger()), state_sizes(planned, Ledger())
    paged, states, full, window = [], [], [], []
    for rank in range(spec.rank_count):
        pool = L1Pool(spec, rank=rank, pages=PAGES, state_slots=SLOTS)
        by_kind = {"full": 0, "window": 0, "state": 0}
        for index, group in enumerate(pool.rank.groups):
            if group is None:
                continue
            kind = "state" if isinstance(group, StateGroup) else "window" if group.window_tokens else "full"
            by_kind[kind] += tensor_bytes(pool.state[index] if kind == "state" else pool.paged[index])
        full.append(by_kind["full"])
        window.append(by_kind["window"])
        states.append(by_kind["state"])
        paged.append(by_kind["full"] + by_kind["window"])
    tokens = PAGES * planned.page_tokens
    assert max(full) == kv.full_cell_bytes * tokens
    assert max(window) == kv.window_cell_bytes * tokens
    assert max(paged) <= kv.bytes_per_token * tokens  # no rank has more than the stages with most of each kind
    assert max(states) == state.slot_bytes * SLOTS


@settings(max_examples=25, deadline=None)
@given(tiny_settings(), st.integers(1, 1 << 22))
def test_l2_holds_what_is_planned_in_no_more_than_its_bytes(planned: Settings, more: int) -> None:
    spec = cache_spec(planned)
    l2_bytes = (1 << 22) + more
    request = TierRequest(l2_bytes=l2_bytes)
    tiers = plan_tiers(planned, work_out(planned), request, Ledger())
    [held] = tiers.held
    counts = [(held.slots or {})[group.name] for group in spec.groups]
    for rank in range(0, spec.rank_count, spec.tp_size):
        pool = L2Pool(spec, counts, rank=rank)
        try:
            assert pool.size_bytes <= l2_bytes
        finally:
            pool.close()
    more_pages = [count + (not isinstance(group, StateGroup)) for count, group in zip(counts, spec.groups, strict=True)]
    ranks = range(0, spec.rank_count, spec.tp_size)
    assert max(l2_size_bytes(spec.rank(rank), more_pages) for rank in ranks) > l2_bytes
    pages = min(c for c, g in zip(counts, spec.groups, strict=True) if not isinstance(g, StateGroup))
    assert held.tokens <= pages * planned.page_tokens


@settings(max_examples=100, deadline=None)
@given(
    tiny_settings(),
    st.integers(1, 2 * GIB),
    st.one_of(st.integers(0, 4096), st.integers(0, 100 * GIB)),
    st.sampled_from([0.1, 0.9, 3.0]),
    st.sampled_from(["sglang", "vllm"]),
)
def test_more_memory_never_fits_less(planned: Settings, rest: int, more: int, ratio: float, engine: str) -> None:
    """At one ratio a byte more may make a slot more, which KV gives: the engine's rule. Never more than that."""
    small, large = (
        work_out(replace(planned, rest_bytes=size, ratio=ratio, engine=engine)) for size in (rest, rest + more)
    )
    assert small.pools.state_slots <= large.pools.state_slots
    slot_tokens = small.state.slot_bytes // max(1, small.kv.full_cell_bytes) + 2 * planned.page_tokens
    assert small.kv_tokens <= large.kv_tokens + slot_tokens
    if not planned.model.recurrence or engine == "vllm":
        assert small.kv_tokens <= large.kv_tokens
        assert small.concurrent_requests <= large.concurrent_requests
        assert small.max_running_requests <= large.max_running_requests


@settings(max_examples=30, deadline=None)
@given(tiny_settings(), st.integers(1, 64 << 20), st.one_of(st.integers(0, 4096), st.integers(0, 64 << 20)))
def test_more_memory_never_fits_less_at_the_best_ratio(planned: Settings, rest: int, more: int) -> None:
    small, large = (solve(replace(planned, rest_bytes=size)) for size in (rest, rest + more))
    if small is not None:
        assert large is not None
        assert small.requests <= large.requests
        at_it = work_out(replace(planned, rest_bytes=rest, ratio=small.ratio))
        assert at_it.concurrent_requests == small.requests


@settings(max_examples=60, deadline=None)
@given(tiny_settings(), st.integers(1, 4 * GIB), st.integers(1, 20))
def test_pools_never_take_more_than_there_is(planned: Settings, rest: int, ratio_tenths: int) -> None:
    found = work_out(replace(planned, rest_bytes=rest, ratio=ratio_tenths / 10))
    if found.concurrent_requests:
        windows = int(found.kv_tokens * planned.window_ratio)
        taken = found.kv_tokens * found.kv.full_cell_bytes + found.pools.state_pool_bytes
        taken += found.kv.window_cell_bytes * (windows // planned.page_tokens * planned.page_tokens)
        assert taken <= rest
        assert rest - taken < found.kv.full_cell_bytes * planned.page_tokens * 2 + found.state.slot_bytes + (
            found.kv.window_cell_bytes * planned.page_tokens * 2
        )
