"""What the tests of backends share. Failures inside the shared contract are explained like those in a test module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicache.backends.lmdb_store import LmdbBackend

if TYPE_CHECKING:
    from tests.backends.store_rig import Rig

pytest.register_assert_rewrite("tests.backends.contract", "tests.backends.contract_full", "tests.backends.limits_rig")


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


@pytest.fixture
def rig(directory: Path) -> Iterator[Rig]:
    """An object store over files; modules of other stores have a fixture of this name of their own."""
    from tests.backends.store_rig import Rig  # its asserts are rewritten by then

    rig = Rig(directory)
    yield rig
    rig.store.close()
