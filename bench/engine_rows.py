"""The rows of bench.engine: what one store did in an engine, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

OPS = ("backup", "prefetch")
OWN_STORE = "file"  # the engine's own, which the others are compared with


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One direction of one store. Ratios are medians of those within each round."""

    engine: str
    layout: str
    page_bytes: int
    pages: int
    store: str
    op: str
    gbps: float
    gbps_min: float
    gbps_max: float
    of_memcpy: float
    of_own_store: float


def rows_of(
    engine: str,
    layout: str,
    *,
    page_bytes: int,
    pages: int,
    speeds: Mapping[tuple[str, str], Sequence[float]],
    memcpy_gbps: Sequence[float],
) -> list[EngineRow]:
    """``speeds[store, op]`` and ``memcpy_gbps`` are GB/s, round by round."""
    return [
        EngineRow(
            engine,
            layout,
            page_bytes,
            pages,
            store,
            op,
            gbps=round(statistics.median(of_rounds), 2),
            gbps_min=round(min(of_rounds), 2),
            gbps_max=round(max(of_rounds), 2),
            of_memcpy=_ratio(of_rounds, memcpy_gbps),
            of_own_store=_ratio(of_rounds, speeds[OWN_STORE, op]),
        )
        for (store, op), of_rounds in speeds.items()
    ]


def _ratio(speeds: Sequence[float], others: Sequence[float]) -> float:
    return round(statistics.median(speed / other for speed, other in zip(speeds, others, strict=True)), 2)


def rows_to_document(rows: Sequence[EngineRow]) -> dict[str, Any]:  # Any: a JSON object
    """``rows`` for scripts."""
    return {"rows": [asdict(row) for row in rows]}


def print_engine_rows(rows: Sequence[EngineRow], console: Console) -> None:
    """One line for each store, both directions."""
    table = Table("layout", "page", "pages", "store")
    for op in OPS:
        for column in (f"{op} GB/s", "of memcpy", f"of {OWN_STORE}"):
            table.add_column(column, justify="right")
    cells: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        place: tuple[str, ...] = (row.layout, f"{row.page_bytes >> 20} MiB", str(row.pages), row.store)
        cells.setdefault(place, []).extend(
            (f"{row.gbps:.2f} ({row.gbps_min:.1f} to {row.gbps_max:.1f})", str(row.of_memcpy), str(row.of_own_store))
        )
    for place, numbers in cells.items():
        table.add_row(*place, *numbers)
    console.print(table)
