"""Memory of an engine as its host pools have it, and how pages lie in it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from hicache.connectors.host_pages import HostPages, PageItem, PagesSpec, Pool
from hicache.connectors.host_pages_holds import OwnedPage, PageHolds
from tests.client.support import QUICK

PAGE_BYTES = 24 << 10
PAGES = 16
LAYERS = 3
SPEC = PagesSpec((("model", "tiny"), ("layout", "test")), PAGE_BYTES)


class EngineMemory:
    """PAGES pages in a memfd, or in anonymous memory. ``seals`` of SGLang's own is 0, and none can be added."""

    def __init__(self, *, is_memfd: bool = True, can_be_sealed: bool = True) -> None:
        self.size_bytes = PAGES * PAGE_BYTES
        self.fd: int | None = None
        if is_memfd:
            self.fd = os.memfd_create("engine", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if can_be_sealed else 0))
            os.posix_fallocate(self.fd, 0, self.size_bytes)
        self.bytes = mmap.mmap(self.fd if self.fd is not None else -1, self.size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.holds = PageHolds()

    @property
    def pool(self) -> Pool:
        return Pool(self.address, self.size_bytes, self.fd)

    def whole(self, page: int) -> tuple[tuple[int, int], ...]:
        """As MLA has it: one extent."""
        return ((self.address + page * PAGE_BYTES, PAGE_BYTES),)

    def halves(self, page: int) -> tuple[tuple[int, int], ...]:
        """K and V in different halves of the pool."""
        half = PAGE_BYTES // 2
        return tuple((self.address + plane * self.size_bytes // 2 + page * half, half) for plane in range(2))

    def by_layer(self, page: int) -> tuple[tuple[int, int], ...]:
        """K and V of each layer, as layer_first has them."""
        part = PAGE_BYTES // (2 * LAYERS)
        return tuple(
            (self.address + number * self.size_bytes // (2 * LAYERS) + page * part, part)
            for number in range(2 * LAYERS)
        )

    def items(self, shape: str, *, prefix: str = "") -> list[PageItem]:
        """All pages in one of the shapes: ``whole``, ``halves``, ``by_layer``."""
        return [
            PageItem(f"{prefix}{page}".encode(), getattr(self, shape)(page), OwnedPage(self.holds, page))
            for page in range(PAGES)
        ]

    def read(self, item: PageItem) -> bytes:
        return b"".join(ctypes.string_at(address, size_bytes) for address, size_bytes in item.extents)

    def fill(self, pattern: bytes) -> None:
        self.bytes[:] = (pattern * (self.size_bytes // len(pattern) + 1))[: self.size_bytes]

    def randomise(self) -> None:
        self.bytes[:] = os.urandom(self.size_bytes)

    def is_sealed(self) -> bool:
        assert self.fd is not None
        return bool(fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)

    def close_fd(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


@contextlib.contextmanager
def host_pages(
    address: str, *memories: EngineMemory, spec: PagesSpec = SPEC, deadline_s: float = 10.0, token: str = ""
) -> Iterator[HostPages]:
    """Connected, and closed at the end."""
    pages = HostPages(
        address,
        spec=spec,
        pools=[memory.pool for memory in memories],
        deadline_s=deadline_s,
        token=token,
        settings=QUICK,
    )
    try:
        assert pages.wait_ready(timeout_s=20)
        yield pages
    finally:
        pages.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
