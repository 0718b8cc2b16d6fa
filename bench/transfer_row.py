"""A row of `bench.transfer`: how fast one call was, beside its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.table import Table

Direction: TypeAlias = Literal["backup", "load", "to_l3"]
Layout: TypeAlias = Literal["layer_first", "page_first", "page_first_direct"]

_SHOWN = (
    *("model", "pages", "layout", "l1", "backend", "direction", "extents"),
    *("gbps", "limit_gbps", "of_limit", "per_call_us"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians. ``to_l3``: a page out of L2 into one piece, which takes one copy for each of its ``extents`` there."""

    model: str
    direction: Direction
    layout: Layout
    l1: str
    backend: str
    device: str
    page_bytes: int
    pages: int  # or states
    layers: int
    extents: int
    gbps: float
    limit_gbps: float
    of_limit: float
    per_call_us: float


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """For people."""
    table = Table(title=title)
    for name in _SHOWN:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(str(getattr(row, name)) for name in _SHOWN))
    return table
