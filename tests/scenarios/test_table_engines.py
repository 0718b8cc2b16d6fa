"""The table of others with engines in README.md: each row has a source and its tests, each test has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.scenarios.test_table import OUTCOMES, TABLE, TESTS

ROW = re.compile(r"^\| OE-(\d\d) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+")
ROWS: list[tuple[str, str, str, str, str]] = ROW.findall(TABLE.read_text(encoding="utf-8"))


def carried() -> dict[str, set[str]]:
    """Names of the tests that carry an id, and the files that they are in."""
    found: dict[str, set[str]] = {}
    for file in TESTS.rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        if "def test_oe_" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_oe_"):
                    found.setdefault(node.name, set()).add(file.name)
    return found


def test_rows_are_numbered_without_a_gap_and_every_line_is_one() -> None:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| OE-")]
    assert [number for number, *_ in ROWS] == [f"{number:02}" for number in range(1, len(lines) + 1)]


@pytest.mark.parametrize(("number", "source", "met", "outcome", "tests"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_its_source_what_came_of_it_and_tests_that_are_there(
    number: str, source: str, met: str, outcome: str, tests: str
) -> None:
    assert all(SOURCE.fullmatch(each) for each in source.split(", "))
    assert met.strip()
    assert outcome.startswith(OUTCOMES)
    there = carried()
    named = [(file, name) for file, name in re.findall(r"`(?:([\w/]+\.py)::)?(test_oe_\w+)`", tests)]
    assert named, "a row without a test"
    for file, name in named:
        assert name.startswith(f"test_oe_{number}_")
        assert name in there, f"{name} is nowhere in the tests"
        assert not file or Path(file).name in there[name], f"{name} is not in {file}"


def test_every_test_with_an_id_is_in_its_row() -> None:
    named = {name for *_, tests in ROWS for name in re.findall(r"test_oe_\w+", tests)}
    assert carried().keys() <= named
