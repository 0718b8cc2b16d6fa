"""Copies through staging move the bits that the reference moves, in as many rounds as the staging needs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache import moves
from hicache.copies import PoolCopies
from hicache.kernel_moves import KERNEL, STAGED, quantises_right
from hicache.kernels import direct, reference, tile_copies
from hicache.kernels.legs import PagedPool
from hicache.moves import DIRECT, REFERENCE, backends_on, by_speed, choose_moves
from hicache.pools import L1Pool, L2Pool
from hicache.spec import CacheSpec, PagedGroup
from hicache.staging import Staging
from tests.engine.specs import POISON
from tests.engine.test_reference import ADOPTIONS, noisy, poisoned, tensor_per_layer
from tests.kernels.devices import DEVICE, assert_same_memory, pinned_twin, twin

LAYERS, PAGES, SLOTS = 2, 9, 8


def staging(size_bytes: int) -> Staging:
    return Staging(torch.device(DEVICE), size_bytes=size_bytes)


CASES = [
    *((adopt, (3, 1, 5), 2) for adopt in ADOPTIONS),
    *((tensor_per_layer, inner, rows) for inner in ((3, 2, 5), (4, 2, 8)) for rows in (1, 3, 5, 64)),
]


@pytest.mark.parametrize(("adopt", "inner", "rows"), CASES)
def test_a_job_larger_than_the_staging_arrives_bit_for_bit_and_nothing_else_changes(
    adopt: Callable[..., PagedPool], inner: tuple[int, ...], rows: int
) -> None:
    pool = adopt(noisy(LAYERS, PAGES, 2, *inner, dtype=torch.uint8))
    pages = poisoned(SLOTS, LAYERS, 2, *inner, dtype=torch.uint8)
    there, below = twin(pool), pinned_twin(pages)
    row_bytes = -(-pages[0].numel() // 256) * 256
    ring = staging(rows * row_bytes)
    mover = STAGED.of_pages(there, below, ring)
    assert len(ring.rows("gather", pages[0].numel())) == rows
    sources, targets = [8, 0, 3, 1, 5], [1, 5, 4, 0, 7]
    mover.gather(below, sources=sources, targets=targets)
    reference.gather_pages(pool, pages, sources=sources, targets=targets)
    assert_same_memory(below, pages)
    assert_same_memory(there, pool)
    back = random.Random(rows).sample(range(PAGES), 5)
    mover.scatter(below, sources=targets, targets=back)
    reference.scatter_pages(pages, pool, sources=targets, targets=back)
    assert_same_memory(there, pool)
    assert_same_memory(below, pages)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_states_of_fields_at_odd_bytes_arrive_layer_by_layer(rows: int) -> None:
    fields = [noisy(3, 6, 7, dtype=torch.int8), noisy(3, 6, 2, 3, dtype=torch.float32)]
    objects = poisoned(5, 3 * (7 + 24), dtype=torch.uint8)
    there, below = [twin(field) for field in fields], pinned_twin(objects)
    mover = STAGED.of_states(there, below, staging(rows * 256))
    mover.gather(below, sources=[5, 1, 4], targets=[3, 0, 2])
    reference.gather_states(fields, objects, sources=[5, 1, 4], targets=[3, 0, 2])
    assert_same_memory(below, objects)
    for layer in (2, 0):
        mover.scatter(below, sources=[3, 0, 2], targets=[0, 2, 3], layers=slice(layer, layer + 1))
    before = [field.clone() for field in fields]
    reference.scatter_states(objects, fields, sources=[3, 0, 2], targets=[0, 2, 3])
    for field, was in zip(fields, before, strict=True):
        field[1] = was[1]
    assert_same_memory(there, fields)


@pytest.mark.parametrize(
    ("sources", "targets", "error"),
    [
        ([0, 1, PAGES], [0, 1, 2], IndexError),
        ([0, 1, 2], [0, 1, SLOTS], IndexError),
        ([0, 1, 2], [3, 1, 3], ValueError),
    ],
)
def test_a_slot_that_does_not_exist_is_refused_before_the_first_round(
    sources: list[int], targets: list[int], error: type[Exception]
) -> None:
    pool = twin(noisy(LAYERS, PAGES, 2, 4, 2, 8, dtype=torch.uint8))
    pages = pinned_twin(poisoned(SLOTS, LAYERS, 2, 4, 2, 8, dtype=torch.uint8))
    mover = STAGED.of_pages(pool, pages, staging(1))
    with pytest.raises(error):
        mover.gather(pages, sources=sources, targets=targets)
    assert bool((pages == POISON).all())


def test_br_057_copies_that_fail_leave_nothing_behind_in_the_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have no owners: what failed half-way is written over by the next one, which is right."""
    pool = twin(noisy(LAYERS, PAGES, 2, 4, 2, 8, dtype=torch.uint8))
    pages, expected = (pinned_twin(poisoned(SLOTS, LAYERS, 2, 4, 2, 8, dtype=torch.uint8)) for _ in range(2))
    ring = staging(2 * pages[0].numel())
    mover = STAGED.of_pages(pool, pages, ring)
    held = ring.size_bytes
    with monkeypatch.context() as broken:
        broken.setattr("hicache.kernel_moves.direct.gather_states", raise_injected)
        for _ in range(20):
            with pytest.raises(RuntimeError, match="injected"):
                mover.gather(pages, sources=[1, 2, 3], targets=[3, 2, 1])
    mover.gather(pages, sources=[4, 5, 6], targets=[3, 2, 1])
    reference.gather_pages(pool, expected, sources=[4, 5, 6], targets=[3, 2, 1])
    assert_same_memory(pages, expected)
    assert ring.size_bytes == held


def raise_injected(*arguments: Any, **settings: Any) -> None:
    raise RuntimeError("injected")


def test_staging_is_taken_when_it_is_needed_and_is_bounded() -> None:
    spec = CacheSpec("m", "1", (PagedGroup("pages", (0, 1), 1, 64, "bfloat16"),), page_tokens=4)
    l1, l2 = L1Pool(spec, pages=2, device=DEVICE), L2Pool(spec, (2,), device=DEVICE)
    for setting, expected in (("reference", 0), ("kernel", 0), ("staged", 2 * 4096)):
        copies = PoolCopies(l1, l2, setting=setting, staging_bytes=4096)
        assert copies._staging.size_bytes == expected
    largest = PoolCopies(l1, l2, setting="staged", staging_bytes=1)
    assert largest._staging.size_bytes == 2 * spec.groups[0].object_bytes(4)
    l2.close()


def test_sliding_windows_are_copied_as_their_last_pages() -> None:
    """Of a group with a window, only some pages are there, in slots of its own pools: all others stay as they are."""
    spec = CacheSpec(
        "m",
        "1",
        (
            PagedGroup("full", (0, 2), 2, 8, "bfloat16"),
            PagedGroup("window", (1, 3, 4), 1, 16, "bfloat16", window_tokens=6),
        ),
        page_tokens=4,
    )
    l1, l2 = L1Pool(spec, pages={0: 6, 1: 3}, device=DEVICE), L2Pool(spec, (6, 3), device=DEVICE)
    for group in (0, 1):
        l1.paged[group].copy_(noisy(*l1.paged[group].shape, dtype=torch.bfloat16, seed=group))
    for setting in ("kernel", "staged"):
        copies = PoolCopies(l1, l2, setting=setting, staging_bytes=300)
        expected = [l1.paged[0][:, [4, 5]].clone(), l1.paged[1][:, [2, 0]].clone()]
        copies.backup(0, [4, 5], [0, 3])
        copies.backup(1, [2, 0], [1, 2])
        rest = l1.paged[1][:, 1].clone()
        copies.load(1, [1, 2], [0, 2])
        copies.load(0, [0, 3], [1, 2])
        for group, slots in ((0, [1, 2]), (1, [0, 2])):
            assert torch.equal(l1.paged[group][:, slots].view(torch.uint8), expected[group].view(torch.uint8))
        assert torch.equal(l1.paged[1][:, 1].view(torch.uint8), rest.view(torch.uint8))
        del copies
    l2.close()


# -- kernels among what is measured ------------------------------------------------------------------------------------

CUDA = torch.device("cuda", 0)


@pytest.fixture
def fresh() -> Any:
    by_speed.cache_clear()
    yield
    by_speed.cache_clear()


def test_on_cuda_kernels_are_measured_beside_the_others() -> None:
    assert list(backends_on(CUDA)) == [REFERENCE, DIRECT, KERNEL, STAGED]
    assert list(backends_on(torch.device("cpu"))) == [REFERENCE, DIRECT]
    for each in (KERNEL, STAGED):
        assert [*choose_moves(each.name, run_bytes=1, by_layer=True, device=torch.device("cpu"))] == [each]


def test_br_050_without_triton_the_others_are_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(moves, "kernel_backends", missing)
    assert list(backends_on(CUDA)) == [REFERENCE, DIRECT]
    assert "no copies through kernels on cuda:0: ImportError" in caplog.text


@pytest.mark.parametrize("each", [KERNEL, STAGED], ids=lambda each: each.name)
def test_a_kernel_that_is_fastest_is_taken(each: moves.Moves, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def slowly(*arguments: Any, **slots: Any) -> None:
        now_s[0] += 1.0
        direct.gather_pages(*arguments, **slots)

    class Slow:
        gather_pages = staticmethod(slowly)
        scatter_pages = staticmethod(direct.scatter_pages)
        gather_states, scatter_states = staticmethod(direct.gather_states), staticmethod(direct.scatter_states)

    monkeypatch.setattr("hicache.moves.time.perf_counter", lambda: now_s[0])
    monkeypatch.setattr("hicache.moves._SAMPLE_BYTES", 1 << 18)
    slow = moves.plain_moves("slow", Slow())
    assert by_speed((slow, each), run_bytes=1 << 14, by_layer=True, device=torch.device(DEVICE))[0] is each


@pytest.mark.skipif(DEVICE != "cpu", reason="it is compiled there")
@pytest.mark.parametrize("each", [KERNEL, STAGED], ids=lambda each: each.name)
@pytest.mark.parametrize("fault", ["does not compile", "moves a wrong byte"])
def test_br_050_a_kernel_that_fails_or_moves_a_wrong_byte_is_left_out(
    each: moves.Moves,
    fault: str,
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = tile_copies._launch

    def launch(table: Any, pairs: Any, blocks: Any, **settings: Any) -> None:
        if fault == "does not compile":
            raise RuntimeError("PassManager::run failed")
        real(table, pairs, blocks, **settings)
        if settings["writes_block"]:
            blocks.view(torch.uint8).view(len(blocks), -1)[0, -1] ^= 1

    monkeypatch.setattr(tile_copies, "_launch", launch)
    monkeypatch.setattr("hicache.moves._SAMPLE_BYTES", 1 << 18)
    assert by_speed((REFERENCE, each), run_bytes=1 << 14, by_layer=True, device=torch.device("cpu"))[0] is REFERENCE
    assert f"no copies through '{each.name}' on cpu: " in caplog.text
    assert ("PassManager" if fault == "does not compile" else "it moved wrong bytes") in caplog.text


def test_float8_pages_go_through_kernels_only_where_these_are_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quantises_right.cache_clear()
    assert quantises_right(torch.device(DEVICE))
    assert quantises_right.cache_info().currsize == 1
    quantises_right.cache_clear()
    monkeypatch.setattr("hicache.kernel_moves.dequantise_tiles", lambda *arguments, **settings: None)
    assert not quantises_right(torch.device(DEVICE))
    assert "they moved wrong bytes" in caplog.text
    quantises_right.cache_clear()
    monkeypatch.setattr("hicache.kernel_moves.quantise_tiles", None)
    assert not quantises_right(torch.device(DEVICE))
    assert "no float8 pages through kernels" in caplog.text
    quantises_right.cache_clear()
