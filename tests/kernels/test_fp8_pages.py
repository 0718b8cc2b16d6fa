"""Pages stored as float8: the kernels give the bits of the reference, which keeps the bound of the format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hicache import HiCache, PrefetchPolicy
from hicache.copies import PoolCopies
from hicache.errors import SpecError
from hicache.kernels.fp8_pages import dequantise_tiles, quantise_tiles, quantised_table
from hicache.kernels.legs import PagedPool
from hicache.kernels.quantised_reference import dequantise_pages, dequantised, quantise_pages, quantised
from hicache.pools import L1Pool, L2Pool
from hicache.spec import CacheSpec, PagedGroup, differing_fields
from tests.engine.specs import fill_with_noise
from tests.engine.test_reference import heads_outside, one_tensor, poisoned, tensor_per_plane
from tests.kernels.devices import DEVICE, assert_same_memory, memory_of, pinned_twin, twin

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
PLANE = (4, 2, 16)


def difficult(dtype: torch.dtype, *, pages: int = 5) -> torch.Tensor:
    """[1 layer, pages, 2 planes, ...]: numbers of every size, every bit pattern, and planes of one kind each."""
    pool = torch.empty(1, pages, 2, *PLANE, dtype=dtype)
    fill_with_noise(pool, 7)  # NaN and infinities among them
    generator = torch.Generator().manual_seed(3)
    pool[0, 0] = torch.randn(2, *PLANE, generator=generator)
    pool[0, 1, 0] = torch.randn(PLANE, generator=generator) * torch.logspace(-9, 0, 16)  # subnormal beside large
    pool[0, 1, 1] = -0.0
    pool[0, 2, 0] = torch.finfo(dtype).max
    pool[0, 2, 1] = torch.finfo(dtype).smallest_normal * torch.randn(PLANE, generator=generator)
    pool[0, 3, 0].view(-1)[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    pool[0, 3, 1] = torch.nan
    return pool


def nan_alike(tensor: torch.Tensor) -> torch.Tensor:
    """With one NaN for all of them: what a NaN carries is not promised."""
    return torch.where(tensor.isnan(), torch.nan, tensor)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("adopt", [one_tensor, tensor_per_plane, heads_outside])
def test_the_kernels_give_the_bits_of_the_reference(adopt: Callable[..., PagedPool], dtype: torch.dtype) -> None:
    pool = adopt(difficult(dtype))
    pages, scales = poisoned(6, 1, 2, *PLANE, dtype=torch.float8_e4m3fn), torch.full((6, 1, 2), -1.0)
    kernel_pool, kernel_pages, kernel_scales = twin(pool), pinned_twin(pages), pinned_twin(scales)
    table = quantised_table(kernel_pool, kernel_pages)
    order = {"sources": [4, 0, 3, 1, 2], "targets": [5, 3, 2, 0, 4]}
    quantise_pages(pool, pages, scales, **order)
    quantise_tiles(table, kernel_pages, kernel_scales, **order)
    assert_same_memory(kernel_pages, pages)
    assert_same_memory(kernel_scales, scales)
    assert_same_memory(kernel_pool, pool)

    back = adopt(torch.zeros(1, 5, 2, *PLANE, dtype=dtype))
    kernel_back = twin(back)
    order = {"sources": [5, 3, 2, 0], "targets": [0, 1, 2, 3]}
    dequantise_pages(pages, scales, back, **order)
    dequantise_tiles(quantised_table(kernel_back, kernel_pages), kernel_pages, kernel_scales, **order)
    for held, kernel_held in zip(flat(back), flat(kernel_back), strict=True):
        numbers = memory_of(kernel_held).view(dtype), memory_of(held).view(dtype)
        assert torch.equal(*(nan_alike(tensor).view(torch.uint8) for tensor in numbers))
    assert_same_memory(kernel_pages, pages)


def flat(pool: PagedPool) -> list[torch.Tensor]:
    return [pool] if isinstance(pool, torch.Tensor) else [tensor for held in pool for tensor in flat(held)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_loaded_is_within_half_a_unit_in_the_last_place(dtype: torch.dtype) -> None:
    """Of e4m3: 2^-4 of the value, or 2^-10 of the scale where that is more. Some errors come near to it."""
    wide = difficult(dtype).transpose(0, 1).contiguous()
    stored, scales = quantised(wide)
    loaded = dequantised(stored, scales, dtype)
    finite = wide.isfinite()
    bound = torch.maximum(wide.double().abs() / 16, scales[..., None, None, None].double() / 1024)
    error = (loaded.double() - wide.double()).abs()
    assert bool((error <= bound)[finite].all())
    assert bool((error > bound / 2)[finite].any())
    assert bool(loaded.isnan()[~finite].all())
    assert bool(loaded.isfinite()[finite].all())
    assert torch.equal(loaded.signbit()[finite], wide.signbit()[finite])


@pytest.mark.parametrize("dtype", FLOATS)
def test_storing_what_was_loaded_changes_no_value(dtype: torch.dtype) -> None:
    """A page that goes down and up many times is rounded once."""
    once = dequantised(*quantised(difficult(dtype).transpose(0, 1)), dtype)
    twice = dequantised(*quantised(once), dtype)
    assert torch.equal(nan_alike(once).view(torch.uint8), nan_alike(twice).view(torch.uint8))


def quantised_spec(**settings: object) -> CacheSpec:
    group = PagedGroup("full", (0, 3), heads=4, head_dim=8, dtype="bfloat16", stored_dtype="float8_e4m3fn")
    return CacheSpec("test", "1", (dataclasses.replace(group, **settings),), page_tokens=4, tp_lcm=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("setting", ["reference", "kernel"])
def test_pages_go_down_in_half_the_bytes_and_come_back(setting: str, by_layer: bool) -> None:
    """Two shards, each with scales of its own behind its payload, and nothing behind these."""
    spec = quantised_spec()
    assert spec.shard_bytes(0, 0) == 2 * 2 * (4 * 2 * 8 + 4)
    l1, l2 = L1Pool(spec, pages=3, device=DEVICE), L2Pool(spec, (8,), device=DEVICE)
    l1.paged[0][:, 1] = torch.randn(l1.paged[0][:, 1].shape)
    copies = PoolCopies(l1, l2, setting=setting)
    copies.backup(0, [1], [7])
    for layers in [slice(1, 2), slice(0, 1)] if by_layer else [None]:
        copies.load(0, [7], [2], layers=layers)
    memory_of(l1.paged[0])
    for part in range(2):
        heads = l1.paged[0][:, 1].cpu()[..., 2 * part : 2 * part + 2, :].unsqueeze(0)
        stored, scales = quantised(heads)
        assert torch.equal(l2.view(0, part)[7].view(torch.uint8), stored[0].view(torch.uint8))
        assert torch.equal(l2.scales(0, part)[7], scales[0])
        shard = bytes(l2.buffer[l2.offset(0, 7) + 4096 * part :][: spec.shard_bytes(0, 0)])
        assert shard == bytes(stored.view(torch.uint8).numpy().tobytes() + scales.numpy().tobytes())
        loaded = l1.paged[0][:, 2].cpu()[..., 2 * part : 2 * part + 2, :]
        assert torch.equal(loaded, dequantised(stored, scales, torch.bfloat16)[0])
    del copies
    l2.close()


@pytest.mark.skipif(DEVICE != "cpu", reason="which copies serve the device makes no difference to what is above them")
@pytest.mark.parametrize("l1", [{"l1_pages": 8}, {"l1_bytes": 1 << 16}], ids=["pool", "arena"])
def test_another_engine_gets_the_pages_from_l3_within_the_bound(l1: dict[str, int], tmp_path: Path) -> None:
    tokens = list(range(17))
    spec, computed = quantised_spec(), torch.randn(2, 4, 2, 4, 4, 8, generator=torch.Generator().manual_seed(1))
    settings = {**l1, "l2_bytes": 1 << 20, "l3": f"lmdb://{tmp_path}/store", "l3_capacity_bytes": 64 << 20}
    policy = PrefetchPolicy("wait_complete", hard_cap_s=20.0, threshold_tokens=0)
    for is_first in (True, False):
        with HiCache.open(spec, prefetch=policy, **settings) as cache:
            request = cache.match(tokens)
            cache.prefetch(request)
            cache.wait(request)
            restored = cache.load(request)
            assert restored is not None
            assert cache.extend(request, tokens=17)
            held = cache.l1.paged[0]
            pages = request.page_table(0)[:4]
            if is_first:
                assert restored.tokens == 0
                held[:, pages] = computed.to(held.dtype)
                cache.store(request, computed=16)
                assert cache.wait_stored(request, timeout_s=20.0).tokens == 16
            else:
                assert restored.tokens == 16
                wanted = computed.to(held.dtype).double()
                assert bool(((held[:, pages].double() - wanted).abs() <= wanted.abs().clamp(min=2**-12) / 16).all())
                assert not torch.equal(held[:, pages].double(), wanted)
            cache.release(request)


def test_what_is_stored_is_a_part_of_the_namespace_and_off_by_default() -> None:
    plain, stored = quantised_spec(stored_dtype=None), quantised_spec()
    assert "group.0.stored_dtype" not in plain.descriptor
    assert plain.namespace != stored.namespace
    assert differing_fields(plain.descriptor, stored.descriptor) == ["group.0.stored_dtype: None != 'float8_e4m3fn'"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"stored_dtype": "float8_e5m2"}, "stored_dtype"),
        ({"dtype": "uint8"}, "dtype"),
        ({"head_dim": 6}, "head_dim"),
    ],
)
def test_what_cannot_be_stored_as_float8_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        quantised_spec(**settings)


@pytest.mark.skipif(DEVICE != "cpu", reason="the pool would have to be touched on a device")
def test_br_005_pages_above_two_to_the_31_elements_are_quantised_right() -> None:
    """Pools and pages are reserved, not touched: only the pages around the boundary and at the end take memory."""
    elements = 64 * 576
    boundary = 2**31 // elements
    pool = torch.empty(boundary + 4, 1, 64, 1, 576, dtype=torch.bfloat16)
    pages = torch.empty(boundary + 4, 1, 1, 64, 1, 576, dtype=torch.float8_e4m3fn)
    scales = torch.empty(boundary + 4, 1, 1)
    top = [boundary + 3, boundary]
    pool[top] = torch.randn(2, 1, 64, 1, 576, generator=torch.Generator().manual_seed(2)).to(pool.dtype)
    table = quantised_table([pool], pages)
    quantise_tiles(table, pages, scales, sources=top, targets=top[::-1])
    stored, powers = quantised(pool[top].unsqueeze(1))
    assert torch.equal(pages.view(torch.uint8)[top[::-1]], stored.view(torch.uint8))
    assert torch.equal(scales[top[::-1]], powers)
    dequantise_tiles(table, pages, scales, sources=top, targets=[boundary + 1, boundary + 2])
    loaded = dequantised(stored, powers, pool.dtype)[:, 0]
    assert torch.equal(pool[[boundary + 2, boundary + 1]], loaded)
