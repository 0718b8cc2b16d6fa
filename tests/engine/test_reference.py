"""The reference copies move exactly the bits they are told to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels import reference
from hicache.kernels.reference import (
    Joined,
    Layered,
    PagedPool,
    clear_states,
    copy_states,
    gather_pages,
    gather_states,
    scatter_pages,
    scatter_states,
)
from hicache.spec import DTYPE_BYTES
from tests.engine.specs import POISON, as_bytes, fill_with_noise, poison

LAYERS, PAGES, SLOTS = 3, 7, 6


def noisy(*shape: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    fill_with_noise(tensor, seed)
    return tensor


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    poison(tensor)
    return tensor


def one_tensor(pool: torch.Tensor) -> PagedPool:
    return pool


def tensor_per_layer(pool: torch.Tensor) -> PagedPool:
    return [layer.clone() for layer in pool]


def tensor_per_plane(pool: torch.Tensor) -> PagedPool:
    """K and V apart, as SGLang has them."""
    return [[layer[:, plane].clone() for plane in range(pool.shape[2])] for layer in pool]


def odd_page_stride(pool: torch.Tensor) -> PagedPool:
    """Pages lie three apart in a wider tensor, after a bit of something else."""
    wide = poisoned(pool.shape[0], pool.shape[1] * 3 + 1, *pool.shape[2:], dtype=pool.dtype)
    view = wide[:, 1::3]
    view.view(torch.uint8).copy_(pool.view(torch.uint8))
    return view


def planes_outside(pool: torch.Tensor) -> PagedPool:
    """[planes, n_pages, ...] per layer in memory, as vLLM's FlashAttention has them."""
    return [layer.transpose(0, 1).contiguous().transpose(0, 1) for layer in pool]


def heads_outside(pool: torch.Tensor) -> PagedPool:
    """[..., heads, page_tokens, head_dim] in memory (HND)."""
    return pool.transpose(3, 4).contiguous().transpose(3, 4)


def transposed_rows(pool: torch.Tensor) -> PagedPool:
    """A last dimension that is not contiguous, which no wider integer can view."""
    return pool.transpose(4, 5).contiguous().transpose(4, 5)


ADOPTIONS = (
    one_tensor,
    tensor_per_layer,
    tensor_per_plane,
    odd_page_stride,
    planes_outside,
    heads_outside,
    transposed_rows,
)


def dense(pool: PagedPool) -> torch.Tensor:
    """[layers, n_pages, planes, ...] as bytes, whatever the pool is made of."""
    layers = [layer if isinstance(layer, torch.Tensor) else torch.stack(list(layer), dim=1) for layer in pool]
    return torch.stack([layer.contiguous().view(torch.uint8) for layer in layers])


def assert_gathers_and_scatters(pool: PagedPool, *, planes: int, inner: tuple[int, ...], dtype: torch.dtype) -> None:
    before = dense(pool).clone()
    pages = poisoned(SLOTS, LAYERS, planes, *inner, dtype=dtype)
    sources, targets = [6, 0, 3], [1, 5, 4]
    gather_pages(pool, pages, sources=sources, targets=targets)
    got = pages.view(torch.uint8)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(got[target], before[:, source])
    for untouched in set(range(SLOTS)) - set(targets):
        assert bool((got[untouched] == POISON).all())
    assert torch.equal(dense(pool), before)

    scatter_pages(pages, pool, sources=[1, 5, 4], targets=[0, 6, 2])
    after = before.clone()
    after[:, [0, 6, 2]] = before[:, [6, 0, 3]]
    assert torch.equal(dense(pool), after)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("adopt", ADOPTIONS, ids=lambda adopt: adopt.__name__)
def test_pages_arrive_bit_for_bit_and_nothing_else_changes(dtype: str, adopt: Callable[..., PagedPool]) -> None:
    torch_dtype = getattr(torch, dtype)
    inner = (5, 3, 7)  # ragged: no power of two anywhere
    pool = adopt(noisy(LAYERS, PAGES, 2, *inner, dtype=torch_dtype))
    assert_gathers_and_scatters(pool, planes=2, inner=inner, dtype=torch_dtype)


@pytest.mark.parametrize("adopt", ADOPTIONS, ids=lambda adopt: adopt.__name__)
def test_pages_larger_than_the_staging_arrive_as_well(
    adopt: Callable[..., PagedPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = (64, 8, 132)
    monkeypatch.setattr(reference, "_LAYER_STAGING_BYTES", 1000)
    pool = adopt(noisy(LAYERS, PAGES, 2, *inner, dtype=torch.bfloat16))
    assert_gathers_and_scatters(pool, planes=2, inner=inner, dtype=torch.bfloat16)


@pytest.fixture(params=["one device", "two devices, small staging", "two devices"])
def as_on_an_accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here: the copies are told that there is, and where the tensors are."""
    monkeypatch.setattr(reference, "_is_on_host", lambda leg: False)
    monkeypatch.setattr(reference, "_crosses_devices", lambda leg: request.param != "one device")
    monkeypatch.setattr(reference, "_DEVICE_STAGING_BYTES", 1000 if "small" in request.param else 1 << 26)


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("adopt", ADOPTIONS, ids=lambda adopt: adopt.__name__)
def test_pages_arrive_by_the_copies_for_accelerators_too(adopt: Callable[..., PagedPool]) -> None:
    pool = adopt(noisy(LAYERS, PAGES, 2, 5, 3, 7, dtype=torch.bfloat16))
    assert_gathers_and_scatters(pool, planes=2, inner=(5, 3, 7), dtype=torch.bfloat16)


def test_a_latent_of_one_plane_arrives() -> None:
    pool = noisy(LAYERS, PAGES, 1, 4, 1, 33, dtype=torch.float8_e4m3fn)
    assert_gathers_and_scatters(pool, planes=1, inner=(4, 1, 33), dtype=torch.float8_e4m3fn)


def test_br_013_pages_with_padding_between_them_leave_the_padding_alone() -> None:
    """4096 x k + 132 bytes a page, in slots that are rounded up."""
    page_bytes, stride = 4096 + 132, 8192
    memory = torch.full((SLOTS, stride), POISON, dtype=torch.uint8)
    pages = memory[:, :page_bytes].view(torch.bfloat16).view(SLOTS, 1, 1, 1, 1, page_bytes // 2)
    pool = noisy(1, PAGES, 1, 1, 1, page_bytes // 2, dtype=torch.bfloat16)
    gather_pages(pool, pages, sources=list(range(SLOTS)), targets=list(range(SLOTS)))
    assert torch.equal(memory[:, :page_bytes], pool[0, :SLOTS].reshape(SLOTS, -1).view(torch.uint8))
    assert bool((memory[:, page_bytes:] == POISON).all())


def test_nan_payloads_survive_the_way_there_and_back() -> None:
    payloads = torch.tensor([0x7F81, 0x7FC1, 0xFFFF - 0x10000, 0xFF85 - 0x10000], dtype=torch.int16)
    pool = payloads.view(torch.bfloat16).repeat(1, 3, 1, 1, 1, 2).clone()
    assert bool(pool.isnan().all())
    pages = torch.zeros(2, 1, 1, 1, 1, 8, dtype=torch.bfloat16)
    gather_pages(pool, pages, sources=[1], targets=[0])
    back = torch.zeros_like(pool)
    scatter_pages(pages, back, sources=[0], targets=[2])
    assert as_bytes(back[:, 2]) == as_bytes(pool[:, 1])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_batch_equals_a_loop_over_pages_and_layers(data: st.DataObject) -> None:
    layers, pages, slots = (data.draw(st.integers(1, top)) for top in (4, 9, 9))
    inner = data.draw(st.tuples(*[st.integers(1, 5)] * 4))
    dtype = getattr(torch, data.draw(st.sampled_from(sorted(DTYPE_BYTES))))
    adopt = data.draw(st.sampled_from(ADOPTIONS))
    targets = data.draw(st.lists(st.integers(0, slots - 1), unique=True))
    sources = data.draw(st.lists(st.integers(0, pages - 1), min_size=len(targets), max_size=len(targets)))
    pool = adopt(noisy(layers, pages, *inner, dtype=dtype))
    out = poisoned(slots, layers, *inner, dtype=dtype)
    expected = out.clone().view(torch.uint8)
    plain = dense(pool)
    for source, target in zip(sources, targets, strict=True):
        for layer in range(layers):
            expected[target, layer] = plain[layer, source]
    gather_pages(pool, out, sources=torch.tensor(sources, dtype=torch.int64), targets=targets)
    assert torch.equal(out.view(torch.uint8), expected)


@pytest.mark.parametrize("adopt", [one_tensor, tensor_per_layer, tensor_per_plane])
@pytest.mark.parametrize(
    ("sources", "targets", "error"),
    [
        ([0, PAGES], [0, 1], IndexError),
        ([0, -1], [0, 1], IndexError),
        ([0, 1], [0, SLOTS], IndexError),
        ([0, 1], [0, -1], IndexError),
        ([0, 1], [2, 2], ValueError),
        ([0, 1], [2], ValueError),
        ([0, 1.5], [0, 1], TypeError),
        (torch.tensor([0.0]), [0], ValueError),
        (torch.tensor([[0]]), [0], ValueError),
    ],
)
def test_a_slot_that_does_not_exist_is_refused_before_any_byte_moves(
    adopt: Callable[..., PagedPool], sources: list[int], targets: list[int], error: type[Exception]
) -> None:
    pool = adopt(noisy(LAYERS, PAGES, 2, 4, 2, 8, dtype=torch.bfloat16))
    pages = poisoned(SLOTS, LAYERS, 2, 4, 2, 8, dtype=torch.bfloat16)
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
    ],
)
@pytest.mark.parametrize("adopt", [one_tensor, tensor_per_layer, tensor_per_plane])
def test_pages_of_another_shape_or_dtype_are_refused(
    shape: tuple[int, ...], dtype: torch.dtype, adopt: Callable[..., PagedPool]
) -> None:
    pool = adopt(noisy(LAYERS, PAGES, 2, 4, 2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"layers|planes"):
        gather_pages(pool, poisoned(*shape, dtype=dtype), sources=[0], targets=[0])


def test_layers_that_differ_are_refused() -> None:
    pages = poisoned(SLOTS, 2, 1, 1, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="layers differ"):
        gather_pages([torch.zeros(4, 1, 1, 8, dtype=torch.uint8), torch.zeros(5, 1, 1, 8, dtype=torch.uint8)],
                     pages, sources=[4], targets=[0])  # fmt: skip


def test_a_pool_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        pool = torch.zeros(1, 2, 1, 1, 1, 4)
    pages = torch.ones(2, 1, 1, 1, 1, 4)
    scatter_pages(pages, pool, sources=[0], targets=[1])
    assert pool.sum().item() == 4


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("int8", "float32"), ("float32", "int8")])
def test_states_become_the_concatenation_of_their_fields_and_come_back(
    dtypes: tuple[str, str], *, as_list: bool
) -> None:
    """Also where a field of wide elements begins at an odd byte."""
    shapes = ((3, 7), (2, 4, 4))
    tensors = [
        noisy(LAYERS, 5, *shape, dtype=getattr(torch, dtype), seed=seed)
        for seed, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    expected = b"".join(as_bytes(tensor[:, 4]) for tensor in tensors)
    fields = [[layer.clone() for layer in tensor] if as_list else tensor.clone() for tensor in tensors]
    memory = torch.full((3, -(-len(expected) // 4096) * 4096), POISON, dtype=torch.uint8)
    objects = memory[:, : len(expected)]
    gather_states(fields, objects, sources=[4], targets=[1])
    assert as_bytes(objects[1]) == expected
    assert bool((memory[[0, 2]] == POISON).all())
    assert bool((memory[:, len(expected) :] == POISON).all())

    scatter_states(objects, fields, sources=[1, 1], targets=[0, 2])
    for field, tensor in zip(fields, tensors, strict=True):
        got = torch.stack(list(field)) if isinstance(field, list) else field
        assert as_bytes(got[:, 0]) == as_bytes(got[:, 2]) == as_bytes(tensor[:, 4])
        assert as_bytes(got[:, [1, 3, 4]]) == as_bytes(tensor[:, [1, 3, 4]])


def assert_joins(*, as_list: bool, dtype: torch.dtype, axis: int) -> None:
    """Two pieces of a field, behind an odd byte in the object: there as one tensor, and back where they came from."""
    pad = noisy(LAYERS, 5, 1, dtype=torch.uint8, seed=3)
    tensor = noisy(LAYERS, 5, 6, 8, 7, dtype=dtype)
    spans = ((1, 3), (5, 6))
    layers: Layered = [layer.clone() for layer in tensor] if as_list else tensor.clone()
    pieces: list[Layered] = [
        [layer.narrow(axis, first, stop - first) for layer in layers]
        if isinstance(layers, list)
        else layers.narrow(axis, first, stop - first)
        for first, stop in spans
    ]
    joined = torch.cat([tensor.narrow(axis, first, stop - first) for first, stop in spans], dim=axis)
    expected = as_bytes(pad[:, 4]) + as_bytes(joined[:, 4])
    objects = torch.full((3, len(expected) + 5), POISON, dtype=torch.uint8)[:, : len(expected)]
    gather_states([pad, Joined(pieces, axis)], objects, sources=[4], targets=[1])
    assert as_bytes(objects[1]) == expected
    assert bool((objects[[0, 2]] == POISON).all())

    scatter_states(objects, [pad, Joined(pieces, axis)], sources=[1], targets=[2])
    held = layers if isinstance(layers, torch.Tensor) else torch.stack(list(layers))
    for first, stop in spans:
        copied = held.narrow(axis, first, stop - first)
        assert as_bytes(copied[:, 2]) == as_bytes(copied[:, 4])
    untouched = torch.ones(held.shape, dtype=torch.bool)
    for first, stop in spans:
        untouched.narrow(axis, first, stop - first)[:, 2] = False
    assert as_bytes(held[untouched]) == as_bytes(tensor[untouched])


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_pieces_of_a_field_are_one_tensor_in_the_object(*, as_list: bool, dtype: torch.dtype, axis: int) -> None:
    assert_joins(as_list=as_list, dtype=dtype, axis=axis)


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("axis", [-1, -3])
def test_pieces_of_a_field_arrive_by_the_copies_for_accelerators_too(*, as_list: bool, axis: int) -> None:
    assert_joins(as_list=as_list, dtype=torch.bfloat16, axis=axis)


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("adopt", [one_tensor, tensor_per_layer, tensor_per_plane, heads_outside])
def test_heads_of_a_pool_arrive_by_the_copies_for_accelerators_too(adopt: Callable[..., PagedPool]) -> None:
    whole = noisy(LAYERS, PAGES, 2, 5, 6, 8, dtype=torch.bfloat16)
    pool = adopt(whole[:, :, :, :, 2:4])
    assert_gathers_and_scatters(pool, planes=2, inner=(5, 2, 8), dtype=torch.bfloat16)


@pytest.mark.parametrize("object_bytes", [11, 13])
def test_objects_that_are_not_as_large_as_the_fields_are_refused(object_bytes: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        gather_states([torch.zeros(1, 2, 12, dtype=torch.uint8)], torch.zeros(2, object_bytes, dtype=torch.uint8),
                      sources=[0], targets=[0])  # fmt: skip


def test_a_field_that_does_not_fit_leaves_the_fields_before_it_alone() -> None:
    objects = torch.full((2, 24), POISON, dtype=torch.uint8)
    fields = [torch.zeros(1, 4, 12, dtype=torch.uint8), torch.zeros(1, 3, 12, dtype=torch.uint8)]
    with pytest.raises(IndexError):
        gather_states(fields, objects, sources=[3], targets=[0])
    assert bool((objects == POISON).all())


@pytest.mark.parametrize("as_list", [False, True])
def test_states_are_copied_and_cleared_within_their_pool(*, as_list: bool) -> None:
    tensor = noisy(LAYERS, 5, 3, 7, dtype=torch.float8_e5m2)
    field = [layer.clone() for layer in tensor] if as_list else tensor.clone()
    copy_states([field], sources=[4, 4], targets=[0, 1])
    clear_states([field], slots=[2])
    got = torch.stack(list(field)) if isinstance(field, list) else field
    assert as_bytes(got[:, 0]) == as_bytes(got[:, 1]) == as_bytes(tensor[:, 4])
    assert as_bytes(got[:, 2]) == bytes(LAYERS * 21)
    assert as_bytes(got[:, 3:]) == as_bytes(tensor[:, 3:])


@pytest.mark.parametrize(
    ("sources", "targets", "error"),
    [([0], [5], IndexError), ([-1], [0], IndexError), ([0, 1], [1, 2], ValueError), ([0, 1], [2, 2], ValueError)],
)
def test_copies_between_slots_that_cannot_be_are_refused_before_any_byte_moves(
    sources: list[int], targets: list[int], error: type[Exception]
) -> None:
    field = noisy(LAYERS, 5, 3, dtype=torch.float32)
    before = as_bytes(field)
    with pytest.raises(error):
        copy_states([field], sources=sources, targets=targets)
    with pytest.raises(IndexError):
        clear_states([field], slots=[0, 5])
    assert as_bytes(field) == before


@pytest.mark.parametrize("layout", ["one tensor", "per layer"])
def test_br_005_pages_above_two_to_the_31_elements_are_copied_right(layout: str) -> None:
    """The pool is reserved, not touched: only the pages around the boundary and at its end take memory."""
    row = 576 * 4096
    pages_per_layer = 2**31 // row + 10
    memory = torch.empty(pages_per_layer, 1, 64, 1, row // 64, dtype=torch.uint8)
    assert memory.numel() > 2**31
    top = [pages_per_layer - 1, 2**31 // row - 1, 2**31 // row, 2**31 // row + 1]
    for seed, page in enumerate(top):
        fill_with_noise(memory[page], seed)
    pool: PagedPool = memory.unsqueeze(0) if layout == "one tensor" else [memory]
    pages = torch.zeros(len(top), 1, 1, 64, 1, row // 64, dtype=torch.uint8)
    gather_pages(pool, pages, sources=top, targets=[3, 2, 1, 0])
    for page, slot in zip(top, [3, 2, 1, 0], strict=True):
        assert torch.equal(pages[slot, 0], memory[page])
    scatter_pages(pages, pool, sources=[3], targets=[pages_per_layer - 2])
    assert torch.equal(memory[pages_per_layer - 2], memory[pages_per_layer - 1])
