"""A service manager for each test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.manager import Manager


@pytest.fixture
def manager() -> Iterator[Manager]:
    """It has a folder with a name short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="hs-") as path:
        played = Manager(Path(path))
        yield played
        played.close()
