"""The rows of bench.store: exactly the promised fields, honest ratios, a table that can be read."""

from __future__ import annotations

import io

from rich.console import Console

from bench.store_rows import measured, percentile, print_rows, rows_to_json

FIELDS = [
    "path",
    "backend",
    "op",
    "object_bytes",
    "batch",
    "clients",
    "gbps",
    "of_limit",
    "limit",
    "p50_ms",
    "p99_ms",
]


def example(gbps: tuple[float, ...] = (2.0, 8.0, 4.0), limits: tuple[float, ...] = (10.0, 10.0, 40.0)):
    return measured(
        "memory",
        "lmdb",
        "get",
        object_bytes=1 << 20,
        batch=32,
        clients=1,
        gbps=gbps,
        limit="memcpy",
        limit_gbps=limits,
        call_s=[0.001 * number for number in range(1, 101)],
    )


def test_a_row_has_exactly_the_promised_fields():
    document = rows_to_json([example()])
    assert list(document["rows"][0]) == FIELDS
    assert len(document["spread"]) == len(document["rows"])


def test_the_share_of_the_limit_is_taken_within_each_repetition():
    row = example().row
    assert row.gbps == 4.0
    assert row.of_limit == 0.2  # of 0.2, 0.8 and 0.1; the medians would say 0.4


def test_percentiles_are_of_single_calls():
    row = example().row
    assert row.p50_ms == 51.0
    assert row.p99_ms == 100.0
    assert percentile([], 0.5) == 0.0


def test_the_table_shows_speed_spread_and_limit():
    text = io.StringIO()
    print_rows([example()], Console(file=text, width=160))
    for expected in ("lmdb", "1 MiB", "4.00", "2.00-8.00", "0.20", "memcpy 10.0", "51.00"):
        assert expected in text.getvalue()
