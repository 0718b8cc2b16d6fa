"""Kernels run in Triton's interpreter on the CPU; with TRITON_INTERPRET=0 the same tests run on a CUDA device."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it where a kernel is defined: before any is imported

from collections.abc import Iterator

import pytest

from hicache.kernel_copies import KernelCopies
from hicache.pools import L1Pool, L2Pool
from tests.engine.conftest import Rank
from tests.kernels.devices import DEVICE


class KernelRank(Rank):
    """A rank whose copies are kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = L1Pool(self.spec, pages=12, state_slots=6, device=DEVICE)
        self.l2.close()
        self.l2 = L2Pool(self.spec, (10, 10, 4), device=DEVICE)

    def executor(self, l3: object = None, **settings: object):  # type: ignore[no-untyped-def,override]  # as in Rank
        settings.setdefault("copies", KernelCopies(self.l1, self.l2))
        return super().executor(l3, **settings)


@pytest.fixture
def rank() -> Iterator[KernelRank]:
    rank = KernelRank()
    yield rank
    for executor in rank.executors:
        executor.close()
    rank.l2.close()
