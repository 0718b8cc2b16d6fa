"""Copies run by run move the same bits as the reference, in as few runs as there are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels import direct, reference
from hicache.kernels.direct import Runs, gather_runs, mean_run_bytes, scatter_runs
from hicache.kernels.legs import Joined, Leg, PagedPool, page_legs
from hicache.spec import DTYPE_BYTES
from tests.engine.specs import POISON
from tests.engine.test_reference import (
    ADOPTIONS,
    LAYERS,
    PAGES,
    SLOTS,
    dense,
    heads_outside,
    noisy,
    one_tensor,
    poisoned,
    tensor_per_layer,
    tensor_per_plane,
)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_batch_of_pages_is_moved_as_the_reference_moves_it(data: st.DataObject) -> None:
    layers, pages, slots = (data.draw(st.integers(1, top)) for top in (4, 9, 9))
    inner = data.draw(st.tuples(*[st.integers(1, 5)] * 4))
    dtype = getattr(torch, data.draw(st.sampled_from(sorted(DTYPE_BYTES))))
    adopt = data.draw(st.sampled_from(ADOPTIONS))
    count = data.draw(st.integers(0, min(pages, slots)))
    of_pool = data.draw(st.permutations(range(pages)))[:count]
    of_l2 = data.draw(st.permutations(range(slots)))[:count]
    pool = adopt(noisy(layers, pages, *inner, dtype=dtype))
    out, expected = (poisoned(slots, layers, *inner, dtype=dtype) for _ in range(2))
    direct.gather_pages(pool, out, sources=of_pool, targets=of_l2)
    reference.gather_pages(pool, expected, sources=of_pool, targets=of_l2)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))

    back, expected_pool = (adopt(poisoned(layers, pages, *inner, dtype=dtype)) for _ in range(2))
    direct.scatter_pages(out, back, sources=of_l2, targets=of_pool)
    reference.scatter_pages(out, expected_pool, sources=of_l2, targets=of_pool)
    assert torch.equal(dense(back), dense(expected_pool))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_batch_of_states_is_moved_as_the_reference_moves_it(data: st.DataObject) -> None:
    """Pieces of a field side by side, as slices of heads are, and wide elements at odd bytes."""
    layers, slots = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    pieces = [noisy(layers, slots, 3, width, dtype=torch.float32, seed=width) for width in (2, 5)]
    odd = noisy(layers, slots, 7, dtype=torch.uint8, seed=3)
    as_list = data.draw(st.booleans())
    fields = [list(odd) if as_list else odd, Joined([list(piece) if as_list else piece for piece in pieces], -1)]
    object_bytes = layers * (7 + 3 * 7 * 4)
    sources = data.draw(st.permutations(range(slots)))
    targets = data.draw(st.permutations(range(slots)))
    out, expected = (poisoned(slots, object_bytes, dtype=torch.uint8) for _ in range(2))
    direct.gather_states(fields, out, sources=sources, targets=targets)
    reference.gather_states(fields, expected, sources=sources, targets=targets)
    assert torch.equal(out, expected)
    before = [odd.clone(), *(piece.clone() for piece in pieces)]
    for tensor in (odd, *pieces):
        tensor.view(torch.uint8).fill_(POISON)
    direct.scatter_states(out, fields, sources=targets, targets=sources)
    for tensor, was in zip((odd, *pieces), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), was.view(torch.uint8))


@pytest.mark.parametrize("adopt", [one_tensor, tensor_per_layer, tensor_per_plane])
@pytest.mark.parametrize(
    ("sources", "targets", "error"),
    [([0, PAGES], [0, 1], IndexError), ([0, 1], [-1, 1], IndexError), ([0, 1], [2, 2], ValueError)],
)
def test_br_005_a_slot_that_does_not_exist_is_refused_before_any_byte_moves(
    adopt: Callable[..., PagedPool], sources: list[int], targets: list[int], error: type[Exception]
) -> None:
    """Addresses are plain numbers here: what is not refused writes anywhere."""
    pool = adopt(noisy(LAYERS, PAGES, 2, 4, 2, 8, dtype=torch.bfloat16))
    pages = poisoned(SLOTS, LAYERS, 2, 4, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(error):
        direct.gather_pages(pool, pages, sources=sources, targets=targets)
    assert bool((pages.view(torch.uint8) == POISON).all())


def leg_of(pool: PagedPool, pages: torch.Tensor) -> Leg:
    (leg,) = page_legs(pool, pages)
    return leg


def sizes(runs: Runs) -> list[int]:
    return [int(size) for size in runs.sizes]


LAYER_BYTES = 2 * 4 * 2 * 8 * 2  # [planes, page_tokens, heads, head_dim] bf16


@pytest.mark.parametrize("adopt", [one_tensor, tensor_per_layer])
def test_a_run_is_a_layer_of_a_page_and_goes_layer_by_layer(adopt: Callable[..., PagedPool]) -> None:
    pool = adopt(noisy(LAYERS, PAGES, 2, 4, 2, 8, dtype=torch.bfloat16))
    pages = poisoned(SLOTS, LAYERS, 2, 4, 2, 8, dtype=torch.bfloat16)
    leg = leg_of(pool, pages)
    assert mean_run_bytes([leg]) == LAYER_BYTES
    runs = gather_runs(leg, [1, 2], [5, 3])
    assert sizes(runs) == [LAYER_BYTES] * 2 * LAYERS
    page_bytes = LAYERS * LAYER_BYTES
    starts = [slot * page_bytes + layer * LAYER_BYTES for layer in range(LAYERS) for slot in (3, 5)]
    assert (runs.targets - pages.data_ptr()).tolist() == starts


def test_a_page_that_is_one_piece_on_both_sides_is_one_run_and_so_are_neighbours() -> None:
    """As in an arena, where the layers of a page follow each other in L1 as well."""
    memory = noisy(PAGES, LAYERS, 2, 4, 2, 8, dtype=torch.bfloat16)
    pages = poisoned(SLOTS, LAYERS, 2, 4, 2, 8, dtype=torch.bfloat16)
    leg = leg_of(memory.transpose(0, 1), pages)
    page_bytes = LAYERS * LAYER_BYTES
    assert sizes(gather_runs(leg, [4, 3, 0], [2, 1, 4])) == [2 * page_bytes, page_bytes]
    assert sizes(scatter_runs(leg, [1, 4, 2], [3, 0, 4])) == [page_bytes, 2 * page_bytes]


def test_heads_before_tokens_in_l1_make_a_run_of_each_row() -> None:
    pool = heads_outside(noisy(LAYERS, PAGES, 2, 4, 2, 8, dtype=torch.bfloat16))
    pages = poisoned(SLOTS, LAYERS, 2, 4, 2, 8, dtype=torch.bfloat16)
    assert mean_run_bytes([leg_of(pool, pages)]) == 8 * 2


class Stream:
    cuda_stream = 77


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A CUDA runtime that notes its calls and copies in host memory; where the tensors are is told wrongly."""
    calls: list[tuple[int, ...]] = []

    def memcpy_async(target: int, source: int, size: int, kind: int, stream: int) -> int:
        calls.append((target, source, size, kind, stream))
        ctypes.memmove(target, source, size)
        return 0

    monkeypatch.setattr(direct, "_is_on_host", lambda leg: False)
    monkeypatch.setattr(
        direct, "_mover", lambda leg: lambda runs: direct._enqueue(runs, device=torch.device("cuda", 0))
    )
    monkeypatch.setattr(direct, "_memcpy_async", lambda: memcpy_async)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(torch.cuda, "device", _NoDevice)
    return calls


class _NoDevice:
    def __init__(self, device: torch.device) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def test_on_cuda_runs_are_enqueued_on_the_current_stream_and_end_with_their_slot(
    cuda: Sequence[tuple[int, ...]],
) -> None:
    """Memory is pinned in regions that end between slots: one copy may not be in two of them."""
    memory = noisy(PAGES, LAYERS, 2, 4, 2, 8, dtype=torch.bfloat16)
    pages = poisoned(SLOTS, LAYERS, 2, 4, 2, 8, dtype=torch.bfloat16)
    direct.gather_pages(memory.transpose(0, 1), pages, sources=[3, 4], targets=[1, 2])
    assert torch.equal(pages[1:3].view(torch.uint8), memory[3:5].view(torch.uint8))
    page_bytes = LAYERS * LAYER_BYTES
    starts = [
        (pages.data_ptr() + target * page_bytes, memory.data_ptr() + (target + 2) * page_bytes) for target in (1, 2)
    ]
    assert cuda == [(target, source, page_bytes, 4, 77) for target, source in starts]


def test_br_001_a_copy_that_cuda_refuses_raises(
    cuda: Sequence[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_memcpy_async", lambda: lambda *arguments: 700)
    pool = noisy(LAYERS, PAGES, 2, 4, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="cudaMemcpyAsync answered 700"):
        direct.gather_pages(pool, torch.empty(SLOTS, *pool[:, 0].shape, dtype=pool.dtype), sources=[0], targets=[0])


def test_two_accelerators_are_refused() -> None:
    leg = Leg(torch.empty((2, 3, 4), device="meta"), torch.empty((3, 2, 4)))
    with pytest.raises(ValueError, match="between host memory and a CUDA device"):
        direct._mover(leg)
