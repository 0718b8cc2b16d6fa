"""The tables in docs/faults.md are what happens."""

from __future__ import annotations

import pytest

from tests.faults.table import BACKENDS, documented, markdown, run_backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operation_meets_every_fault_as_documented_and_nobody_else_does(backend: str) -> None:
    assert markdown(backend, run_backend(backend)) == documented(backend), "run python -m tests.faults.table --write"
