"""What holds the model to account: faults put into the directory are found, and every mutant still fits the code."""

from __future__ import annotations

import pytest

from tests.core.mutants import MUTANTS, Mutant, hunt

CHEAPEST = (
    "a page is published before all of its groups have arrived",
    "a share of L2 is not given back",
    "a request is not told that what it waits for has come",
    "what is late is not accounted for",
)
STEPS_MAX = 1500


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.name in CHEAPEST], ids=lambda m: m.name)
def test_a_fault_in_the_directory_is_found_by_walking(mutant: Mutant) -> None:
    assert hunt(mutant, steps_max=STEPS_MAX) is not None


def test_every_mutant_fits_the_code_and_leaves_nothing_behind() -> None:
    for mutant in MUTANTS:
        codes = [edit.function.__code__ for edit in mutant.edits]  # type: ignore[attr-defined]
        with mutant.applied():
            assert all(
                edit.function.__code__ is not code  # type: ignore[attr-defined]
                for edit, code in zip(mutant.edits, codes, strict=True)
            )
        assert [edit.function.__code__ for edit in mutant.edits] == codes  # type: ignore[attr-defined]
    assert {mutant.name for mutant in MUTANTS} >= set(CHEAPEST)
