"""What the tests of backends share. Failures inside the shared contract are explained like those in a test module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.lmdb_store import LmdbBackend

pytest.register_assert_rewrite("tests.backends.contract", "tests.backends.limits_rig", "tests.backends.payloads")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the store of a test is made."""
    return tmp_path / "store"


@pytest.fixture
def backend(directory: Path) -> Iterator[LmdbBackend]:
    """An LMDB store of 16 MiB; modules of other backends have a fixture of this name of their own."""
    backend = LmdbBackend.open(directory, capacity_bytes=16 << 20)
    yield backend
    backend.close()
