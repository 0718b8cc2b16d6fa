"""What tests of L2 have beside it: memory that is pinned in name only, and what a process has mapped and open."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.pools.registration import RegistrationFailed


class FakeRegistrar:
    """Pins in name only, up to a limit."""

    name = "fake"

    def __init__(
        self, *, region_bytes_max: int = 1 << 40, total_bytes_max: int = 1 << 40, counts_against_memlock: bool = False
    ) -> None:
        self.counts_against_memlock = counts_against_memlock
        self.region_bytes_max = region_bytes_max
        self.total_bytes_max = total_bytes_max
        self.regions: dict[int, int] = {}
        self.unregister_fails = False

    def register(self, address: int, size_bytes: int) -> None:
        if size_bytes > self.region_bytes_max:
            raise RegistrationFailed(f"max_mr_size is {self.region_bytes_max}")
        if sum(self.regions.values()) + size_bytes > self.total_bytes_max:
            raise RegistrationFailed("out of memory")
        self.regions[address] = size_bytes

    def unregister(self, address: int) -> None:
        if self.unregister_fails:
            raise RegistrationFailed("gone")
        del self.regions[address]


def mapped_pools() -> int:
    return sum("hicache-l2" in line for line in Path("/proc/self/maps").read_text().splitlines())


def open_memfds() -> int:
    links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    targets = []
    for link in links:
        try:
            targets.append(os.readlink(link))
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return sum("hicache-l2" in target for target in targets)


class CudartDouble:
    """Answers as the CUDA runtime does: 0, or an error."""

    def __init__(self, *, status: int) -> None:
        self.status = status
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.calls.append(("register", size_bytes))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.status


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No pool stays mapped, and no memfd open."""
    gc.collect()
    mapped, opened = mapped_pools(), open_memfds()
    yield
    gc.collect()
    assert mapped_pools() <= mapped
    assert open_memfds() <= opened
