"""Random damage on the medium, in every kind of store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.fuzz.media import media
from tests.security.fuzz.parsers import Target

RUNS = 25


@pytest.fixture(scope="module")
def targets() -> Iterator[list[Target]]:
    with media() as made:
        yield made


@pytest.mark.parametrize("number", range(4), ids=["lmdb", "sealed lmdb", "file", "sealed file"])
def test_a_damaged_medium_never_gives_wrong_bytes(targets: list[Target], number: int) -> None:
    for run in range(RUNS):
        targets[number].run(b"run %d" % run)
