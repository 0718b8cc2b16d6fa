"""The contract of backends, kept through a fault-injecting one while no fault is armed."""

from __future__ import annotations

from pathlib import Path

from hicache.backends.base import Backend
from hicache.backends.faulty import FaultyBackend
from tests.backends.test_file_contract import TestFileBackend as FileContract


class TestFaultyBackend(FileContract):
    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        return FaultyBackend(super().open(directory, capacity_bytes=capacity_bytes))


del FileContract  # its own tests run where it is defined
