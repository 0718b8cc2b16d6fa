"""The table of README.md: each scenario has its row, each test that a row names is there, and each test has a row."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
TABLE = HERE / "README.md"
IDS = """
001 002 003 005 007 011 012 013 015 017 018 020 022 024 027 028 029 030 032 033 034 036 038 039 042 043 044 045
046 048 049 050 051 053 054 055 056 057 060 061 062 063 065 066 067 071 072 073 074 076 077 078 080 081 082 083
086 087 089 090 092 093 094 095 096 098 100 101 103 104 106 107 108 110 111 112 114 115 116 118 119 120 121 122
123 125 128 130 131 132 133 134 135 138 139 141 142 143 144 146 149 150
""".split()  # noqa: SIM905 - a list literal would be a hundred lines
PREFIXES = ("test_br_", "test_ot_")
OTHER = re.compile(r"^\| OT-(\d{3}) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+")
OUTCOMES = ("held at once", "fixed", "impossible by design", "not applicable")
ROW = re.compile(r"^\| BR-(\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str, str]]:
    """Id, what people met, outcome, tests."""
    found: list[tuple[str, str, str, str]] = ROW.findall(TABLE.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def there() -> dict[str, set[str]]:
    return scenario_tests()


def scenario_tests() -> dict[str, set[str]]:
    """Names of all tests and methods that carry an id, and the files that they are in."""
    found: dict[str, set[str]] = {}
    for file in TESTS.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if any(f"def {prefix}" in text for prefix in PREFIXES):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(PREFIXES):
                    found.setdefault(node.name, set()).add(file.name)
    return found


def ids_of(test: str) -> set[str]:
    """A test may be of several scenarios."""
    return set(re.findall(r"br_(\d{3})_", test))


def test_every_scenario_has_one_row() -> None:
    assert len(IDS) == len(set(IDS)) == 102
    assert Counter(number for number, *_ in rows()) == Counter(IDS)


def test_every_line_that_begins_like_a_row_is_one() -> None:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| BR-")]
    assert len(lines) == len(rows())


@pytest.mark.parametrize("number", IDS)
def test_a_row_says_what_came_of_it_and_names_tests_that_are_there(number: str, there: dict[str, set[str]]) -> None:
    [(_, met, outcome, tests)] = [row for row in rows() if row[0] == number]
    assert met.strip()
    assert outcome.startswith(OUTCOMES)
    named = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", tests)
    if not outcome.startswith("not applicable"):
        assert named, "a row without a test"
        assert any(number in ids_of(name) for _, name in named)
    for file, name in named:
        assert name in there, f"{name} is nowhere in the tests"
        assert not file or Path(file).name in there[name], f"{name} is not in {file}"


def test_every_test_with_an_id_has_a_row(there: dict[str, set[str]]) -> None:
    known = {number for number, *_ in rows()}
    strays = {name for name in there if name.startswith("test_br_") and not ids_of(name) <= known}
    assert not strays


def others() -> list[tuple[str, str, str, str, str]]:
    """Id, sources, what people met, outcome, tests."""
    found: list[tuple[str, str, str, str, str]] = OTHER.findall(TABLE.read_text(encoding="utf-8"))
    return found


def test_every_other_one_has_one_row_with_a_public_source_and_tests_that_are_there(there: dict[str, set[str]]) -> None:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| OT-")]
    assert len(lines) == len(others()) >= 23
    assert max(Counter(number for number, *_ in others()).values()) == 1
    for number, sources, met, outcome, tests in others():
        assert SOURCE.search(sources), f"OT-{number} has no source"
        assert met.strip()
        assert outcome.startswith(OUTCOMES)
        named = re.findall(r"`([\w/]+\.py)::(test_ot_\w+)`", tests)
        assert named, f"OT-{number} has no test"
        for file, name in named:
            assert number in name
            assert Path(file).name in there.get(name, set()), f"{name} is not in {file}"


def test_every_test_of_another_one_is_named_in_its_row(there: dict[str, set[str]]) -> None:
    named = {name for *_, tests in others() for name in re.findall(r"test_ot_\w+", tests)}
    assert {name for name in there if name.startswith("test_ot_")} == named
