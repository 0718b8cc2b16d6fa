"""An engine rank on a CPU, in small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache.executor import Executor
from hicache.pools import L1Pool, L2Pool
from hicache.spec import CacheSpec
from tests.engine.fakes import Completions
from tests.engine.specs import hybrid_spec


class Rank:
    """Pools of the hybrid spec, and executors over them."""

    def __init__(self) -> None:
        self.spec: CacheSpec = hybrid_spec()
        self.l1 = L1Pool(self.spec, pages=12, state_slots=6)
        self.l2 = L2Pool(self.spec, (10, 10, 4))
        self.completions = Completions()
        self.executors: list[Executor] = []

    def executor(self, l3: Any = None, **settings: Any) -> Executor:
        executor = Executor(self.spec, self.l1, self.l2, l3, on_complete=self.completions, **settings)
        self.executors.append(executor)
        return executor


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    for executor in rank.executors:
        executor.close()
    rank.l2.close()


@pytest.fixture
def clock() -> Callable[[], float]:
    """Moves by a second whenever it is read."""
    ticks = iter(range(10**9))
    return lambda: float(next(ticks))
