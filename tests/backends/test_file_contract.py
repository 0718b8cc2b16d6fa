"""The contract of backends, kept by files."""

from __future__ import annotations

import os
from pathlib import Path

from hicache.backends.base import Backend
from hicache.backends.file_layout import object_path
from hicache.backends.file_store import FileBackend
from tests.backends.contract import BackendContract


class TestFileBackend(BackendContract):
    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        return FileBackend.open(directory, capacity_bytes=capacity_bytes)

    def swap(self, directory: Path, first: bytes, second: bytes) -> None:
        paths = [object_path(str(directory / "objects"), name) for name in (first, second)]
        os.rename(paths[0], directory / "aside")
        os.rename(paths[1], paths[0])
        os.rename(directory / "aside", paths[1])

    def cut_short(self, directory: Path, name: bytes) -> None:
        path = object_path(str(directory / "objects"), name)
        os.truncate(path, os.path.getsize(path) - 10_000)
