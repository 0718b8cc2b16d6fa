"""The rows of bench.store: what one measurement says, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from bench.store_grid import size_text


@dataclass(frozen=True, slots=True)
class Row:
    """The fields that scripts rely on. ``of_limit`` is the median of the ratios within each repetition."""

    path: str
    backend: str
    op: str
    object_bytes: int
    batch: int
    clients: int
    gbps: float
    of_limit: float
    limit: str
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Spread:
    """What stands behind a row, repetition by repetition."""

    gbps: tuple[float, ...]
    limit_gbps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A row with its spread."""

    row: Row
    spread: Spread


def measured(
    path: str,
    backend: str,
    op: str,
    *,
    object_bytes: int,
    batch: int,
    clients: int,
    gbps: Sequence[float],
    limit: str,
    limit_gbps: Sequence[float],
    call_s: Sequence[float],
) -> Measured:
    """Make a row of one repetition or more: ``gbps[i]`` was measured right after ``limit_gbps[i]``."""
    row = Row(
        path,
        backend,
        op,
        object_bytes,
        batch,
        clients,
        gbps=round(statistics.median(gbps), 3),
        of_limit=round(statistics.median(speed / most for speed, most in zip(gbps, limit_gbps, strict=True)), 3),
        limit=limit,
        p50_ms=round(percentile(call_s, 0.5) * 1e3, 3),
        p99_ms=round(percentile(call_s, 0.99) * 1e3, 3),
    )
    return Measured(row, Spread(tuple(round(speed, 3) for speed in gbps), tuple(round(most, 3) for most in limit_gbps)))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of them do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def rows_to_json(rows: Sequence[Measured]) -> dict[str, object]:
    """``rows`` with exactly the fields of ``Row``, and ``spread`` with an entry for each of them, in the same order."""
    return {"rows": [asdict(one.row) for one in rows], "spread": [asdict(one.spread) for one in rows]}


def print_rows(rows: Sequence[Measured], console: Console) -> None:
    """The table for people: medians, then the least and the most."""
    table = Table(
        title="GB/s (10^9 bytes), medians with the least and the most; each limit was measured right before its row"
    )
    for name in ("path", "backend", "op"):
        table.add_column(name)
    for name in ("object", "batch", "clients", "GB/s", "spread", "of limit"):
        table.add_column(name, justify="right")
    table.add_column("limit")
    for name in ("p50 ms", "p99 ms"):
        table.add_column(name, justify="right")
    for one in rows:
        table.add_row(*_texts(one))
    console.print(table)


def _texts(one: Measured) -> list[str]:
    row, spread = one.row, one.spread
    return [
        row.path,
        row.backend,
        row.op,
        size_text(row.object_bytes),
        str(row.batch),
        str(row.clients),
        f"{row.gbps:.2f}",
        f"{min(spread.gbps):.2f}-{max(spread.gbps):.2f}",
        f"{row.of_limit:.2f}",
        f"{row.limit} {statistics.median(spread.limit_gbps):.1f}",
        f"{row.p50_ms:.2f}",
        f"{row.p99_ms:.2f}",
    ]
