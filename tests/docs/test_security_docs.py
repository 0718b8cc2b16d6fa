"""Every claim of docs/security.md names tests, and those exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:tests/)?[\w/]+\.py)(?:::(\w+))?`")


def claims() -> list[str]:
    text = (ROOT / "docs" / "security.md").read_text()
    table = text.partition("## What is defended")[2].partition("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("| ") and not line.startswith(("| claim", "| ---"))]


def test_every_claim_names_a_test_that_exists() -> None:
    assert len(claims()) > 10
    for claim in claims():
        named = NAMED.findall(claim)
        assert named, claim
        for path, name in named:
            file = ROOT / (path if path.startswith("tests/") else f"tests/security/{path}")
            functions = {
                node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)
            }
            assert not name or name in functions, f"{path} has no {name}"
            assert any(function.startswith("test_") for function in functions), file


def test_a_test_that_is_not_there_would_be_found() -> None:
    assert NAMED.findall("`test_tls.py::test_x`, `tests/daemon/test_y.py`") == [
        ("test_tls.py", "test_x"),
        ("tests/daemon/test_y.py", ""),
    ]
