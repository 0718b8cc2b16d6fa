"""What `bench.transfer` measures are copies of the right bytes, in the layouts that it names."""

from __future__ import annotations

import pytest

from bench import transfer
from bench.transfer import SLOTS, SecondTier, cells, measure
from hicache.spec import PagedGroup
from tests.engine.specs import as_bytes, fill_with_noise

TINY = PagedGroup("tiny", (0, 1, 2), heads=2, head_dim=8, dtype="bfloat16")


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MODELS", {"tiny": TINY})


@pytest.mark.parametrize(
    ("layout", "order", "extents"),
    [
        ("layer_first", (0, 1, 2, 3, 4), 3),
        ("page_first", (1, 2, 0, 3, 4), 1),
        ("page_first_direct", (0, 1, 2, 3, 4), 1),
    ],
)
def test_a_page_lies_in_l2_in_the_order_of_its_layout(
    layout: transfer.Layout, order: tuple[int, ...], extents: int
) -> None:
    l2 = SecondTier(TINY, layout)
    fill_with_noise(l2.pages, seed=1)
    assert l2.extents == extents
    l2.to_l3([5], [9])
    page = l2.pages[5].permute(order).contiguous()  # of [layers, planes, page_tokens, heads, head_dim]
    assert as_bytes(l2.target.view(SLOTS, -1)[9]) == as_bytes(page)


def test_every_cell_copies_what_it_says() -> None:
    for cell in cells("tiny", pages=2):
        cell.copy([1, 7], [4, 2])
    rows = measure("tiny", pages=2, repetitions=1)
    assert len(rows) == 3 * (2 * 2 * 2 + 1)
    assert {row.layout for row in rows} == {"layer_first", "page_first", "page_first_direct"}
    assert {(row.direction, row.backend) for row in rows} == {
        *((direction, backend) for direction in ("backup", "load") for backend in ("reference", "direct")),
        ("to_l3", "extents"),
    }
    for row in rows:
        assert (row.pages, row.layers, row.page_bytes) == (2, 3, TINY.object_bytes(64))
        assert row.per_call_us > 0
