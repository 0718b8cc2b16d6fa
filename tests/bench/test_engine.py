"""bench.engine: its ratios, and what it says where the engine is missing."""

from __future__ import annotations

import importlib.util
import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from bench.engine import REQUIREMENTS, main
from bench.engine_rows import print_engine_rows, rows_of, rows_to_document

SPEEDS = {
    ("file", "backup"): [1.0, 2.0, 4.0],
    ("file", "prefetch"): [2.0, 2.0, 2.0],
    ("hicache shm", "backup"): [3.0, 5.0, 9.0],
    ("hicache shm", "prefetch"): [5.0, 6.0, 7.0],
}


def test_ratios_are_of_the_same_round() -> None:
    rows = rows_of("sglang", "page_first", page_bytes=1 << 20, pages=8, speeds=SPEEDS, memcpy_gbps=[10.0, 10.0, 30.0])
    backup = next(row for row in rows if (row.store, row.op) == ("hicache shm", "backup"))
    assert (backup.gbps, backup.gbps_min, backup.gbps_max) == (5.0, 3.0, 9.0)
    assert backup.of_memcpy == 0.3, "of 0.3, 0.5 and 0.3"
    assert backup.of_own_store == 2.5, "of 3, 2.5 and 2.25"
    assert rows_to_document(rows)["rows"][2]["store"] == "hicache shm"


def test_the_table_has_a_line_for_each_store() -> None:
    rows = rows_of("sglang", "page_first", page_bytes=1 << 20, pages=8, speeds=SPEEDS, memcpy_gbps=[10.0, 10.0, 30.0])
    text = io.StringIO()
    print_engine_rows(rows, Console(file=text, width=160))
    [line] = [line for line in text.getvalue().splitlines() if "hicache shm" in line]
    assert "5.00 (3.0 to 9.0)" in line
    assert "6.00 (5.0 to 7.0)" in line


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is in this environment")
def test_without_the_engine_it_says_what_to_install() -> None:
    result = CliRunner().invoke(main, ["--engine", "sglang", "--quick"])
    assert result.exit_code != 0
    assert REQUIREMENTS in result.output
    assert "make engines" in result.output
