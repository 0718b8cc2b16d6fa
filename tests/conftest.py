"""What the tests of the core share."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it where a kernel is defined: before any is imported

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.core.small_engine import Make, SmallEngine

pytest.register_assert_rewrite("tests.backends.payloads", "tests.backends.store_rig")  # other folders import them, too

# How long an example takes says nothing about whether it is right.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines that are closed at the end."""
    from tests.core.small_engine import HYBRID, SmallEngine  # torch is loaded only where it is used

    engines: list[SmallEngine] = []

    def engine(*groups: object, **settings: object) -> SmallEngine:
        engines.append(SmallEngine(groups or HYBRID, **settings))  # type: ignore[arg-type]
        return engines[-1]

    yield engine
    for made in engines:
        made.close()
