"""Kernels run in Triton's interpreter on the CPU (``tests/conftest.py``); with TRITON_INTERPRET=0 on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.copies import PoolCopies
from hicache.pools import L1Pool, L2Pool
from tests.engine.conftest import Rank
from tests.kernels.devices import DEVICE


class KernelRank(Rank):
    """A rank whose copies are kernels; staged, they have room for one or two objects at a time."""

    def __init__(self, setting: str) -> None:
        super().__init__()
        self.setting = setting
        self.l1 = L1Pool(self.spec, pages=12, state_slots=6, device=DEVICE)
        self.l2.close()
        self.l2 = L2Pool(self.spec, (10, 10, 4), device=DEVICE)

    def executor(self, l3: object = None, **settings: object):  # type: ignore[no-untyped-def,override]  # as in Rank
        settings.setdefault("copies", PoolCopies(self.l1, self.l2, setting=self.setting, staging_bytes=1100))
        return super().executor(l3, **settings)


@pytest.fixture(params=["kernel", "staged"])
def rank(request: pytest.FixtureRequest) -> Iterator[KernelRank]:
    rank = KernelRank(request.param)
    yield rank
    for executor in rank.executors:
        executor.close()
    rank.l2.close()
