"""The page kernels move the bits that their reference moves, whatever the pool is made of, and touch nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels import reference, tile_copies
from hicache.kernels.legs import PagedPool
from hicache.kernels.pages import gather_pages, page_table, scatter_pages
from hicache.kernels.tile_copies import BUS_PROGRAMS_MAX, gather_tiles
from tests.engine.specs import POISON, fill_with_noise
from tests.engine.test_reference import ADOPTIONS, noisy, one_tensor, poisoned, tensor_per_layer, tensor_per_plane
from tests.kernels.devices import DEVICE, assert_same_memory, pinned_twin, twin

LAYERS, PAGES, SLOTS = 2, 7, 6


def assert_equals_reference(pool: PagedPool, pages: torch.Tensor, *, sources: list[int], targets: list[int]) -> None:
    """There and back, by kernels between twins of what the reference copies between."""
    kernel_pool, kernel_pages = twin(pool), pinned_twin(pages)
    reference.gather_pages(pool, pages, sources=sources, targets=targets)
    gather_pages(kernel_pool, kernel_pages, sources=sources, targets=targets)
    assert_same_memory(kernel_pages, pages)
    assert_same_memory(kernel_pool, pool)

    page_count = len(pool[0]) if isinstance(pool[0], torch.Tensor) else len(pool[0][0])
    others = [page for page in range(page_count) if page not in sources][: len(targets)]
    reference.scatter_pages(pages, pool, sources=targets[: len(others)], targets=others)
    scatter_pages(kernel_pages, kernel_pool, sources=targets[: len(others)], targets=others)
    assert_same_memory(kernel_pool, pool)
    assert_same_memory(kernel_pages, pages)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("adopt", ADOPTIONS, ids=lambda adopt: adopt.__name__)
@pytest.mark.parametrize("inner", [(3, 2, 5), (4, 2, 8)], ids=["ragged", "aligned"])
def test_pages_arrive_bit_for_bit_and_nothing_else_changes(
    adopt: Callable[..., PagedPool], inner: tuple[int, ...], dtype: torch.dtype
) -> None:
    pool = adopt(noisy(LAYERS, PAGES, 2, *inner, dtype=dtype))
    pages = poisoned(SLOTS, LAYERS, 2, *inner, dtype=dtype)
    assert_equals_reference(pool, pages, sources=[6, 0, 3], targets=[1, 5, 4])


@pytest.mark.parametrize("adopt", ADOPTIONS, ids=lambda adopt: adopt.__name__)
def test_a_slice_of_heads_arrives(adopt: Callable[..., PagedPool]) -> None:
    """tp_lcm slices: the other heads of the pool are not touched."""
    pool = adopt(noisy(LAYERS, PAGES, 2, 3, 6, 8, dtype=torch.bfloat16)[:, :, :, :, 2:4])
    pages = poisoned(SLOTS, LAYERS, 2, 3, 2, 8, dtype=torch.bfloat16)
    assert_equals_reference(pool, pages, sources=[6, 0], targets=[1, 5])


@pytest.mark.parametrize("adopt", [one_tensor, tensor_per_layer, tensor_per_plane])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(576, torch.bfloat16), (656, torch.uint8)],  # 656: 512 fp8 + 4 float32 scales + 64 bf16 of rope, packed
)
def test_rows_of_mla_arrive_in_16_byte_loads(
    head_dim: int, dtype: torch.dtype, adopt: Callable[..., PagedPool]
) -> None:
    pool = adopt(noisy(LAYERS, 3, 1, 64, 1, head_dim, dtype=dtype))
    pages = poisoned(2, LAYERS, 1, 64, 1, head_dim, dtype=dtype)
    table = page_table(twin(pool), pinned_twin(pages))
    assert table.word_bytes * table.alignment == 16
    assert_equals_reference(pool, pages, sources=[2], targets=[1])


def test_br_013_pages_with_padding_between_them_leave_the_padding_alone() -> None:
    """4096 x k + 132 bytes a page, in slots that are rounded up; 16-byte words would overrun each page."""
    memory = torch.full((SLOTS, 8192), POISON, dtype=torch.uint8)
    pages = memory[:, : 4096 + 132].view(torch.bfloat16).view(SLOTS, 1, 1, 1, 1, 2114)
    assert_equals_reference(noisy(1, PAGES, 1, 1, 1, 2114, dtype=torch.bfloat16), pages, sources=[6, 2], targets=[5, 0])


def test_more_copies_than_programs_all_arrive() -> None:
    """Every program takes more than one tile; the last ones take fewer than the others."""
    pool = noisy(3, 18, 2, 1, 1, 3, dtype=torch.uint8)
    pages = poisoned(7, 3, 2, 1, 1, 3, dtype=torch.uint8)
    assert 7 * len(page_table(twin(pool), pinned_twin(pages)).tiles) > 2 * BUS_PROGRAMS_MAX
    assert_equals_reference(pool, pages, sources=[*range(7)], targets=[*reversed(range(7))])


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_layout_equals_the_reference(data: st.DataObject) -> None:
    layers, planes, count, slots = (data.draw(st.integers(1, top)) for top in (2, 2, 6, 6))
    inner = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 8, 33])))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float16, torch.float32]))
    adopt = data.draw(st.sampled_from(ADOPTIONS))
    targets = data.draw(st.lists(st.integers(0, slots - 1), unique=True, max_size=3))
    sources = data.draw(st.lists(st.integers(0, count - 1), min_size=len(targets), max_size=len(targets)))
    pool = adopt(noisy(layers, count, planes, *inner, dtype=dtype))
    assert_equals_reference(
        pool, poisoned(slots, layers, planes, *inner, dtype=dtype), sources=sources, targets=targets
    )


@pytest.mark.parametrize(
    ("sources", "targets", "error"),
    [
        ([0, PAGES], [0, 1], IndexError),
        ([0, -1], [0, 1], IndexError),
        ([0, 1], [0, SLOTS], IndexError),
        ([0, 1], [2, 2], ValueError),
        ([0, 1], [2], ValueError),
        ([0, 1.5], [0, 1], TypeError),
        (torch.tensor([0.0]), [0], ValueError),
        (torch.tensor([[0]]), [0], ValueError),
    ],
)
def test_a_slot_that_does_not_exist_is_refused_before_any_byte_moves(
    sources: list[int], targets: list[int], error: type[Exception]
) -> None:
    pool = twin(noisy(LAYERS, PAGES, 2, 4, 2, 8, dtype=torch.bfloat16))
    pages = pinned_twin(poisoned(SLOTS, LAYERS, 2, 4, 2, 8, dtype=torch.bfloat16))
    with pytest.raises(error):
        gather_pages(pool, pages, sources=sources, targets=targets)
    assert bool((pages.view(torch.uint8) == POISON).all())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((SLOTS, LAYERS + 1, 2, 4, 2, 8), torch.bfloat16),
        ((SLOTS, LAYERS, 1, 4, 2, 8), torch.bfloat16),
        ((SLOTS, LAYERS, 2, 4, 2, 16), torch.bfloat16),
        ((SLOTS, LAYERS, 2, 4, 2, 8), torch.float16),
        ((SLOTS, LAYERS), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("adopt", [one_tensor, tensor_per_layer, tensor_per_plane])
def test_pages_of_another_shape_or_dtype_are_refused(
    shape: tuple[int, ...], dtype: torch.dtype, adopt: Callable[..., PagedPool]
) -> None:
    pool = twin(adopt(noisy(LAYERS, PAGES, 2, 4, 2, 8, dtype=torch.bfloat16)))
    with pytest.raises(ValueError, match=r"layers|planes"):
        gather_pages(pool, pinned_twin(poisoned(*shape, dtype=dtype)), sources=[0], targets=[0])


def test_blocks_that_are_less_aligned_than_those_of_the_table_are_refused() -> None:
    pool = twin(noisy(1, 3, 1, 1, 1, 16, dtype=torch.uint8))
    memory = pinned_twin(torch.zeros(3 * 16 + 8, dtype=torch.uint8))
    aligned, shifted = (memory[start : start + 48].view(3, 1, 1, 1, 1, 16) for start in (0, 8))
    table = page_table(pool, aligned)
    gather_tiles(table, aligned, sources=[1], targets=[0])
    with pytest.raises(ValueError, match="no multiple of 16"):
        gather_tiles(table, shifted, sources=[1], targets=[0])


@pytest.mark.skipif(DEVICE != "cpu", reason="there is a device to run on")
def test_tensors_on_a_cpu_are_refused_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_copies, "_copy_tiles_kernel", triton.JITFunction(tile_copies._copy_tiles))
    pool, pages = noisy(1, 3, 1, 1, 1, 16, dtype=torch.uint8), poisoned(2, 1, 1, 1, 1, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        gather_pages(pool, pages, sources=[0], targets=[0])
    assert bool((pages == POISON).all())


@pytest.mark.skipif(DEVICE != "cpu", reason="the pool would have to be touched on a device")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16], ids=["past 2^31 bytes", "past 2^31 elements"])
@pytest.mark.parametrize("layout", ["one tensor", "per layer"])
def test_br_005_pages_above_two_to_the_31_are_copied_right(layout: str, dtype: torch.dtype) -> None:
    """Pools and pages are reserved, not touched: only pages around the boundary and at the end take memory."""
    page = 64 * 576
    boundary = 2**31 // page
    count = boundary + 10
    pool = torch.empty(count, 1, 64, 1, 576, dtype=dtype)
    pages = torch.empty(count, 1, 1, 64, 1, 576, dtype=dtype)
    assert pool.numel() > 2**31
    top = [count - 1, boundary - 1, boundary, boundary + 1]
    for seed, slot in enumerate(top):
        fill_with_noise(pool[slot], seed)
    held: PagedPool = pool.unsqueeze(0) if layout == "one tensor" else [pool]
    gather_pages(held, pages, sources=top, targets=top[::-1])
    for source, target in zip(top, top[::-1], strict=True):
        assert torch.equal(pages[target, 0], pool[source])
    scatter_pages(pages, held, sources=[boundary, count - 1], targets=[count - 2, boundary + 5])
    assert torch.equal(pool[count - 2], pool[top[top[::-1].index(boundary)]])
    assert torch.equal(pool[boundary + 5], pool[top[top[::-1].index(count - 1)]])
